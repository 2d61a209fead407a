"""The CPU as a stand-in for an accelerator whose work is only queued, which counts two things.

DeepSpeed is told that its device runs beside the host, so that it takes the branches that it takes
on a GPU: streams, events, waits of one for another.

- `Waits`: how often the host waits. No event is ever done before it is waited for. A call of torch
  that reads a tensor's value, or copies from memory that a device cannot read by itself, counts
  where this project or DeepSpeed makes it.
- `Frees`: gradients that are freed or replaced while another stream than the default one uses them.
"""

import sys
from collections import Counter
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).parents[1]
READS = ("item", "tolist", "numpy", "cpu", "__float__", "__int__", "__bool__", "__index__")


class Waits(Counter):
    """How often the host waited, by (what for, where): the file and function that asked.

    `on`: whether it counts.
    """

    on = True

    def note(self, kind):
        if self.on:
            self[kind, place()] += 1

    def take(self):
        """What was counted since the last time, as a plain dict."""
        counts = dict(self)
        self.clear()
        return counts


class Frees(Counter):
    """Gradients that are freed or replaced after a stream used them, by (is safe, place).

    Freeing is safe if the stream was recorded (`record_stream`), or if the host or the default
    stream has waited for it. Otherwise the allocator may give the memory to kernels of the default
    stream while the other stream still reads it. Tensors that a stream made itself do not count.
    """

    def __init__(self):
        super().__init__()
        self._users = {}  # by storage: a weak reference to it, and the streams that use it
        self._recorded = {}

    @property
    def unsafe(self):
        """The number of unsafe frees by place."""
        return {where: count for (is_safe, where), count in self.items() if not is_safe}

    def use(self, tensors, stream):
        """Note that kernels of a stream use tensors."""
        for tensor in tensors:
            _add(self._users, tensor, stream)

    def record(self, tensor, stream):
        """Note `tensor.record_stream(stream)`."""
        _add(self._recorded, tensor, stream)

    def wait(self, stream):
        """Note that the host, or the default stream, has waited for a stream."""
        for _, streams in self._users.values():
            streams.discard(stream)

    def let_go(self, storage):
        """Count a storage if that was the last tensor to hold it, and a stream has used it."""
        if storage in self._users and self._users[storage][0].expired():
            _, streams = self._users.pop(storage)
            _, recorded = self._recorded.pop(storage, (None, set()))
            if streams:
                self[streams <= recorded, place()] += 1


def _add(table, tensor, stream):
    storage = tensor.untyped_storage()
    # The weak reference keeps the address from being used again.
    table.setdefault(storage._cdata, (StorageWeakRef(storage), set()))[1].add(stream)


class Uses(TorchDispatchMode):
    """Notes the tensors that operators on a stream use, except those that they make."""

    def __init__(self, frees, stream):
        super().__init__()
        self._frees = frees
        self._stream = stream
        self._made = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        others = [t for t in inputs if t.untyped_storage()._cdata not in self._made]
        self._frees.use(others, self._stream)
        outputs = func(*args, **(kwargs or {}))
        known = {t.untyped_storage()._cdata for t in inputs}
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in known:
                _add(self._made, tensor, self._stream)
        return outputs


def place():
    """The innermost of this project's or DeepSpeed's frames, as "folder/file.py:function"."""
    frame = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT / "parallel3d"):
            return f"{path.relative_to(ROOT)}:{frame.f_code.co_name}"
        if "deepspeed" in path.parts:
            inside = path.parts[len(path.parts) - path.parts[::-1].index("deepspeed") :]
            return f"deepspeed/{'/'.join(inside)}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"


def make_stream(waits, is_default):
    """Streams and events whose waits are counted; `is_default` tells the default stream."""

    class Event:
        def __init__(self, *args, **options):
            pass

        def query(self):
            return False  # the device is always behind

        def synchronize(self):
            waits.note("event.synchronize")

        def record(self, *args):
            pass

        wait = record

        def elapsed_time(self, other):
            return 0.0

    class Stream(Event):
        device = None

        def synchronize(self):
            waits.note("stream.synchronize")
            waits.frees.wait(self)

        def wait_stream(self, other):
            if is_default(self):
                waits.frees.wait(other)

        def wait_event(self, event):
            pass

        def record_event(self, event=None):
            return event or Event()

    return Stream, Event


@contextmanager
def asynchronous():
    """Make the device asynchronous; yields the Waits, whose `frees` are the Frees."""
    waits = Waits()
    now = Stack()
    waits.frees = Frees()
    stream_class, event_class = make_stream(waits, lambda stream: stream is default)
    default = stream_class()
    cpu = type(get_accelerator())
    streams = [default]
    gradient = torch.Tensor.grad
    data = torch.Tensor.data

    @contextmanager
    def on_stream(self, stream):
        streams.append(stream)
        with nullcontext() if stream is default else Uses(waits.frees, stream):
            yield
        streams.pop()

    def set_gradient(tensor, value):
        old = gradient.__get__(tensor)
        storage = None if old is None else old.untyped_storage()._cdata
        del old
        gradient.__set__(tensor, value)
        waits.frees.let_go(storage)

    def set_data(tensor, value):
        storage = tensor.untyped_storage()._cdata
        data.__set__(tensor, value)
        waits.frees.let_go(storage)

    with now:
        for name in (
            "is_synchronized_device",
            "resolves_data_dependency",
            "handles_memory_backpressure",
        ):
            now.set(cpu, name, lambda self: False)
        now.set(cpu, "Stream", property(lambda self: stream_class))
        now.set(cpu, "Event", property(lambda self: event_class))
        now.set(cpu, "current_stream", lambda self, device_index=None: streams[-1])
        now.set(cpu, "default_stream", lambda self, device_index=None: default)
        now.set(cpu, "stream", on_stream)
        now.set(cpu, "synchronize", lambda self, index=None: waits.note("device.synchronize"))
        now.set(torch.Tensor, "record_stream", lambda *to: waits.frees.record(*to))
        now.set(torch.Tensor, "grad", property(gradient.__get__, set_gradient))
        now.set(torch.Tensor, "data", property(data.__get__, set_data))
        for owner, name in (
            *((torch.Tensor, read) for read in READS),
            (torch, "equal"),
            (torch.cpu, "synchronize"),
            (torch.accelerator, "synchronize"),
            (dist, "barrier"),
        ):
            now.set(owner, name, counted(waits, owner, name))
        now.set(torch, "tensor", copying(waits, torch.tensor, "device"))
        now.set(torch.Tensor, "to", copying(waits, torch.Tensor.to))
        yield waits


class Stack(ExitStack):
    def set(self, owner, name, value):
        self.enter_context(patch.object(owner, name, value, create=True))


def counted(waits, owner, name):
    call = getattr(owner, name)

    def count(*args, **options):
        # Adam's count of its steps is on the host, where it is not fused.
        if "/torch/optim/" not in sys._getframe(1).f_code.co_filename:
            waits.note(name.strip("_"))
        return call(*args, **options)

    return count


def copying(waits, call, *names):
    """`call`, counted where this project lets it copy to a device and wait for it."""

    def count(*args, **options):
        devices = [x for x in (*args, *options.values()) if isinstance(x, (torch.device, str))]
        if devices and not options.get("non_blocking") and place().startswith("parallel3d"):
            waits.note("copy")
        return call(*args, **options)

    return count
