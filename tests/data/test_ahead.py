"""What is made ahead is what would have been made; its errors and its end."""

import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.base.errors import DataError
from parallel3d.data.ahead import ReadAhead

pytestmark = pytest.mark.gloo


def until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def made():
    """A reader whose calls are noted: (key, name of the thread)."""
    calls = []

    def make(key):
        calls.append((key, threading.current_thread().name))
        return f"made {key}"

    ahead = ReadAhead(make)
    yield ahead, calls
    ahead.close()


def test_announced_keys_are_made_once_by_the_thread(made):
    ahead, calls = made
    assert ahead.take(0, [1, 2]) == "made 0"
    until(lambda: len(calls) == 3)
    assert ahead.take(1, [2, 3]) == "made 1"
    until(lambda: len(calls) == 4)
    assert [ahead.take(2), ahead.take(9)] == ["made 2", "made 9"]
    here = threading.current_thread().name
    assert sorted(calls[:3]) == [(0, here), (1, "read ahead"), (2, "read ahead")]
    # 3 was let go of when nothing was to follow on 2.
    assert calls[3:] == [(3, "read ahead"), (9, here)] and not ahead._futures


def test_no_thread_starts_without_announced_keys(made):
    ahead, calls = made
    assert [ahead.take(key) for key in (3, 1)] == ["made 3", "made 1"]
    assert {name for _, name in calls} == {threading.current_thread().name}
    assert ahead._thread is None


@given(st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(0, 5), max_size=4))))
def test_any_order_returns_the_requested_keys(asked):
    ahead = ReadAhead(lambda key: [key])
    try:
        for key, then in asked:
            assert ahead.take(key, then) == [key]
    finally:
        ahead.close()


def test_error_is_raised_only_where_its_key_is_taken():
    def make(key):
        if key % 2:
            raise DataError(f"{key} is odd")
        return key

    ahead = ReadAhead(make)
    assert ahead.take(0, [1, 2, 3]) == 0
    until(lambda: ahead._futures[3].done())
    with pytest.raises(DataError, match="1 is odd"):
        ahead.take(1, [2, 3])
    assert ahead.take(2, [3, 4]) == 2
    assert ahead.take(4, [5]) == 4
    ahead.close()


def test_close_waits_for_the_running_call_and_starts_no_other():
    began = threading.Event()
    go_on = threading.Event()
    calls = []

    def make(key):
        calls.append(key)
        if key == 1:
            began.set()
            go_on.wait()

    ahead = ReadAhead(make)
    ahead.take(0, [1, 2])
    thread = ahead._thread
    assert began.wait(10)
    threading.Timer(0.05, go_on.set).start()
    ahead.close()
    assert not thread.is_alive() and sorted(calls) == [0, 1]
    ahead.close()
    assert ahead.take(2) is None  # whoever goes on reads for himself


HANGS = """
import threading
from parallel3d.data import ahead
ahead.CLOSE_TIMEOUT_SECONDS = 0.1
hung = threading.Event()
def make(key):
    if key:
        hung.set()
        threading.Event().wait()
reader = ahead.ReadAhead(make)
reader.take(0, [1])
hung.wait()
reader.close()
reader.take(0, [3])  # and nobody closes it
"""


def test_hanging_read_does_not_keep_the_process_alive():
    # A thread that is hung at its end is let go of, and one that nobody closed.
    assert subprocess.run([sys.executable, "-c", HANGS], timeout=30).returncode == 0
