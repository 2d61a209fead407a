"""Weight gradients that are made after the backward pass: zero-bubble's W (arXiv:2401.10241).

While they are held back, the backward of a linear layer gives its input's gradient alone, and notes
the product that gives its weight's.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_Product = Callable[[], Tensor]


class WeightGradients:
    """Products still to be computed, each with the parameter whose gradient it adds to."""

    def __init__(self) -> None:
        self._products: list[tuple[Tensor, _Product]] = []

    def add(self, parameter: Tensor, product: _Product) -> None:
        """Note a product, and keep its factors alive."""
        self._products.append((parameter, product))

    @torch.no_grad()
    def make(self) -> None:
        """Compute all noted products, in the order of the backward pass, freeing each in turn."""
        self._products.reverse()
        while self._products:
            parameter, product = self._products.pop()
            _accumulate(parameter, product())


# Autograd runs backwards of a device in a thread of its own, so this is no thread's.
_collecting: WeightGradients | None = None


@contextmanager
def held_back() -> Iterator[WeightGradients]:
    """Have backwards inside the context hold the weight gradients of linear layers back."""
    global _collecting
    assert _collecting is None
    _collecting = WeightGradients()
    try:
        yield _collecting
    finally:
        _collecting = None


def is_holding_back() -> bool:
    """Whether weight gradients are held back now."""
    return _collecting is not None


_in_place = False


@contextmanager
def added_in_place() -> Iterator[None]:
    """Have backwards inside the context add linear layers' weight gradients; no hook sees them."""
    global _in_place
    before, _in_place = _in_place, True
    try:
        yield
    finally:
        _in_place = before


def sum_so_far(parameter: Tensor) -> Tensor | None:
    """The tensor that a weight's gradient is added to now; None: autograd gets it, or it waits."""
    return parameter.grad if _in_place and _collecting is None else None


def now_or_later(parameter: Tensor, product: _Product) -> Tensor | None:
    """The weight gradient that `product` computes; None where it is held back or added in place."""
    if _collecting is not None:
        _collecting.add(parameter, product)
        return None
    if sum_so_far(parameter) is None:
        return product()
    _accumulate(parameter, product())
    return None


def _accumulate(parameter: Tensor, gradient: Tensor) -> None:
    """Add to `parameter.grad`, as autograd would: in the type that the parameter asks for."""
    if parameter.grad is not None:
        parameter.grad.add_(gradient)
        return
    gradient = gradient.to(parameter.grad_dtype or gradient.dtype)
    if parameter.shape == gradient.shape:
        parameter.grad = gradient
        return
    # ZeRO-3 has released the parameter, and torch wants a gradient to have its shape.
    released = parameter.data
    parameter.data = gradient.new_empty(1, dtype=released.dtype).expand(gradient.shape)
    parameter.grad = gradient
    parameter.data = released
