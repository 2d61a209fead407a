"""Rotary positions (RoFormer, arXiv:2104.09864), and Llama 3.1's scaling of their frequencies.

Feature i of a head turns together with feature i + size / 2, as in the checkpoints of transformers;
the paper pairs neighbours, which is the same up to the order of the features.
"""

from dataclasses import dataclass
from math import tau

import torch
from torch import Tensor, nn

from parallel3d.tensor.pointwise import turn


@dataclass(frozen=True)
class FrequencyScaling:
    """Llama 3.1's rule: turns slower than `low` over `original_length` become `factor` slower.

    Turns faster than `high` stay as they are; between the two the change fades linearly in the
    number of turns (the reference code of Llama 3.1; arXiv:2407.21783, section 3.4.2).
    """

    factor: float
    low: float
    high: float
    original_length: int

    def __call__(self, frequencies: Tensor) -> Tensor:
        """frequencies in radians a token -> the same shape."""
        turns = self.original_length * frequencies / tau
        kept = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)


class Rotary(nn.Module):
    """Rotary positions of queries and keys, by which their products tell distances.

    Of a head wider than `size` the first `size` features turn (as in GPT-NeoX, arXiv:2204.06745,
    section 2.1). There is no parameter and no buffer: angles are fp32 under any precision.
    """

    def __init__(self, size: int, theta: float, scaling: FrequencyScaling | None = None) -> None:
        super().__init__()
        self.size, self.theta, self.scaling = size, theta, scaling
        self._tables: tuple[Tensor, Tensor] | None = None

    def forward(self, q: Tensor, k: Tensor, positions: Tensor | None = None) -> tuple[Tensor, ...]:
        """q, k [batch, heads, seq, head size] -> the same; `positions` [batch, seq], or 0, 1, ...

        Positions are below seq. Angles become cos and sin in fp32 and are rounded to q's type.
        """
        cos, sin = self._cos_sin(q)
        if positions is not None:
            # [batch, 1, seq, size]
            cos, sin = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
        return turn(q, k, cos, sin)

    def frequencies(self, device: torch.device) -> Tensor:
        """Radians per token of each pair of features: [size / 2], fp32."""
        exponents = torch.arange(0, self.size, 2, dtype=torch.float32, device=device) / self.size
        frequencies = 1.0 / self.theta**exponents
        return frequencies if self.scaling is None else self.scaling(frequencies)

    def _cos_sin(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Of positions 0, 1, ... for x [..., seq, any]: [seq, size] each, kept for the next x."""
        if torch.compiler.is_compiling():  # in the block's own kernels: nothing is kept
            return self._tables_of(x)
        seq, kept = x.shape[-2], self._tables
        stale = kept is None or len(kept[0]) != seq
        if stale or kept is None or (kept[0].device, kept[0].dtype) != (x.device, x.dtype):
            # Not an inference tensor, even where an evaluation comes first: training keeps it.
            with torch.inference_mode(False), torch.no_grad():
                kept = self._tables = self._tables_of(x)
        return kept

    def _tables_of(self, x: Tensor) -> tuple[Tensor, Tensor]:
        here = torch.arange(x.shape[-2], dtype=torch.float32, device=x.device)
        angles = torch.outer(here, self.frequencies(x.device)).repeat(1, 2)  # [seq, size]
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.size}, theta={self.theta}" + (f", {self.scaling}" if self.scaling else "")
