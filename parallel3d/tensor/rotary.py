"""Rotary positions (RoFormer, arXiv:2104.09864) and the scalings of their frequencies.

Feature i of a head is rotated with feature i + size / 2, as in the checkpoints of transformers. The
paper pairs neighbouring features, which differs only in their order.
"""

from collections.abc import Callable
from math import ceil, floor, log, tau

import torch
from torch import Tensor, nn

from parallel3d.tensor.context import LayerContext
from parallel3d.tensor.pointwise import rotate, scale
from parallel3d.tensor.segments import Segments


def llama3_scaling(
    frequencies: Tensor, *, factor: float, low: float, high: float, length: int
) -> Tensor:
    """Scale frequencies as Llama 3.1 does (its reference code; arXiv:2407.21783, 3.4.2).

    Frequencies with fewer than `low` turns over the original `length` are divided by `factor`;
    those with more than `high` are unchanged. Between them the change is linear in the turns.
    """
    turns = length * frequencies / tau
    unscaled = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (unscaled + (1 - unscaled) / factor)


def yarn_scaling(
    frequencies: Tensor, *, theta: float, factor: float, slow: float, fast: float, length: int
) -> Tensor:
    """Scale frequencies as YaRN does (arXiv:2309.00071, section 3.2): [pairs] -> [pairs].

    Frequencies with fewer than `slow` turns over the original `length` are divided by `factor`;
    those with more than `fast` are unchanged. Between them the change is linear in the number of
    the pair of features. As in transformers, the range begins and ends at whole pairs.
    """
    pairs = len(frequencies)
    first = max(floor(pairs * log(length / (fast * tau)) / log(theta)), 0)
    last = min(ceil(pairs * log(length / (slow * tau)) / log(theta)), 2 * pairs - 1)
    numbers = torch.arange(pairs, dtype=torch.float32, device=frequencies.device)
    scaled = ((numbers - first) / (last - first or 0.001)).clamp(0, 1)
    return frequencies * (1 - scaled + scaled / factor)


class Rotary(nn.Module):
    """Rotary positions of queries and keys.

    Only the first `size` features of a head are rotated (GPT-NeoX, arXiv:2204.06745, section 2.1,
    rotates part of a head). The module has no parameter or buffer: angles are fp32 under any
    precision.

    - `scaling`: of the frequencies in radians per token [pairs] -> [pairs]; None: no change.
    - `factor`: multiplies cos and sin, and so rotated queries and keys.
    """

    def __init__(
        self,
        size: int,
        theta: float,
        *,
        context: LayerContext,
        scaling: Callable[[Tensor], Tensor] | None = None,
        factor: float = 1.0,
    ) -> None:
        super().__init__()
        self.rotate = rotate.compiled_if(context.pointwise)
        self.size = size
        self.theta = theta
        self.scaling = scaling
        self.factor = factor
        self._tables: tuple[Tensor, Tensor] | None = None

    def forward(self, q: Tensor, k: Tensor, segments: Segments | None = None) -> tuple[Tensor, ...]:
        """Rotate q, k [batch, heads, seq, head size] by the segments' positions.

        None means positions 0, 1, ... The cos and sin are computed in fp32 and rounded to q's
        dtype.
        """
        cos, sin = self._cos_sin(q, q.shape[-2] if segments is None else segments.seq)
        if segments is not None:
            positions = segments.positions
            # [batch, 1, seq, size]
            cos = cos[positions].unsqueeze(1)
            sin = sin[positions].unsqueeze(1)
        return self.rotate(q, k, cos, sin)

    def frequencies(self, device: torch.device) -> Tensor:
        """Return the radians per token of each pair of features: [size / 2], fp32."""
        exponents = torch.arange(0, self.size, 2, dtype=torch.float32, device=device) / self.size
        frequencies = 1.0 / self.theta**exponents
        return frequencies if self.scaling is None else self.scaling(frequencies)

    def _cos_sin(self, x: Tensor, seq: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin [seq, size] of positions 0, 1, ... in the dtype of x, cached."""
        if torch.compiler.is_compiling():  # the block's own kernels compute them
            return self._tables_of(x, seq)
        if self._tables is not None:
            cos, _ = self._tables
            if len(cos) == seq and cos.device == x.device and cos.dtype == x.dtype:
                return self._tables
        # Not an inference tensor, even if an evaluation comes first: training uses it too.
        with torch.inference_mode(False), torch.no_grad():
            self._tables = self._tables_of(x, seq)
        return self._tables

    def _tables_of(self, x: Tensor, seq: int) -> tuple[Tensor, Tensor]:
        here = torch.arange(seq, dtype=torch.float32, device=x.device)
        angles = torch.outer(here, self.frequencies(x.device)).repeat(1, 2)  # [seq, size]
        cos = scale(angles.cos(), self.factor)
        sin = scale(angles.sin(), self.factor)
        return cos.to(x.dtype), sin.to(x.dtype)
