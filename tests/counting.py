"""Operators that run, and the bytes of all tensors that are alive, storage by storage."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Counting(TorchDispatchMode):
    """Every storage that an operator made, from then until nothing holds it.

    `bytes` are alive now; `peak` is the most since `start` was called. Storages are seen as they
    come out of operators, and let go of when Python's last reference and torch's are gone, on
    whatever thread. `meta`: of the meta device, which has none of them, and of no other.
    """

    def __init__(self, meta=False):
        super().__init__()
        self.meta = meta
        self.bytes = 0
        self.peak = 0
        self._alive = {}  # by the storage's address: its size, and a reference that tells its end

    def start(self):
        self.peak = self.bytes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self._see(out)
        return out

    def _see(self, out):
        if isinstance(out, (tuple, list)):
            for x in out:
                self._see(x)
        elif isinstance(out, torch.Tensor) and out.is_meta == self.meta:
            self._count(out.untyped_storage())

    def _count(self, storage):
        key = storage._cdata
        size = storage.nbytes()
        known = self._alive.get(key)
        if known is not None and known[1]() is storage:
            self.bytes += size - known[0]
            self._alive[key] = size, known[1]
        elif size:
            self.bytes += size
            self._alive[key] = size, weakref.ref(storage, lambda ref: self._forget(key, ref))
        self.peak = max(self.peak, self.bytes)

    def _forget(self, key, reference):
        size, known = self._alive.get(key, (0, None))
        if known is reference:
            self.bytes -= size
            del self._alive[key]


class Calls(TorchDispatchMode):
    """Every operator that runs, with its arguments: `calls` has (function, arguments)."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append((func, args))
        return func(*args, **(kwargs or {}))

    @property
    def names(self):
        return [func.name() for func, _ in self.calls]
