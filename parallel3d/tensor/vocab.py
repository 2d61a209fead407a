"""The embedding of a vocabulary that is cut over a tensor-parallel group.

A vocabulary that the group does not divide is cut into parts that differ by one row: there is no
padding, so none can win, move the loss or be saved.
"""

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from parallel3d.tensor.collectives import reduce_from_group
from parallel3d.tensor.cut import cut_of, cut_parameter


def local_ids(tokens: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Token ids counted from `start`, and a mask of those outside [start, stop) (their id is 0)."""
    outside = (tokens < start) | (tokens >= stop)
    return (tokens - start).masked_fill(outside, 0), outside


class VocabParallelEmbedding(nn.Module):
    """Token ids [...] -> vectors [..., size], with the rows of the table cut over the group."""

    def __init__(
        self, vocab_size: int, size: int, group: dist.ProcessGroup, sequence_parallel: bool = False
    ) -> None:
        super().__init__()
        self.group, self.sequence_parallel = group, sequence_parallel
        self.weight = cut_parameter((vocab_size, size), 0, group)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [..., seq] (int64), the same on each rank of the group -> [..., seq, size], too.

        Under sequence parallelism this rank's part of it, [..., seq / tp, size].
        """
        cut = cut_of(self.weight)
        local, outside = local_ids(tokens, cut.start, cut.stop)
        vectors = F.embedding(local, self.weight).masked_fill(outside.unsqueeze(-1), 0.0)
        return reduce_from_group(vectors, self.group, self.sequence_parallel)

    def extra_repr(self) -> str:
        return f"{cut_of(self.weight).global_shape}, vocabulary / {self.group.size()}"
