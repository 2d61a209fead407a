"""The drill misses nothing: between any two changes that a save makes on disk is a fault point."""

import os
import shutil
import threading
from collections import Counter
from functools import partial

import pytest

from parallel3d.train.metrics import forget_after
from tests.checkpoint.drill import Run, check_resumed, prepared_config

pytestmark = pytest.mark.drill

WRITES = ("open", "mkdir", "write", "fsync", "rename", "unlink", "rmdir")


def listen(path, rank):
    """Write a line for every fault point, and for every change below checkpoints/, as they come."""
    from parallel3d.base import atomic
    from parallel3d.checkpoint import disk

    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    write = os.write

    def say(event):
        write(log, f"{threading.get_ident()} {event}\n".encode())

    def say_point(name):
        say(f"point {name}")

    def heard(name, call):
        def listening(target, *args, **kwargs):
            place = os.readlink(f"/proc/self/fd/{target}") if type(target) is int else str(target)
            reads = name == "open" and not (args and args[0] & os.O_CREAT)
            if "/checkpoints/" in place and not reads:
                say(f"{name} {place}")
            return call(target, *args, **kwargs)

        return listening

    for name in (*WRITES, "replace", "truncate", "ftruncate", "link", "symlink"):
        setattr(os, name, heard(name, getattr(os, name)))
    atomic.fault_point = say_point
    disk.fault_point = say_point


def events_of(path):
    """Return each thread's events in order: (kind, place)."""
    threads = {}
    for line in path.read_text().splitlines():
        thread, kind, place = line.split(" ", 2)
        threads.setdefault(thread, []).append((kind, place))
    path.unlink()
    return threads.values()


def changes_without_a_point(events):
    """Return the changes that directly follow another change, and the number of each kind."""
    bare = []
    number = Counter()
    for events_of_thread in events:
        before = "start"
        for kind, place in events_of_thread:
            if kind != "point":
                number[kind] += 1
                if before != "point":
                    bare.append((kind, place))
            before = kind
    return bare, number


def test_fault_point_precedes_every_change_on_disk(tmp_path):
    """In saves, in deletes, and as what a kill left is tidied up."""
    config = prepared_config(tmp_path, num_layers=1)
    run = Run(config, "one", (1, 1, 1), zero_optimization__stage=1)
    events = tmp_path / "events"
    ended = run.start(disturb=partial(listen, events))
    assert ended[0].code == 0, ended[0].log
    bare, number = changes_without_a_point(events_of(events))
    assert bare == []
    assert set(number) == set(WRITES)
    # Four saves of three files, a tokenizer of two and a text of "latest"; two old ones deleted.
    assert number["mkdir"] == 4 * 2 and number["rmdir"] == 2 * 2
    assert number["open"] == 4 * 6 and number["unlink"] == 4 + 2 * 5
    assert number["rename"] == 4 * 2 + 2
    assert number["write"] > 4 * 4 and number["fsync"] >= 4 * 4
    leftover = run.checkpoints / "step-9.tmp"
    shutil.copytree(run.checkpoints / "step-4", leftover)
    os.truncate(run.checkpoints / "step-4/state.json", 10)
    check_resumed(run.start(disturb=partial(listen, events)), 3)
    bare, number = changes_without_a_point(events_of(events))
    assert bare == []
    assert not leftover.exists() and number["rmdir"] == 2


def test_only_damaged_and_later_metrics_lines_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    forget_after(path, 5)
    assert not path.exists()
    line = '{{"step": {}, "loss": 1.5}}\n'.format
    path.write_text(line(1) + line(2) + line(3)[:-1])  # the last without its end
    forget_after(path, 5)
    assert path.read_text() == line(1) + line(2) + line(3)
    path.write_text(line(1) + "{\0" + line(2) + line(3) + line(4) + line(5)[:9])
    forget_after(path, 3)
    assert path.read_text() == line(1) + line(3)
