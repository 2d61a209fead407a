"""Read-ahead: a thread makes values before they are asked for.

The same calls are made with the same arguments, ahead or when their result is asked for.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Generic, TypeVar

Made = TypeVar("Made")

# A thread that reads from a disk or a network that does not answer is left to its fate.
PATIENCE_SECONDS = 5.0


class ReadAhead(Generic[Made]):
    """A thread that calls `make(key)` for announced keys, in their order, ahead of use.

    An error of `make` is raised where the key is taken. The thread starts when there is something
    to do ahead, and does not keep the process alive.
    """

    def __init__(self, make: Callable[[int], Made]) -> None:
        self._make = make
        self._made: dict[int, Future[Made]] = {}
        self._queue: SimpleQueue[tuple[int, Future[Made]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def take(self, key: int, then: Sequence[int] = ()) -> Made:
        """Return `make(key)`; the keys `then` are made next, and all others forgotten."""
        wanted = self._made.pop(key, None)
        # A value that the thread has not begun is made here at once.
        is_ahead = wanted is not None and not wanted.cancel()
        made = wanted.result() if wanted and is_ahead else self._make(key)
        for other in self._made.keys() - set(then):
            self._made.pop(other).cancel()
        for other in then:
            if other not in self._made:
                self._made[other] = Future()
                self._queue.put((other, self._made[other]))
        if self._made and self._thread is None:
            self._thread = threading.Thread(target=self._work, name="read ahead", daemon=True)
            self._thread.start()
        return made

    def close(self) -> None:
        """End the thread after the value that it is making."""
        for future in self._made.values():
            future.cancel()
        self._made.clear()
        if self._thread:
            self._queue.put(None)
            self._thread.join(PATIENCE_SECONDS)
            self._thread = None

    def _work(self) -> None:
        while (entry := self._queue.get()) is not None:
            key, future = entry
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self._make(key))
            except BaseException as error:
                future.set_exception(error)
            # Until the next one comes, what is taken shall not live on here.
            del entry, future
