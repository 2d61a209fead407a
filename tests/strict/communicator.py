"""A group's operations, one after another on a thread of their own, and the watch over all."""

import queue
import random
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.base.errors import ConfigError
from tests.strict.operation import Handle, Operation

NAME = "strict"
# gloo's tags
HEADER = 1
DATA = 2
_WIDTH = 160  # bytes of a header
_NEVER = timedelta(days=10)  # the watch keeps the time
_SWEEP = 0.05  # seconds between two looks at the store and the queues
_LONG = 0.3  # seconds after which an operation under way is told to the other ranks
_FAILED = "strict failed"


class StrictError(dist.DistBackendError):
    """A rule that a rank broke, this one or another, or a peer that did not come in time."""


@dataclass(frozen=True)
class StrictOptions:
    """Delays of operations that show what does not wait: random ones, and chosen ones.

    `delay`: the longest random delay of an operation, in seconds; the same for the same `seed`.
    `chosen`: seconds for all operations of a kind ("send"), or for those of one rank ("send@1").
    """

    delay: float = 2e-4
    seed: int = 0
    chosen: dict[str, float] = field(default_factory=dict)

    @classmethod
    def from_text(cls, text: str) -> "StrictOptions":
        """Read "delay=0.001,seed=7,send@1=0.5"; ConfigError where it is something else."""
        try:
            settings = [s.split("=") for s in text.split(",") if s]
            given = {key: float(number) for key, number in settings}
            if min(given.values(), default=0) < 0:
                raise ValueError
        except ValueError:
            raise ConfigError(
                f'PARALLEL3D_BACKEND: the strict backend has no settings "{text}"; write them as '
                'in "tests.strict:strict,delay=0.001,seed=7,send@1=0.5" (seconds)'
            ) from None
        delay = given.pop("delay", cls.delay)
        seed = given.pop("seed", 0)
        return cls(delay, int(seed), given)

    def seconds(self, kind: str, rank: int, dice: random.Random) -> float:
        """Seconds that an operation of `kind` on a global rank is held up before it starts."""
        drawn = dice.uniform(0, self.delay)
        return self.chosen.get(f"{kind}@{rank}", self.chosen.get(kind, drawn))


class QueueWatch:
    """A rank's watch over its queues, and over the first failure of any rank, kept in `store`.

    `store` is a connection of its own.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self.rank = rank
        self._store = store
        self._size = world_size
        self.groups: list[Communicator] = []
        self.failure: StrictError | None = None
        self._reported = ""
        self._closed = threading.Event()
        self._lock = threading.RLock()
        threading.Thread(target=self._run, name="strict watch", daemon=True).start()

    def blame(self, problem: str) -> StrictError:
        """End all ranks with `problem`, unless another was first; gives the first one's error."""
        with self._lock:
            try:
                first = self._store.compare_set(_FAILED, "", problem).decode()
            except RuntimeError:  # the store is gone, and with it the rank that kept it
                first = problem
        return self._fail(first)

    @property
    def is_closed(self) -> bool:
        """Whether all groups were left."""
        return self._closed.is_set()

    def leave(self, group: "Communicator") -> None:
        """Stop watching `group`; after the last group, stop altogether."""
        self.groups.remove(group)
        if not self.groups:
            self._closed.set()

    def _fail(self, problem: str) -> StrictError:
        if self.failure is None:
            self.failure = StrictError(f"strict: {problem}")
            for group in self.groups:
                group.fail(self.failure)
        return self.failure

    def _run(self) -> None:
        while self.failure is None and not self._closed.wait(_SWEEP):
            if problem := self._told() or self._late():
                self.blame(problem)

    def _told(self) -> str:
        """What another rank found wrong."""
        try:
            with self._lock:
                is_failed = self._store.check([_FAILED])
                return self._store.get(_FAILED).decode() if is_failed else ""
        except RuntimeError:  # the store is gone, and with it the rank that kept it: silence
            return ""

    def _late(self) -> str:
        """What is wrong where an operation takes too long; long ones are told to the others."""
        now = time.monotonic()
        long = []
        for group in self.groups:
            op = group.head()
            if op is not None and now - op.posted > min(_LONG, op.seconds / 2):
                long.append((group, op))
        waits = "; ".join(f"{op} on {group}" for group, op in long)
        if waits != self._reported:
            self._reported = waits
            with self._lock, suppress(RuntimeError):
                self._store.set(f"strict at {self.rank}", waits)
        for group, op in long:
            if now - op.posted > op.seconds:
                late = f"rank {self.rank}: {op} on {group} was not over within {op.seconds:g} s"
                return f"{late}; then {self._places()}"
        return ""

    def _places(self) -> str:
        """What each rank waits in."""
        places = []
        for rank in range(self._size):
            key = f"strict at {rank}"
            waits = ""
            with self._lock, suppress(RuntimeError):
                if self._store.check([key]):
                    waits = self._store.get(key).decode()
            places.append(f"rank {rank} was in {waits or 'no communication'}")
        return ", ".join(places)


class Communicator:
    """The in-order queue of a group's operations; `rank` is this rank's place among `ranks`.

    Data moves over `gloo`. Before an operation runs, each rank tells those that it meets what it
    is, and compares.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        ranks: Sequence[int],
        seconds: float,
        *,
        watch: QueueWatch,
        options: StrictOptions,
    ) -> None:
        self.gloo: Any = dist.ProcessGroupGloo(store, rank, len(ranks), _NEVER)
        self.rank = rank
        self.ranks = tuple(ranks)
        self.seconds = seconds
        self.name = ""
        self._watch = watch
        self._options = options
        self._dice = random.Random(f"{options.seed} {self.ranks} {watch.rank}")
        self._queue = queue.SimpleQueue[Operation | None]()
        self._kept: list[Operation] = []  # those not over, or not waited for
        watch.groups.append(self)
        threading.Thread(target=self._serve, name="strict", daemon=True).start()

    def __str__(self) -> str:
        return f"{self.name} (ranks {', '.join(map(str, self.ranks))})"

    def post(self, op: Operation) -> Handle:
        """Queue an operation."""
        if self._watch.failure is not None:
            raise self._watch.failure
        op.seconds = self.seconds
        self._kept = [*self._pending(), op]
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
        left = self._pending()
        self._queue.put(None)
        self._watch.leave(self)
        if left and self._watch.failure is None:
            raise self._blame(left[0], "it was pending as the group was destroyed")

    def _pending(self) -> list[Operation]:
        return [op for op in self._kept if not (op.is_over and op.is_delivered)]

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
        sends = []
        receives = []
        for peer, expected in op.expects.items():
            theirs = torch.zeros(_WIDTH, dtype=torch.uint8)
            receives.append((peer, expected, theirs, self.gloo.recv([theirs], peer, HEADER)))
            sends.append(self.gloo.send([_encoded(op.says)], peer, HEADER))
        others = []
        for peer, expected, theirs, work in receives:
            work.wait()
            operation = _decoded(theirs)
            if operation != expected:
                others.append(f"rank {self.ranks[peer]} with {operation}")
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
