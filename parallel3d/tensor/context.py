"""What every layer is built with: its group, dropout's key, and how activations are kept."""

from dataclasses import dataclass

import torch.distributed as dist

from parallel3d.tensor.dropout import RandomKey


@dataclass(frozen=True)
class LayerContext:
    """A layer's tensor-parallel group, the key of its dropout masks, and how activations are kept.

    `sequence_parallel`: between the layers each rank of the group holds its part of the sequence,
    [batch, seq / tp, hidden]. `overlap`: collectives of a backward run under its products; without
    it an input and its gradient are not both held whole.
    """

    group: dist.ProcessGroup
    key: RandomKey
    sequence_parallel: bool = False
    recompute_attention: bool = False
    overlap: bool = True

    @property
    def sequence_group(self) -> dist.ProcessGroup | None:
        """The group that the activations between layers are split over; None: replicated."""
        return self.group if self.sequence_parallel else None
