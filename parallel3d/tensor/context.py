"""What every layer is built with."""

from dataclasses import dataclass

import torch.distributed as dist

from parallel3d.tensor.dropout import RandomKey


@dataclass(frozen=True)
class LayerContext:
    """A layer's tensor-parallel group, and the key of its dropout masks."""

    group: dist.ProcessGroup
    key: RandomKey
