"""The multipliers of a parametrisation, where activations pass them."""

from torch import Tensor


def scaled(x: Tensor, factor: float) -> Tensor:
    """x [...] times a factor -> [...]; without one the very tensor, in no more memory."""
    return x if factor == 1 else x * factor
