"""What ends the ranks of a strict world together, and says where each of them was (floor 1)."""

import threading
import time
from contextlib import suppress
from typing import Protocol

import torch.distributed as dist

from tests.strict.operation import Operation

_SWEEP = 0.05  # seconds between two looks at the store and the queues
_LONG = 0.3  # seconds after which an operation under way is told to the other ranks
_FAILED = "strict failed"


class StrictError(dist.DistBackendError):
    """A rule that a rank broke, this one or another, or a peer that did not come in time."""


class Queued(Protocol):
    """A group as the watch sees it."""

    def __str__(self) -> str:
        """Its name and ranks."""

    def head(self) -> Operation | None:
        """The operation that the group is running now."""

    def fail(self, error: Exception) -> None:
        """End all queued operations with `error`."""


class QueueWatch:
    """A rank's watch over its queues, and over the first failure of any rank, kept in `store`.

    `store` is a connection of its own.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self.rank, self._store, self._size = rank, store, world_size
        self.groups: list[Queued] = []
        self.failure: StrictError | None = None
        self._said, self._closed, self._lock = "", threading.Event(), threading.RLock()
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

    def leave(self, group: Queued) -> None:
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
        heads = [(group, head) for group in self.groups if (head := group.head()) is not None]
        long = [(g, op) for g, op in heads if now - op.posted > min(_LONG, op.seconds / 2)]
        said = "; ".join(f"{op} on {group}" for group, op in long)
        if said != self._said:
            self._said = said
            with self._lock, suppress(RuntimeError):
                self._store.set(f"strict at {self.rank}", said)
        for group, op in long:
            if now - op.posted > op.seconds:
                late = f"rank {self.rank}: {op} on {group} was not over within {op.seconds:g} s"
                return f"{late}; then {self._places()}"
        return ""

    def _places(self) -> str:
        """What each rank waits in."""
        places = []
        for rank in range(self._size):
            key, said = f"strict at {rank}", ""
            with self._lock, suppress(RuntimeError):
                said = self._store.get(key).decode() if self._store.check([key]) else ""
            places.append(f"rank {rank} was in {said or 'no communication'}")
        return ", ".join(places)
