"""A group's operations, one after another, on a thread of its own (floor 1)."""

import queue
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.strict.operation import Handle, Operation
from tests.strict.options import StrictOptions
from tests.strict.watch import QueueWatch

HEADER, DATA = 1, 2  # gloo's tags
_WIDTH = 160  # bytes of a header
_NEVER = timedelta(days=10)  # the watch keeps the time


class Communicator:
    """The in-order queue of a group's operations; `rank` is this rank's place among `ranks`.

    Data moves over `gloo`. Before an operation runs, each rank tells those that it meets what it
    is, and compares.
    """

    def __init__(
        self,
        store: dist.Store,
        *,
        rank: int,
        ranks: Sequence[int],
        seconds: float,
        watch: QueueWatch,
        options: StrictOptions,
    ) -> None:
        self.gloo: Any = dist.ProcessGroupGloo(store, rank, len(ranks), _NEVER)
        self.rank, self.ranks, self.seconds = rank, tuple(ranks), seconds
        self.name = ""
        self._watch, self._options = watch, options
        self._dice = random.Random(f"{options.seed} {self.ranks} {watch.rank}")
        self._queue = queue.SimpleQueue[Operation | None]()
        self._kept: list[Operation] = []  # those not over, or not waited for
        watch.groups.append(self)
        threading.Thread(target=self._serve, name="strict", daemon=True).start()

    def __str__(self) -> str:
        return f"{self.name} (ranks {', '.join(map(str, self.ranks))})"

    def post(
        self,
        says: str,
        *,
        kind: str,
        expects: Mapping[int, str],
        run: Callable[[], object],
        inputs: Sequence[Tensor] = (),
        outputs: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> Handle:
        """Queue an operation; its arguments are `Operation`'s."""
        if self._watch.failure is not None:
            raise self._watch.failure
        op = Operation(
            says,
            kind=kind,
            expects=expects,
            run=run,
            inputs=inputs,
            outputs=outputs,
            seconds=self.seconds,
        )
        kept = (old for old in self._kept if not (old.is_over and old.is_delivered))
        self._kept = [*kept, op]
        self._queue.put(op)
        if self._watch.failure is not None:  # meanwhile: `fail` may not have seen it
            op.settle(self._watch.failure)
        return Handle(op, self._blame)

    def head(self) -> Operation | None:
        """The operation that the group is running now."""
        return next((op for op in self._kept if not op.is_over), None)

    def fail(self, error: Exception) -> None:
        """End all queued operations with `error`."""
        for op in self._kept:
            op.settle(error)

    def close(self) -> None:
        """Leave the group; StrictError if an operation is not over, or its result not fetched."""
        left = [op for op in self._kept if not (op.is_over and op.is_delivered)]
        self._queue.put(None)
        self._watch.leave(self)
        if left and self._watch.failure is None:
            raise self._blame(left[0], "it was pending as the group was destroyed")

    def _serve(self) -> None:
        while (op := self._queue.get()) is not None:
            time.sleep(self._options.seconds(op.kind, self._watch.rank, self._dice))
            try:
                problem = self._meet(op) or op.problem
                if not problem:
                    with torch.no_grad():
                        op.run()
                    problem = op.problem
            except Exception as error:
                if "gloo/transport" in str(error):
                    # A peer is gone. NCCL would not know; what ends this is the operation's time.
                    return
                problem = str(error)
            op.settle(self._blame(op, problem) if problem else None)

    def _meet(self, op: Operation) -> str:
        """Wait for the ranks that `op` needs; what is wrong where they come with something else."""
        sends, receives = [], []
        for peer, expected in op.expects.items():
            theirs = torch.zeros(_WIDTH, dtype=torch.uint8)
            receives.append((peer, expected, theirs, self.gloo.recv([theirs], peer, HEADER)))
            sends.append(self.gloo.send([_encoded(op.says)], peer, HEADER))
        others = []
        for peer, expected, theirs, work in receives:
            work.wait()
            if (said := _decoded(theirs)) != expected:
                others.append(f"rank {self.ranks[peer]} with {said}")
        for work in sends:
            work.wait()
        return f"it met {' and '.join(others)}" if others else ""

    def _blame(self, op: Operation, problem: str) -> Exception:
        """Make what is wrong with `op` an error of all ranks."""
        return self._watch.blame(f"rank {self._watch.rank}: {op} on {self}: {problem}")


def _encoded(text: str) -> Tensor:
    data = text.encode()[:_WIDTH].ljust(_WIDTH, b"\0")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _decoded(header: Tensor) -> str:
    return bytes(header.tolist()).rstrip(b"\0").decode()
