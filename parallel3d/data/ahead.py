"""Read-ahead: a thread computes values before they are needed.

The same calls are made with the same arguments, whether ahead of time or on demand.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Generic, TypeVar

Batch = TypeVar("Batch")

# `close` stops waiting after this time, if the thread hangs in a read from a disk or network.
CLOSE_TIMEOUT_SECONDS = 5.0
WAIT_SECONDS = 1.0


class ReadAhead(Generic[Batch]):
    """A thread that calls `make(key)` for announced keys, in order, before they are needed.

    An exception in `make` is raised by the `take` of that key. The thread is a daemon, and starts
    when the first key is announced.
    """

    def __init__(self, make: Callable[[int], Batch]) -> None:
        self._make = make
        self._futures: dict[int, Future[Batch]] = {}
        self._queue: SimpleQueue[tuple[int, Future[Batch]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def take(
        self, key: int, then: Sequence[int] = (), on_wait: Callable[[], None] = lambda: None
    ) -> Batch:
        """Return `make(key)`, announce the keys `then`, and cancel all other announced keys.

        While the thread is busy with the key, `on_wait` is called every WAIT_SECONDS.
        """
        future = self._futures.pop(key, None)
        # If the thread has not begun with this key, compute it here.
        is_ahead = future is not None and not future.cancel()
        while future and is_ahead and not wait([future], WAIT_SECONDS).done:
            on_wait()
        batch = future.result() if future and is_ahead else self._make(key)
        for other in self._futures.keys() - set(then):
            self._futures.pop(other).cancel()
        for other in then:
            if other not in self._futures:
                self._futures[other] = Future()
                self._queue.put((other, self._futures[other]))
        if self._futures and self._thread is None:
            self._thread = threading.Thread(target=self._work, name="read ahead", daemon=True)
            self._thread.start()
        return batch

    def close(self) -> None:
        """End the thread after the key that it is computing."""
        for future in self._futures.values():
            future.cancel()
        self._futures.clear()
        if self._thread:
            self._queue.put(None)
            self._thread.join(CLOSE_TIMEOUT_SECONDS)
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
            # Drop the references while waiting, so that the value can be freed after use.
            del entry, future
