"""The copy that an asynchronous save is written from: in pieces that page-locking rounds up by
nothing, and filled across their borders."""

import random

import pytest
import torch

from parallel3d.checkpoint import chunk_runs
from parallel3d.checkpoint.chunk_runs import HostCopy, copy_bytes, piece_sizes

pytestmark = pytest.mark.gloo

MIB = 2**20


def locked(num_bytes):
    """What CUDA's allocator takes for page-locked memory: PowerOf2Ceil (CachingHostAllocator.h)."""
    return 1 << (num_bytes - 1).bit_length()


@pytest.mark.parametrize("gib", [0.001, 1, 2.5, 33, 33.123])
def test_page_locked_memory_matches_the_count(gib):
    """One buffer of 33 GiB takes 64."""
    numel = int(gib * 2**28) + 1
    pieces = piece_sizes(numel)
    assert sum(locked(4 * size) for size in pieces) == copy_bytes(numel) < 4 * numel + MIB
    assert copy_bytes(numel) >= 4 * numel and len(pieces) < 20
    assert pieces == sorted(pieces, reverse=True)


@pytest.mark.parametrize("numel", [0, 1, 63, 64, 65, 1000, 4096, 5001])
def test_host_copy_holds_its_parts(numel, monkeypatch):
    monkeypatch.setattr(chunk_runs, "SMALLEST", 64)
    draw = random.Random(numel)
    value = torch.randn(numel)
    parts = []
    while sum(map(len, parts)) < numel:
        start = sum(map(len, parts))
        parts.append(value[start : start + draw.randint(1, 700)])
    copy = HostCopy(numel, pinned=False)
    for _ in range(2):  # it is used again
        copy.fill(parts)
        arrays = copy.arrays()
        assert b"".join(array.tobytes() for array in arrays) == value.numpy().tobytes()
    assert len(arrays) == len(piece_sizes(numel))


def test_fill_waits_for_copies_from_the_device(monkeypatch):
    """Else the thread that writes them would read what is not there yet."""
    empty = torch.empty
    value = torch.randn(5001)
    waited = []
    monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory=False: empty(*sizes))
    copy = HostCopy(len(value), pinned=True)

    def synchronize():
        waited.append(b"".join(array.tobytes() for array in copy.arrays()))

    monkeypatch.setattr(torch.accelerator, "synchronize", synchronize)
    copy.fill(value.split(700))
    assert waited == [value.numpy().tobytes()]  # once, after the last copy
