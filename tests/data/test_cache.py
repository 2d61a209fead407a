"""The cache's lock: one writer at a time; and where the cache is."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from parallel3d.data.cache import cache_root, locked

pytestmark = pytest.mark.gloo


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


def test_cache_root_follows_setting_and_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert str(cache_root("auto")) == "/home/someone/.cache/parallel3d"
    monkeypatch.setenv("XDG_CACHE_HOME", "/scratch")
    assert str(cache_root("auto")) == "/scratch/parallel3d"
    monkeypatch.chdir(tmp_path)
    assert cache_root("here") == tmp_path / "here"
