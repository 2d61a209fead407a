"""The group that torch calls: what each collective compares, and how gloo moves it."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.mesh.groups import join_one_of
from tests.strict.communicator import DATA, NAME, Communicator
from tests.strict.operation import Handle, Operation, describe, on_host

_Base: Any = dist.ProcessGroup  # the stubs miss how torch calls it from Python


class StrictGroup(_Base):  # type: ignore[misc]  # Any, see above
    """NCCL's rules over gloo (see the package); tensors of a device go through the host."""

    def __init__(self, queue: Communicator) -> None:
        super().__init__(queue.rank, len(queue.ranks))
        self.queue = queue
        self._calls = 0
        self._name = ""

    # What torch asks of a group; it knows no backend of one that is written in Python.

    def getBackendName(self) -> str:
        """The backend's name."""
        return NAME

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, text: str) -> None:
        self.queue.name = text if text != "undefined" else f"group {self._name}"

    @property
    def group_name(self) -> str:
        """The name under which torch registers the group."""
        return self._name

    @property
    def group_desc(self) -> str:
        """What torch says that the group is for."""
        return self.queue.name

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long each operation may take from now on."""
        self.queue.seconds = timeout.total_seconds()

    def shutdown(self) -> None:
        """Leave the group; StrictError if work is pending."""
        self.queue.close()

    # Collectives: all ranks come with the same words.

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Handle:
        """Sum the ranks' tensors (or reduce as `opts` says), in place."""
        opts = opts or dist.AllreduceOptions()
        results = [on_host(tensor) for tensor in tensors]
        run = self._reduction(results, opts.reduceOp)
        says = f"{describe(tensors)}, {_word(opts.reduceOp)}"
        return self._all("all_reduce", says, run, [], tensors, results, results)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any) -> Handle:
        """Sum the ranks' tensors into the root's buffer."""
        results = [on_host(tensor) for tensor in tensors]
        run = self._reduction(results, opts.reduceOp)
        is_root = self.rank() == opts.rootRank
        says = f"{describe(tensors)}, {_word(opts.reduceOp)}, to {opts.rootRank}"
        if is_root:
            return self._all("reduce", says, run, [], tensors, results, results)
        return self._all("reduce", says, run, tensors, copies=results)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Handle:
        """Copy the root's tensor to all ranks."""
        results = [on_host(tensor) for tensor in tensors]
        is_root = self.rank() == opts.rootRank

        def run() -> None:
            for result in results:
                self.queue.gloo.broadcast([result], opts).wait()

        says = f"{describe(tensors)}, from {opts.rootRank}"
        if is_root:
            return self._all("broadcast", says, run, tensors, copies=results)
        return self._all("broadcast", says, run, [], tensors, results)

    def allgather(self, outputs: Any, inputs: list[Tensor], opts: Any = None) -> Handle:
        """Gather every rank's tensor into a list on each."""
        results = [torch.empty_like(out, device="cpu") for out in outputs[0]]
        own = on_host(inputs[0])

        def run() -> None:
            self.queue.gloo.allgather([results], [own]).wait()

        return self._all("all_gather", describe(inputs), run, inputs, outputs[0], results, [own])

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Handle:
        """Gather every rank's tensor into one, in the order of ranks."""
        return self.all_gather_single_coalesced([output], [tensor])

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Handle:
        """Gather several tensors as one operation."""
        results = [on_host(out) for out in outputs]
        own = [on_host(tensor) for tensor in inputs]

        def run() -> None:
            for result, tensor in zip(results, own, strict=True):
                parts = list(result.view(-1).chunk(self.size()))
                self.queue.gloo.allgather([parts], [tensor.view(-1)]).wait()

        return self._all("all_gather", describe(inputs), run, inputs, outputs, results, own)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Handle:
        """Give each rank its part of the sum, from lists of parts."""
        whole = torch.cat([tensor.reshape(-1) for tensor in inputs[0]])
        return self._scattered(outputs, [whole], inputs[0], opts)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Handle:
        """Give each rank its part of the sum of one tensor."""
        return self._scattered([output], [tensor], [tensor], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Handle:
        """Reduce and scatter several tensors as one operation."""
        return self._scattered(outputs, inputs, inputs, opts)

    def alltoall_base(
        self, output: Tensor, tensor: Tensor, received: list[int], sent: list[int], opts: Any = None
    ) -> Handle:
        """Give each rank its part of every rank's tensor; sizes may differ."""
        result = on_host(output)
        own = on_host(tensor)
        opts = opts or dist.AllToAllOptions()

        def run() -> None:
            self.queue.gloo.alltoall_base(result, own, received, sent, opts).wait()

        what = str(tensor.dtype).removeprefix("torch.")
        return self._all("all_to_all", what, run, [tensor], [output], [result], [own])

    # The same under the names of torch before 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def barrier(self, opts: Any = None) -> Handle:
        """Wait for every rank; unlike other operations, it blocks under NCCL, too."""
        return self._all("barrier", "nothing", lambda: None)

    def split_among(
        self, ranks: Sequence[Sequence[int]], timeout: timedelta, name: str
    ) -> dist.ProcessGroup | None:
        """Split the world as NCCL does: every rank of it must call this; blocks.

        None for a rank that is in none of `ranks`, global ranks that do not overlap.
        """
        content = crc32(str(list(map(list, ranks))).encode())
        announcement = f"{name} into {len(ranks)} ({content:08x})"
        self._all("split_group", announcement, lambda: None).wait()
        return join_one_of(ranks, timeout, name)

    # Transfers: the ends come with each other's words.

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Handle:
        """Send to a rank; over when the receive has come."""
        copy = on_host(tensors[0])
        what = f"{describe(tensors)}, tag {tag}"
        operation = Operation(
            f"send of {what}",
            kind="send",
            expects={peer: f"receive of {what}"},
            run=lambda: self.queue.gloo.send([copy], peer, DATA).wait(),
            inputs=tensors,
            copies=[copy],
        )
        return self.queue.post(operation)

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Handle:
        """Receive from a named rank; NCCL knows no receive from any."""
        result = on_host(tensors[0])
        what = f"{describe(tensors)}, tag {tag}"
        operation = Operation(
            f"receive of {what}",
            kind="receive",
            expects={peer: f"send of {what}"},
            run=lambda: self.queue.gloo.recv([result], peer, DATA).wait(),
            outputs=[(tensors[0], result)],
        )
        return self.queue.post(operation)

    def _start_coalescing(self, device: Any) -> None:
        """Operations come one by one here: none is collected."""

    _end_coalescing = _start_coalescing

    def _all(
        self,
        kind: str,
        what: str,
        run: Callable[[], object],
        inputs: Sequence[Tensor] = (),
        outputs: Sequence[Tensor] = (),
        results: Sequence[Tensor] = (),
        copies: Sequence[Tensor] = (),
    ) -> Handle:
        """Post a collective; `run` reads `copies`, and `results` go to the tensors `outputs`."""
        self._calls += 1
        says = f"{kind} {self._calls} of {what}"
        peers = (peer for peer in range(self.size()) if peer != self.rank())
        operation = Operation(
            says,
            kind=kind,
            expects=dict.fromkeys(peers, says),
            run=run,
            inputs=inputs,
            outputs=list(zip(outputs, results, strict=True)),
            copies=copies,
        )
        handle = self.queue.post(operation)
        # So do torch's handles of NCCL, except for transfers.
        handle.tensors = [*inputs, *outputs]
        return handle

    def _scattered(
        self, outputs: list[Tensor], whole: list[Tensor], inputs: list[Tensor], opts: Any
    ) -> Handle:
        op = (opts or dist.ReduceScatterOptions()).reduceOp
        results = [torch.empty_like(out, device="cpu") for out in outputs]
        sums = [on_host(tensor) for tensor in whole]
        reduce = self._reduction(sums, op)

        def run() -> None:
            reduce()
            for result, total in zip(results, sums, strict=True):
                part = total.view(-1).chunk(self.size())[self.rank()]
                result.copy_(part.view(result.shape))

        says = f"{describe(inputs)}, {_word(op)}"
        return self._all("reduce_scatter", says, run, inputs, outputs, results, sums)

    def _reduction(self, tensors: list[Tensor], op: Any) -> Callable[[], None]:
        options: Any = dist.AllreduceOptions()
        is_mean = op == dist.ReduceOp.AVG  # which gloo does not know
        options.reduceOp = dist.ReduceOp.SUM if is_mean else op

        def run() -> None:
            for tensor in tensors:
                self.queue.gloo.allreduce([tensor], options).wait()
                if is_mean:
                    tensor.div_(self.size())

        return run


def _word(op: Any) -> str:
    return str(getattr(op, "op", op)).rpartition(".")[2].lower()
