"""Deferred and in-place weight gradients.

Zero-bubble schedules (arXiv:2401.10241) defer them to the action W: the backward of a linear layer
then computes only its input's gradient, and records the product for its weight's.
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
        """Record a product; its factors stay alive until `make`."""
        self._products.append((parameter, product))

    @torch.no_grad()
    def make(self) -> None:
        """Compute all recorded products in the order of the backward, freeing each in turn."""
        self._products.reverse()
        while self._products:
            parameter, product = self._products.pop()
            _accumulate(parameter, product())


# Not thread-local: autograd runs a device's backwards in another thread.
_collecting: WeightGradients | None = None


@contextmanager
def defer_weight_gradients() -> Iterator[WeightGradients]:
    """Defer the weight gradients of linear layers of all backwards inside the context."""
    global _collecting
    assert _collecting is None
    _collecting = WeightGradients()
    try:
        yield _collecting
    finally:
        _collecting = None


def is_deferring() -> bool:
    """Return True if weight gradients are being deferred."""
    return _collecting is not None


_in_place = False


@contextmanager
def accumulate_in_place() -> Iterator[None]:
    """Add linear layers' weight gradients to `.grad` in place; autograd's hooks do not run."""
    global _in_place
    before = _in_place
    _in_place = True
    try:
        yield
    finally:
        _in_place = before


def in_place_sum(parameter: Tensor) -> Tensor | None:
    """Return the tensor to which a weight's gradient is added in place.

    None if autograd accumulates it, if it is deferred, or if there is no gradient yet.
    """
    return parameter.grad if _in_place and _collecting is None else None


def compute_or_defer(parameter: Tensor, product: _Product) -> Tensor | None:
    """Return the weight gradient `product()`, or None if it is deferred or added in place."""
    if _collecting is not None:
        _collecting.add(parameter, product)
        return None
    if in_place_sum(parameter) is None:
        return product()
    _accumulate(parameter, product())
    return None


def _accumulate(parameter: Tensor, gradient: Tensor) -> None:
    """Add to `parameter.grad` as autograd would, in the parameter's `grad_dtype`."""
    if parameter.grad is not None:
        parameter.grad.add_(gradient)
        return
    gradient = gradient.to(parameter.grad_dtype or gradient.dtype)
    if parameter.shape == gradient.shape:
        parameter.grad = gradient
        return
    # ZeRO-3 has released the parameter, but torch requires a gradient of the parameter's shape.
    released = parameter.data
    parameter.data = gradient.new_empty(1, dtype=released.dtype).expand(gradient.shape)
    parameter.grad = gradient
    parameter.data = released
