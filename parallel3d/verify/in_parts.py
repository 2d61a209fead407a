"""Products that round as those of tensor-parallel ranks do, in one process."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class ProductsInParts(TorchFunctionMode):
    """Add linear layers up in parts, each rounded, inside the context.

    Tensor-parallel ranks round their part of a sum before the parts are added: forwards where
    inputs are cut, and backwards where outputs are. Here both are, because a layer may be either.
    """

    def __init__(self, num_parts: int) -> None:
        """- `num_parts`: the ranks of a tensor-parallel group."""
        super().__init__()
        self._num_parts = num_parts

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call the function, or its counterpart in parts; see TorchFunctionMode."""
        kwargs = kwargs or {}
        if func is F.linear:
            return self._linear(*args, **kwargs)
        if func is torch.addmm and not kwargs:  # GPT-2's weights are [in, out]
            bias, x, weight = args
            return self._linear(x, weight.t(), bias)
        return func(*args, **kwargs)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., in], weight [out, in] -> [..., out]."""
        outputs = []
        for rows in weight.chunk(self._num_parts, 0):
            parts = zip(x.chunk(self._num_parts, -1), rows.chunk(self._num_parts, 1), strict=True)
            first, *others = [F.linear(*part) for part in parts]
            outputs.append(sum(others, first))  # [..., out / parts]
        y = torch.cat(outputs, -1)
        return y if bias is None else y + bias
