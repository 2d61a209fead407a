"""A process group in which one process plays one rank, and notes what it would send (floor 4)."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

_Base: Any = dist.ProcessGroup  # as torch calls it from Python, not as its stubs have it


class _Done(dist._Work):
    def wait(self, timeout: Any = None) -> bool:
        """There was nothing to wait for."""
        return True


class PlayedGroup(_Base):
    """A group of `size` in which this process plays rank `rank`; nothing is sent.

    `note` is told each collective: its name, what it takes, what it writes, and its reduction.
    """

    def __init__(self, rank: int, size: int, note: Callable[..., None]) -> None:
        super().__init__(rank, size)
        self._note = note

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        op = _word(opts)
        for tensor in tensors if isinstance(tensors, list) else [tensors]:
            self._note("all_reduce", [tensor], [tensor], op)
        return _Done()

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        return self.all_gather_single_coalesced([output], [given], opts)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], given: list[Tensor], opts: Any = None
    ) -> Any:
        self._note("all_gather", given, outputs)
        return _Done()

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], given: list[Tensor], opts: Any = None
    ) -> Any:
        self._note("reduce_scatter", given, outputs, _word(opts))
        return _Done()

    # The same under the names of torch before 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def _word(opts: Any) -> str:
    """The reduction's name."""
    if opts is None:
        return "sum"
    op = opts.reduceOp
    return str(getattr(op, "op", op)).rpartition(".")[2].lower()
