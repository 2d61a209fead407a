"""Activations that wait for their backward in host memory."""

from collections import deque
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

_AHEAD = 8  # storages that are fetched before they are needed: about those of one layer
_BEHIND = 4  # storages that may still be on their way to the host when the next one leaves

Leaving = deque[tuple[torch.Event, Tensor]]
"""Bytes on the device, each with the event after which they are on the host."""


class _OnHost:
    """The bytes of one storage in host memory, and on the device again before their uses.

    `before` is the storage that was saved before it, which the backward needs after it. On an
    accelerator the copies run on `stream`, from and to page-locked memory. The host runs ahead of
    the device, so computes wait for the copies: for those that left `_BEHIND` storages ago, and
    before the backward begins for all. Otherwise the device would keep what is to leave it.
    """

    def __init__(
        self,
        storage: torch.UntypedStorage,
        stream: torch.Stream | None,
        before: "_OnHost | None",
        leaving: Leaving,
    ) -> None:
        self.stream = stream
        self.before = before
        self.leaving = leaving
        self.uses = 0
        self.device = storage.device
        self.there: Tensor | None = None
        data = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
        if stream:
            stream.wait_stream(torch.accelerator.current_stream())
        with stream or nullcontext():
            self.here = torch.empty_like(data, device="cpu", pin_memory=stream is not None)
            self.here.copy_(data, non_blocking=True)
        if stream:
            leaving.append((stream.record_event(), data))
            _wait_for_copies(leaving, _BEHIND)

    def fetch(self) -> None:
        """Start the copy to the device, unless it is there or not needed any more."""
        if self.uses and self.there is None:
            # From the current stream's memory, so that it takes the place of what was freed there.
            self.there = torch.empty_like(self.here, device=self.device, pin_memory=False)
            if self.stream:
                self.stream.wait_stream(torch.accelerator.current_stream())
            with self.stream or nullcontext():
                self.there.copy_(self.here, non_blocking=True)
            self.arrived = self.stream.record_event() if self.stream else None

    def take(self) -> torch.UntypedStorage:
        """Return the storage on the device, and fetch the next ones; the last use forgets it."""
        _wait_for_copies(self.leaving, 0)
        following: _OnHost | None = self
        for _ in range(1 + _AHEAD):
            if following:
                following.fetch()
                following = following.before
        there = self.there
        self.uses -= 1
        assert there is not None
        if self.arrived:
            torch.accelerator.current_stream().wait_event(self.arrived)
        if not self.uses:
            self.there = None
        return there.untyped_storage()


def _wait_for_copies(leaving: Leaving, most: int) -> None:
    """Let later computes wait until all but `most` of the storages have left, and free those."""
    while len(leaving) > most:
        torch.accelerator.current_stream().wait_event(leaving[0][0])
        leaving.popleft()


class HostActivations:
    """Hooks that keep what autograd saves in host memory until its backward.

    Parameters, a stage's input and tensors of fewer than three dims (tables) stay where they are.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = None if device.type == "cpu" else torch.Stream(device)
        self._leaving: Leaving = deque()

    def hooks(self) -> saved_tensors_hooks:
        """Return the hooks of one forward."""
        known: dict[tuple[int, int], tuple[StorageWeakRef, _OnHost]] = {}
        newest: _OnHost | None = None

        def pack(x: Tensor) -> Tensor | Callable[[], Tensor]:
            """Return what autograd keeps for `x`: itself, or a function that brings it back."""
            nonlocal newest
            if x.dim() < 3 or (x.is_leaf and x.requires_grad):
                return x
            storage = x.untyped_storage()
            like = x.detach().new_empty(0)
            place = x.storage_offset(), x.shape, x.stride()
            key = storage.data_ptr(), x._version
            if key not in known or known[key][0].expired():
                newest = _OnHost(storage, self._stream, newest, self._leaving)
                known[key] = StorageWeakRef(storage), newest
            saved = known[key][1]
            saved.uses += 1
            return lambda: like.set_(saved.take(), *place)

        return saved_tensors_hooks(pack, lambda x: x if isinstance(x, Tensor) else x())
