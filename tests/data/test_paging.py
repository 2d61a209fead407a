"""Pages that are asked for are in memory before they are read, and no others."""

import ctypes
import mmap
import os
import time

import numpy as np
import pytest

from parallel3d.data.batches import Batches, will_need
from parallel3d.data.corpus import TokenStream
from parallel3d.data.ids import spans

pytestmark = pytest.mark.gloo

PAGE = mmap.PAGESIZE
PAGES = 4096


def in_memory(array):
    """Which pages of a whole map the system holds: mincore(2)."""
    found = (ctypes.c_ubyte * PAGES)()
    address = ctypes.c_void_p(array.ctypes.data)
    assert ctypes.CDLL(None, use_errno=True).mincore(address, PAGES * PAGE, found) == 0
    return np.flatnonzero(np.frombuffer(found, np.uint8) & 1)


@pytest.fixture
def cold(tmp_path):
    """A map of uint16 of which no page is in memory; skips where the system keeps them."""
    path = tmp_path / "tokens.bin"
    np.arange(PAGES * PAGE // 2, dtype=np.uint16).tofile(path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    whole = np.asarray(np.memmap(path, np.uint16, mode="r"))
    if len(in_memory(whole)):
        pytest.skip("this file system keeps what it is told to let go of")
    return whole


def until_there(array, pages):
    deadline = time.monotonic() + 10
    while set(pages) - set(in_memory(array)):
        assert time.monotonic() < deadline, (pages, in_memory(array))
        time.sleep(0.001)


def test_the_pages_of_windows_come_and_no_others(cold):
    part = np.split(cold, [1000])[1]
    starts = np.array([5, 300, 1000, 3000]) * PAGE // 2 - 1000 - 1
    will_need(part, starts, PAGE // 2)  # each from the last item of a page on: two pages
    pages = [4, 5, 299, 300, 999, 1000, 2999, 3000]
    until_there(cold, pages)
    assert in_memory(cold).tolist() == pages


def test_what_is_in_memory_is_no_matter():
    will_need(np.arange(100), np.array([3, 90]), 50)
    will_need(np.frombuffer(bytes(100), np.uint8), np.array([3]), 50)


def test_batches_ask_before_they_read(cold, monkeypatch):
    asked = []
    monkeypatch.setattr("parallel3d.data.batches.will_need", lambda *args: asked.append(args))
    stream = TokenStream(cold, np.array([0, len(cold)]))
    tokens, _ = Batches(stream, 64, seed=1).microbatch(0, 4)
    [(array, starts, count)] = asked
    assert array is cold and count == 65
    assert [cold[s : s + 64].tolist() for s in starts] == tokens.tolist()


def test_the_windows_of_foreign_files_are_asked_for_together(cold, monkeypatch):
    """Before the first of them is read."""
    path, calls = cold.base.filename, []
    for name in ("advise", "read_ids"):
        call = getattr(spans, name)

        def noted(*args, name=name, call=call, **options):
            calls.append(name)
            if name == "read_ids" and calls.count(name) == 1:
                until_there(cold, [10, 20, 30])
            return call(*args, **options)

        monkeypatch.setattr(spans, name, noted)
    file = {"name": "ids", "path": str(path), "dtype": "uint16", "offset": 0}
    ids = spans.Spans(
        files=[file],
        places=np.zeros(1, np.int32),
        starts=np.zeros(1, np.int64),
        bounds=np.array([0, len(cold) + 1]),
        end_of_text=7,
        dtype=np.dtype(np.uint16),
    )
    index = np.array([10, 20, 30])[:, None] * PAGE // 2 + np.arange(3)
    assert ids[index].tolist() == index.astype(np.uint16).tolist()
    assert calls == ["advise"] * 3 + ["read_ids"] * 3
