"""The context in which every layer is built."""

from dataclasses import dataclass

import torch.distributed as dist

from parallel3d.model.recompute import NONE, Recompute
from parallel3d.tensor.dropout import RandomKey


@dataclass(frozen=True)
class LayerContext:
    """A layer's tensor-parallel group, the key of its dropout masks, and its options.

    - `sequence_parallel`: between layers each rank of the group holds its part of the sequence,
      [batch, seq / tp, hidden].
    - `recompute`: what is computed again in backward (model/recompute.py).
    - `experts`: the group whose ranks divide the experts of a layer; None: one rank has them all.
    - `context`: the group whose ranks share the tokens of each sample; None: one rank has them all.
    - `pointwise`: compile the functions between products, each by itself (`compiled.Pointwise`).
    - `overlap`: overlap a backward's collectives with its products. Without it, less memory is
      needed: the full input and its full gradient are not held at the same time.
    """

    group: dist.ProcessGroup
    key: RandomKey
    sequence_parallel: bool = False
    recompute: Recompute = NONE
    overlap: bool = True
    experts: dist.ProcessGroup | None = None
    context: dist.ProcessGroup | None = None
    pointwise: bool = False

    @property
    def sequence_group(self) -> dist.ProcessGroup | None:
        """The group over which activations between layers are split; None if replicated."""
        return self.group if self.sequence_parallel else None
