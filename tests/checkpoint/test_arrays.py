"""Memory that conversions use again: no more blocks than were in use at once, none in use twice."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from parallel3d.checkpoint import chunks
from parallel3d.checkpoint.chunks import empty, recycled

pytestmark = pytest.mark.gloo


@pytest.fixture
def asked_for(monkeypatch):
    """The sizes of blocks that the system was asked for, in order."""
    asked = []
    np_empty = chunks.np.empty

    def counted(size, dtype):
        asked.append(size)
        return np_empty(size, dtype)

    monkeypatch.setattr(chunks.np, "empty", counted)
    return asked


def filled(count, value=0):
    return empty([count], torch.uint8).fill_(value)


def test_memory_of_a_freed_tensor_is_reused(asked_for):
    with recycled():
        first = filled(100)
        view = first[7:]
        del first
        second = filled(90, 2)  # the view holds the memory of the first
        assert asked_for == [100, 90] and not view.any()
        del view, second
        for _ in range(3):
            filled(80)
        assert asked_for == [100, 90]


def test_number_of_blocks_is_the_most_in_use_at_once(asked_for):
    with recycled():
        for size in (10, 20, 40, 30, 10, 40):
            filled(size)
    assert asked_for == [10, 20, 40]  # each larger one in the place of the one before
    filled(10)
    assert asked_for[3:] == [10]  # and none is kept afterwards


def test_live_tensors_share_no_memory_across_threads():
    def work(value):
        kept = [filled(1000 + 100 * n, value + n) for n in range(4)]
        for n in range(200):
            kept[n % 4] = filled(1000 + 7 * n, value + n % 4)
        return all(bool((t == value + n).all()) for n, t in enumerate(kept))

    with recycled(), ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(0, 80, 10)))
