"""Dropout whose mask depends only on where it is applied.

The mask is therefore equal on ranks with replicated activations and in recomputation, and a
checkpoint needs no generator state.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel3d.tensor.collectives import sequence_part
from parallel3d.tensor.compiled import graph_break
from parallel3d.tensor.random_key import RandomKey
from parallel3d.tensor.segments import Dealt


class Dropout(nn.Module):
    """Dropout at a named place.

    `split_over`: the group over which the activation is split; None if it is replicated. `seed()`
    also serves operators that draw from the device's default generator themselves.
    """

    def __init__(
        self,
        p: float,
        place: str,
        *,
        key: RandomKey,
        split_over: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.p = p
        self.place = place
        self.key = key
        self.split_over = split_over

    @property
    def active_p(self) -> float:
        """The probability of dropping an element now: 0 in evaluation."""
        return self.p if self.training else 0.0

    def seed(self, device: torch.device) -> None:
        """Seed the next random draw on `device` for this place."""
        if self.active_p > 0:
            self._seed(device)

    @graph_break("the seed of a dropout mask")
    def _seed(self, device: torch.device) -> None:
        tp_rank = 0 if self.split_over is None else self.split_over.rank()
        self.key.seed_generator(self.place, tp_rank, device)

    def forward(self, x: Tensor) -> Tensor:
        """Zero elements of x (any shape) with probability p; scale the others by 1 / (1 - p)."""
        if self.active_p == 0:
            return x
        if self.key.dealt is not None:
            return x * self._dealt_factor(x, self.key.dealt)
        self.seed(x.device)
        # Accelerators use this operator anyway; on CPUs F.dropout would save a float mask.
        return torch.native_dropout(x, self.p, True)[0]

    @graph_break("the dropout mask of dealt tokens")
    def _dealt_factor(self, x: Tensor, dealt: Dealt) -> Tensor:
        """Return the part for the tokens here of what whole samples are multiplied by."""
        over = self.split_over
        places = dealt.places
        parts = 1 if over is None else over.size()
        like = x.new_ones((len(x), dealt.seq // parts, x.shape[-1]))
        factors = []
        for part in range(parts):
            self.key.seed_generator(self.place, part, x.device)
            factors.append(torch.native_dropout(like, self.p, True)[0])
        if over is not None:
            places = sequence_part(places, over, -1)
        return torch.cat(factors, 1).gather(1, places.unsqueeze(-1).expand_as(x))

    def extra_repr(self) -> str:
        return f"p={self.p}, {'replicated' if self.split_over is None else 'split'}"
