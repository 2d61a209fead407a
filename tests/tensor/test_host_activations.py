"""Activations that leave a device whose host runs ahead: how many it still holds."""

from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef

from parallel3d.tensor import host_activations
from parallel3d.tensor.host_activations import HostActivations

pytestmark = pytest.mark.gloo

LAYERS = 24
SIZE = 32


class Event:
    def __init__(self, stream):
        self.work = [*stream.work]  # done when all of it is


class Stream:
    """A queue of work that its device does when another stream, or the test, waits for it."""

    def __init__(self):
        self.work = []
        self.known = set()  # work of other streams that was waited for

    def __enter__(self):
        Stream.current.append(self)

    def __exit__(self, *_):
        Stream.current.pop()

    def record_event(self):
        return Event(self)

    def wait_event(self, event):
        self.known.update(event.work)

    def wait_stream(self, other):
        self.wait_event(other.record_event())


class Device:
    """Counts storages that were saved and are still there while the host runs ahead."""

    def __init__(self):
        self.side = Stream()
        self.main = Stream()
        self.most = 0
        self.saved = []
        self.hosts = set()  # memory of the host
        Stream.current = [self.main]

    def copied(self, to, source):
        copy(to, source)
        stream = Stream.current[-1]
        stream.work.append((len(stream.work), stream is self.side))
        if stream is self.side:
            leaves = StorageWeakRef(to.untyped_storage()) in self.hosts
            on_device = source if leaves else to
            self.saved.append((StorageWeakRef(on_device.untyped_storage()), stream.work[-1]))
            here = [work for storage, work in self.saved if not storage.expired()]
            self.most = max(self.most, len(here))
            # What is gone was waited for: else the allocator gave it to a compute of this stream.
            gone = [work for storage, work in self.saved if storage.expired()]
            assert self.main.known.issuperset(gone)
        return to

    def empty_like(self, like, **options):
        """What would be page-locked is host memory; addresses of both are given out again."""
        made = empty_like(like, **options | {"pin_memory": False})
        if options.get("pin_memory"):
            self.hosts.add(StorageWeakRef(made.untyped_storage()))
        return made


copy = torch.Tensor.copy_
empty_like = torch.empty_like


def trained(hooks):
    torch.manual_seed(0)
    weights = [torch.randn(SIZE, SIZE).mul_(SIZE**-0.5) for _ in range(LAYERS)]
    x = torch.randn(1, 16, SIZE, requires_grad=True)
    y = x
    with hooks.hooks() if hooks else ExitStack():
        for weight in weights:
            y = F.silu(y @ weight)
    y.square().sum().backward()
    return x.grad


def test_few_activations_wait_for_their_copies_however_far_the_host_is_ahead():
    device = Device()
    hooks = HostActivations(torch.device("cpu"))
    hooks._stream = device.side
    with (
        patch.object(torch.accelerator, "current_stream", lambda: Stream.current[-1]),
        patch.object(torch, "empty_like", device.empty_like),
        patch.object(torch.Tensor, "copy_", lambda to, source, **_: device.copied(to, source)),
    ):
        offloaded = [trained(hooks), trained(hooks)]
    most = host_activations._BEHIND + host_activations._AHEAD + 3
    assert device.most <= most < LAYERS
    assert not hooks._leaving
    assert all(torch.equal(trained(None), gradient) for gradient in offloaded)
