"""Numbers, texts and tensors that ranks send each other besides a step's own (floor 1)."""

import time
from collections.abc import Sequence
from copy import copy
from datetime import timedelta
from typing import Self

import numpy as np
import torch
import torch.distributed as dist

from parallel3d.mesh.join import STARTUP_TIMEOUT
from parallel3d.mesh.pulse import rank as pulse
from parallel3d.mesh.transfer import Transfer, all_gather_single


class Messages:
    """Gathers, broadcasts and exchanges of this rank, and the group for threads beside training.

    Collectives of a group must keep their order, so such threads have a group of their own, over
    gloo: `aside`. A rank that waits there still handles signals. Texts are sent as bytes, without
    pickle.

    - `places`: the ranks among which `exchange` sends, in order (`Mesh.places`).
    """

    timeout: timedelta | None = None
    """How long a transfer may take; None leaves it to the backend."""

    def __init__(self, rank: int, device: torch.device, places: Sequence[int]) -> None:
        self._rank = rank
        self._device = device
        self._places = places
        self.aside = _join_aside()

    def beside(self) -> Self:
        """Return messages with another group beside training, for one more thread. Collective."""
        other = copy(self)
        other.aside = _join_aside()
        return other

    @pulse.waiting("gathering numbers of all ranks")
    def gather_floats(self, values: Sequence[float | torch.Tensor]) -> list[list[float]]:
        """Return every rank's `values`, equally many on each, in the order of global ranks.

        Tensors of one element stay on the device; the host waits for it once, to read all values.
        """
        known = [0.0 if isinstance(v, torch.Tensor) else v for v in values]
        pinned = self._device.type != "cpu"  # a copy from pageable memory would wait for the device
        row = torch.tensor(known, dtype=torch.float64, pin_memory=pinned)
        row = row.to(self._device, non_blocking=True)
        for place, value in zip(row, values, strict=True):
            if isinstance(value, torch.Tensor):
                place.copy_(value.detach().reshape(()), non_blocking=True)
        gathered = row.new_empty(dist.get_world_size() * len(known))
        all_gather_single(gathered, row)
        rows: list[list[float]] = gathered.view(-1, len(known)).tolist()
        return rows

    def sum_floats(self, values: torch.Tensor) -> list[float]:
        """Return the sum of `values` [n] over all ranks; the host waits for it."""
        total = values.clone()
        dist.all_reduce(total)
        numbers: list[float] = total.tolist()
        return numbers

    def gather_texts(
        self, text: str, aside: bool = False, group: dist.ProcessGroup | None = None
    ) -> list[str]:
        """Return every rank's text, in the order of global ranks.

        - `aside`: use the group for threads beside training.
        - `group`: return the texts of its ranks, in its order.
        """
        data = _bytes_of(text)
        if aside:
            parts = self._gather_parts(data, self.aside)
        else:
            parts = self._gather_parts(data.to(self._device), group or dist.group.WORLD)
        return [_text_of(part) for part in parts]

    def broadcast_text(self, text: str, source: int = 0) -> str:
        """Return the text of the rank `source` on every rank, over the group beside training."""
        data = _bytes_of(text)
        length = torch.tensor([len(data)])
        _wait(dist.broadcast(length, source, self.aside, async_op=True))
        if self._rank != source:
            data = data.new_empty(int(length))
        _wait(dist.broadcast(data, source, self.aside, async_op=True))
        return _text_of(data)

    def send_aside(self, data: torch.Tensor, rank: int) -> Transfer:
        """Start sending host memory to a rank, over the group beside training."""
        return Transfer.of(dist.isend(data, rank, self.aside), STARTUP_TIMEOUT)

    def receive_aside(self, out: torch.Tensor, rank: int) -> None:
        """Receive what a rank sends with `send_aside`, in its order, into host memory."""
        Transfer.of(dist.irecv(out, rank, self.aside), STARTUP_TIMEOUT).wait()

    @pulse.waiting("exchanging tensors with another rank")
    def exchange(
        self, tensors: Sequence[torch.Tensor], into: Sequence[torch.Tensor], by: int
    ) -> None:
        """Send tensors to the rank `by` places on, and receive those of the rank `by` places back.

        Both may have other numbers of them. Collective over the ranks of `places`.
        """
        own = self._places.index(self._rank)
        target = self._places[(own + by) % len(self._places)]
        source = self._places[(own - by) % len(self._places)]
        if target == self._rank:
            for tensor, received in zip(tensors, into, strict=True):
                received.copy_(tensor)
            return
        sends = []
        for tag, tensor in enumerate(tensors):
            sends.append(dist.P2POp(dist.isend, tensor.contiguous(), target, tag=tag))
        receives = []
        for tag, tensor in enumerate(into):
            receives.append(dist.P2POp(dist.irecv, tensor, source, tag=tag))
        # Where target and source are one rank, the lower of the two sends first.
        ops = [*sends, *receives] if self._rank < target else [*receives, *sends]
        if ops:
            for work in dist.batch_isend_irecv(ops):
                Transfer(work, self.timeout).wait()

    def exchange_text(self, text: str, by: int) -> str:
        """Send a text to the rank `by` places on; return that of the rank `by` places back."""
        data = _bytes_of(text).to(self._device)
        length = torch.tensor([len(data)], device=self._device)
        other_length = torch.empty_like(length)
        self.exchange([length], [other_length], by)
        received = data.new_empty(int(other_length))
        self.exchange([data], [received], by)
        return _text_of(received)

    def all_gather(self, part: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
        """Concatenate the parts of a group's ranks along `dim`, where their sizes may differ."""
        if group.size() == 1:
            return part
        return torch.cat(self._gather_parts(part, group, dim), dim)

    def _gather_parts(
        self, part: torch.Tensor, group: dist.ProcessGroup | None, dim: int = 0
    ) -> list[torch.Tensor]:
        """Return the parts of all ranks of a group, whose sizes along `dim` may differ."""
        own_length = torch.tensor([part.shape[dim]], device=part.device)
        lengths = [int(length) for length in self._gather(own_length, group)]
        shape = [*part.shape]
        shape[dim] = max(lengths)
        padded = part.new_zeros(shape)
        padded.narrow(dim, 0, part.shape[dim]).copy_(part)
        gathered = self._gather(padded, group) if padded.numel() else [padded] * len(lengths)
        return [t.narrow(dim, 0, length) for t, length in zip(gathered, lengths, strict=True)]

    def _gather(self, tensor: torch.Tensor, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
        """Return the tensors of all ranks of a group, which have one shape."""
        gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        work = dist.all_gather(gathered, tensor, group, async_op=group is self.aside)
        if work is not None:
            _wait(work)
        return gathered


def _join_aside() -> dist.ProcessGroup:
    """Return a new group of all ranks for one thread beside training. Collective."""
    backend = None if dist.get_backend() == "fake" else "gloo"
    group: dist.ProcessGroup = dist.new_group(backend=backend, timeout=STARTUP_TIMEOUT)
    return group


def _wait(work: dist.Work) -> None:
    """Wait for a started collective in Python, so that signal handlers run.

    Each sleep is a twentieth of the time waited so far, from 1 to 100 ms. RuntimeError if a peer
    dies.
    """
    start = time.monotonic()
    while not work.is_completed():
        time.sleep(min(max((time.monotonic() - start) / 20, 0.001), 0.1))
    work.wait()


def _bytes_of(text: str) -> torch.Tensor:
    """Return the bytes of a text, uint8 on the host."""
    return torch.from_numpy(np.frombuffer(text.encode(), dtype=np.uint8).copy())


def _text_of(data: torch.Tensor) -> str:
    """Return the text whose bytes are in `data`."""
    return data.cpu().numpy().tobytes().decode()
