"""The cache's lock: one holder at a time, also where its file is removed under a waiter."""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from parallel3d.data import cache
from parallel3d.data.cache import cache_root, locked

pytestmark = pytest.mark.gloo


def test_a_waiter_on_a_removed_lock_file_does_not_hold_the_lock(tmp_path):
    path = tmp_path / "corpus.lock"
    first = cache._try_lock(path)
    with ThreadPoolExecutor(1) as pool:
        waiter = pool.submit(cache._try_lock, path, wait=True)
        deadline = time.monotonic() + 5
        while not has_waiter(path) and time.monotonic() < deadline:
            time.sleep(0.01)
        path.unlink()
        second = cache._try_lock(path)
        os.close(first)
        assert second is not None and waiter.result() is None
    os.close(second)


def has_waiter(path):
    """Say whether somebody waits for the lock on `path`, by the kernel's own list."""
    inode = f":{path.stat().st_ino} "
    with open("/proc/locks") as file:
        return any("->" in line and inode in line for line in file)


def test_threads_take_turns_and_leave_no_file(tmp_path):
    inside = []

    def enter(number):
        for _ in range(50):
            with locked(tmp_path / "corpus", lambda: None):
                inside.append(number)
                assert inside == [number]
                inside.pop()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(enter, range(4)))
    assert list(tmp_path.iterdir()) == []


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert str(cache_root("auto")) == "/home/someone/.cache/parallel3d"
    monkeypatch.setenv("XDG_CACHE_HOME", "/scratch")
    assert str(cache_root("auto")) == "/scratch/parallel3d"
    assert str(cache_root("~/corpora")) == "/home/someone/corpora"
    monkeypatch.chdir(tmp_path)
    assert cache_root("here") == tmp_path / "here"
