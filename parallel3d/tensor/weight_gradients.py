"""Deferred and in-place weight gradients.

Zero-bubble schedules (arXiv:2401.10241) defer them to the action W: the backward of a linear layer
then computes only its input's gradient, and records the product for its weight's.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

_Product = Callable[[], Tensor]
_HALF = (torch.bfloat16, torch.float16)


class Factors(NamedTuple):
    """The factors of a weight's gradient, for devices that sum such products in fp32.

    The gradient is grad^T x, of grad [..., out] and x [..., in]; zero but for `rows` of a weight of
    this shape.
    """

    grad: Tensor
    x: Callable[[], Tensor]
    shape: torch.Size
    rows: slice | None = None

    def add_to(self, total: Tensor | None) -> Tensor:
        """Add the gradient to `total` in fp32, without a tensor for the product; return the sum."""
        grad = self.grad.flatten(0, -2).t()
        x = self.x().flatten(0, -2)
        if total is None and self.rows is None:
            return sum_in_fp32(None, grad, x).view(self.shape)
        if total is None:
            total = x.new_zeros(self.shape, dtype=torch.float32)
        sum_in_fp32(total.view(-1, x.shape[1]) if self.rows is None else total[self.rows], grad, x)
        return total


def sum_in_fp32(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """Return `total` (fp32), to which the product of half-precision matrices is added in place."""
    if total is None:
        return torch.mm(a, b, out_dtype=torch.float32)
    added: Tensor = torch.ops.aten.addmm.dtype_out(total, a, b, torch.float32, out=total)
    return added


def sums_in_fp32(device: torch.device, factor: torch.dtype, total: torch.dtype) -> bool:
    """Return True if the device adds products of such factors to a total inside the product."""
    return total == torch.float32 and factor in _HALF and _has_sums(device, factor)


@cache
def _has_sums(device: torch.device, dtype: torch.dtype) -> bool:
    """Try a small product: torch's versions and devices differ in what they take."""
    if device.type != "cuda":
        return False
    a = torch.ones(16, 16, dtype=dtype, device=device)
    try:
        total = sum_in_fp32(sum_in_fp32(None, a, a), a, a)
    except (AttributeError, RuntimeError, TypeError):
        return False
    return bool((total == 32).all())


class WeightGradients:
    """Products still to be computed, each with the parameter whose gradient it adds to."""

    def __init__(self) -> None:
        self._products: list[tuple[Tensor, _Product, Factors | None]] = []

    def add(self, parameter: Tensor, product: _Product, factors: Factors | None = None) -> None:
        """Record a product; its factors stay alive until `make`."""
        self._products.append((parameter, product, factors))

    @torch.no_grad()
    def make(self) -> None:
        """Compute all recorded products in the order of the backward, freeing each in turn."""
        self._products.reverse()
        while self._products:
            _accumulate(*self._products.pop())


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


def compute_or_defer(
    parameter: Tensor, product: _Product, factors: Factors | None = None
) -> Tensor | None:
    """Return the weight gradient `product()`, or None if it is deferred or added in place.

    `factors`: those of the product, if it is one of matrices.
    """
    if _collecting is not None:
        _collecting.add(parameter, product, factors)
        return None
    if in_place_sum(parameter) is None:
        return _gradient(parameter, product, factors)
    _accumulate(parameter, product, factors)
    return None


def _gradient(parameter: Tensor, product: _Product, factors: Factors | None) -> Tensor:
    """Return a gradient to which others will be added, in their type where the device can."""
    if factors is not None and _in_product(parameter, factors.grad):
        return factors.add_to(None)
    return product()


def _in_product(parameter: Tensor, factor: Tensor) -> bool:
    total = parameter.grad_dtype or parameter.dtype
    return sums_in_fp32(factor.device, factor.dtype, total)


def _accumulate(parameter: Tensor, product: _Product, factors: Factors | None) -> None:
    """Add to `parameter.grad` as autograd would, in the parameter's `grad_dtype`."""
    if parameter.grad is not None:
        if factors is not None and _in_product(parameter, factors.grad):
            factors.add_to(parameter.grad)
        else:
            parameter.grad.add_(product())
        return
    gradient = _gradient(parameter, product, factors)
    gradient = gradient.to(parameter.grad_dtype or gradient.dtype)
    if parameter.shape == gradient.shape:
        parameter.grad = gradient
        return
    # ZeRO-3 has released the parameter, but torch requires a gradient of the parameter's shape.
    released = parameter.data
    parameter.data = gradient.new_empty(1, dtype=released.dtype).expand(gradient.shape)
    parameter.grad = gradient
    parameter.data = released
