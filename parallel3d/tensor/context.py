"""The context in which every layer is built."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

from parallel3d.model.recompute import NONE, Recompute
from parallel3d.tensor.random_key import RandomKey


@dataclass
class SumListener:
    """Hears this rank's part of each sum over the tensor-parallel group before it is sent."""

    hear: Callable[[Tensor], None] | None = None
    """Called with each part; None: nobody listens."""

    @contextmanager
    def heard_by(self, hear: Callable[[Tensor], None]) -> Iterator[None]:
        """Call `hear` with each part inside the context."""
        self.hear = hear
        try:
            yield
        finally:
            self.hear = None


@dataclass(frozen=True)
class LayerContext:
    """Everything but sizes that a layer is built with: groups, the key of masks, and options."""

    group: dist.ProcessGroup
    """The tensor-parallel group that cuts the layer's weights."""
    key: RandomKey
    """The key of dropout masks."""
    sequence_parallel: bool = False
    """Between layers each rank of `group` holds its part of the sequence,
    [batch, seq / tp, hidden], not the whole."""
    recompute: Recompute = NONE
    """The parts that are computed again in backward (model/recompute.py)."""
    overlap: bool = True
    """Overlap a backward's collectives with its products. Without it, less memory is needed: the
    full input and its full gradient are not held at the same time."""
    expert_group: dist.ProcessGroup | None = None
    """The group whose ranks divide the experts of a layer; None: one rank has them all."""
    sample_group: dist.ProcessGroup | None = None
    """The group whose ranks share the tokens of each sample; None: one rank has them all."""
    pointwise: bool = False
    """Compile the functions between products, each by itself (`compiled.Pointwise`)."""
    listener: SumListener = field(default_factory=SumListener)
    """Hears the parts of sums over `group`, to find the rank that computes wrong ones."""

    @property
    def sequence_group(self) -> dist.ProcessGroup | None:
        """The group over which activations between layers are split; None if replicated."""
        return self.group if self.sequence_parallel else None

    def note_part(self, part: Tensor) -> None:
        """Let the listener hear this rank's part of a sum over the group of several ranks."""
        if self.listener.hear is not None and self.group.size() > 1:
            self.listener.hear(part)
