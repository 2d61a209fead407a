"""How ranks wait for each other before training, so that a rank that waits still hears signals.

While a collective blocks, no Python runs, nor do Python's signal handlers (floor 1).
"""

import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_SHORTEST_NAP, _LONGEST_NAP = 0.001, 0.1  # seconds
_STORE_TIMEOUT = timedelta(seconds=5)


def wait_with_open_ears(work: dist.Work) -> None:
    """Wait for a started collective with Python awake; RuntimeError if a peer dies.

    A nap is a twentieth of the time waited so far: a short collective stays short.
    """
    start = time.monotonic()
    while not work.is_completed():
        time.sleep(min(max((time.monotonic() - start) / 20, _SHORTEST_NAP), _LONGEST_NAP))
    work.wait()


class SharedFlag:
    """A flag that any rank sets for all, without a collective; any thread may ask.

    It lives in the process group's store, on a connection of its own, under `name`.
    """

    def __init__(self, name: str) -> None:
        self._name, self._size = name, dist.get_world_size()
        store: Any = dist.distributed_c10d._get_default_store()  # the stubs do not know clone
        self._store: dist.Store = store.clone()
        self._store.set_timeout(_STORE_TIMEOUT)
        self._seen = False

    def set(self) -> None:
        """Set the flag; RuntimeError if the process that keeps the store is gone."""
        self._store.set(self._name, "set")
        self._see()

    def is_set(self) -> bool:
        """Whether a rank has set it; RuntimeError if the process that keeps the store is gone."""
        if not self._seen and self._store.check([self._name]):
            self._see()
        return self._seen

    def wait_until_seen(self, seconds: float) -> bool:
        """Whether every rank sees the flag in time, after which the store's keeper may end."""
        deadline = time.monotonic() + seconds
        while self._store.add(f"{self._name} seen", 0) < self._size:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def _see(self) -> None:
        if not self._seen:
            self._seen = True
            self._store.add(f"{self._name} seen", 1)
