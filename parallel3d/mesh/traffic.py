"""Counts the calls and bytes that this rank communicates, by group (floor 1)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parallel3d.mesh.mesh import Mesh

# Parts of torch's operator names, tried in this order, and the names of the operations.
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
    """Operations of one kind on one group: their number and bytes."""

    group: str
    """The group's name, as by `Mesh.name_of`."""
    ranks: int
    operation: str
    calls: int = 0
    bytes: int = 0
    """Those of the input of an all-reduce or a reduce-scatter, the output of an all-gather, and the
    message of a send or a receive."""


class Traffic(TorchDispatchMode):
    """Counts operations on groups of more than one rank, also those of DeepSpeed and autograd.

    All of them pass through torch's dispatcher, on any thread.

    - `operations`: the kinds to count; all if empty.
    """

    def __init__(self, mesh: Mesh, operations: Sequence[str] = ()) -> None:
        super().__init__()
        self._mesh = mesh
        self._operations = operations
        self._calls: dict[tuple[str, str], Calls] = {}

    @property
    def calls(self) -> list[Calls]:
        """The counted operations, by group and kind, sorted by bytes in descending order."""
        return sorted(self._calls.values(), key=lambda c: -c.bytes)

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[object, ...] = (), kwargs: Any = None
    ) -> object:
        """Run the operator, and count it if it communicates."""
        if func.namespace == "c10d":
            self._count(func._schema.name.partition("::")[2], args)
        return func(*args, **(kwargs or {}))

    def _count(self, operator: str, args: tuple[object, ...]) -> None:
        operation = next((name for part, name in _NAMES.items() if part in operator), operator)
        if self._operations and operation not in self._operations:
            return
        group = next(filter(None, map(_group, args)), None)
        if group is None or group.size() == 1:
            return
        name = self._mesh.name_of(group)
        calls = self._calls.setdefault((name, operation), Calls(name, group.size(), operation))
        calls.calls += 1
        calls.bytes += max(map(_num_bytes, args))


def _group(arg: Any) -> dist.ProcessGroup | None:
    try:
        return dist.ProcessGroup.unbox(arg)
    except (RuntimeError, TypeError):
        return None


def _num_bytes(arg: object) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(arg) if isinstance(leaf, Tensor))
