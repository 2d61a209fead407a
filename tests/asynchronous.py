"""The CPU, taken for an accelerator whose work is only queued: what makes the host wait is counted.

DeepSpeed is told that its device runs beside the host, so that it takes the branches that it takes
on a GPU: streams, events, waits of one for another. They do nothing but count, and no event is ever
done before it is waited for. Of torch, all that reads a tensor's value, or copies from memory that
a device cannot read by itself, counts as a wait too, where this project or DeepSpeed asks for it.
"""

import sys
from collections import Counter
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

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
        found = dict(self)
        self.clear()
        return found


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


def make_stream(waits):
    """Streams and events whose waits are counted."""

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

        def wait_stream(self, other):
            pass

        wait_event = wait_stream

        def record_event(self, event=None):
            return event or Event()

    return Stream, Event


@contextmanager
def asynchronous():
    """Meanwhile the device is asynchronous; gives the Waits."""
    waits, now = Waits(), Stack()
    stream_class, event_class = make_stream(waits)
    current, cpu = stream_class(), type(get_accelerator())

    @contextmanager
    def on_stream(self, stream):
        yield

    with now:
        for name in (
            "is_synchronized_device",
            "resolves_data_dependency",
            "handles_memory_backpressure",
        ):
            now.set(cpu, name, lambda self: False)
        now.set(cpu, "Stream", property(lambda self: stream_class))
        now.set(cpu, "Event", property(lambda self: event_class))
        for name in ("current_stream", "default_stream"):
            now.set(cpu, name, lambda self, device_index=None: current)
        now.set(cpu, "stream", on_stream)
        now.set(cpu, "synchronize", lambda self, index=None: waits.note("device.synchronize"))
        now.set(torch.Tensor, "record_stream", lambda self, stream: None)
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
