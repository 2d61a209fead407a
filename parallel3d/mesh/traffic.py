"""Counts what this rank communicates while code runs: calls and bytes, by group (floor 1)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parallel3d.mesh.mesh import Mesh

# The words in torch's names of operators, in this order, and what the operations are called.
_NAMES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "recv": "receive",
    "send": "send",
    "barrier": "barrier",
    "reduce": "reduce",
}


@dataclass
class Calls:
    """Operations of one kind on one group of `ranks` ranks: their number and bytes.

    `bytes`: what an all-reduce sums, an all-gather gives, a reduce-scatter takes, a send sends.
    """

    group: str
    ranks: int
    operation: str
    calls: int = 0
    bytes: int = 0


class Traffic(TorchDispatchMode):
    """Counts operations on groups of more than one rank, DeepSpeed's and autograd's too.

    All pass through torch's dispatcher, on whatever thread. `operations`: those that count; none:
    all.
    """

    def __init__(self, mesh: Mesh, operations: Sequence[str] = ()) -> None:
        super().__init__()
        self._mesh, self._operations = mesh, operations
        self._calls: dict[tuple[str, str], Calls] = {}

    @property
    def calls(self) -> list[Calls]:
        """The counted operations, by group and kind, the most bytes first."""
        return sorted(self._calls.values(), key=lambda c: -c.bytes)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operator, and count it if it communicates."""
        if func.namespace == "c10d":
            self._count(func._schema.name.partition("::")[2], args)
        return func(*args, **(kwargs or {}))

    def _count(self, operator: str, args: tuple[Any, ...]) -> None:
        operation = next((v for k, v in _NAMES.items() if k in operator), operator)
        group = next(filter(None, map(_group, args)), None)
        if group is None or group.size() == 1:
            return
        if self._operations and operation not in self._operations:
            return
        name = self._mesh.name_of(group)
        found = self._calls.setdefault((name, operation), Calls(name, group.size(), operation))
        found.calls += 1
        found.bytes += max(map(_num_bytes, args))


def _group(arg: Any) -> dist.ProcessGroup | None:
    try:
        return dist.ProcessGroup.unbox(arg)
    except (RuntimeError, TypeError):
        return None


def _num_bytes(arg: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(arg) if isinstance(leaf, Tensor))
