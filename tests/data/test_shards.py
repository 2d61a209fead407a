"""Tokenising in shards: any number of workers, killed at any instant, gives the same bits."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from threading import Event

import numpy as np
import psutil
import pytest

from parallel3d.base.errors import DataError
from parallel3d.data import shards
from parallel3d.data.documents import Documents
from parallel3d.data.prepare import prepare
from parallel3d.data.shards import cut
from tests.data.documents import Settings, contents

pytestmark = pytest.mark.gloo

SHARD_BYTES = 8000


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """A few hundred rows, in many shards."""
    monkeypatch.setattr(shards, "SHARD_BYTES", SHARD_BYTES)
    monkeypatch.setattr(shards, "BATCH_BYTES", 500)
    path = tmp_path / "rows.jsonl"
    words = ["the", "cat", "sat", "on", "the", "mat", "and", "the", "dog", "ate", "a", "log"]
    rng = np.random.default_rng(0)
    with path.open("w") as file:
        for i in range(400):
            text = f"{i}: " + " ".join(rng.choice(words, rng.integers(1, 40)))
            file.write(json.dumps({"text": text}) + "\n")
    return Settings(
        source="jsonl", paths=(str(path),), cache=str(tmp_path / "cache"), held_out_fraction=0.1
    )


def corpora(cache):
    return contents(Path(cache) / "corpora")


@pytest.mark.slow  # by default the test after kill -9
@pytest.mark.parametrize("workers", [1, 2])
def test_workers_and_shards_do_not_change_the_corpus(rows, workers, tmp_path, monkeypatch):
    prepare(replace(rows, workers=workers))
    monkeypatch.setattr(shards, "SHARD_BYTES", 10**9)
    prepare(replace(rows, cache=str(tmp_path / "whole")))
    assert corpora(rows.cache) == corpora(tmp_path / "whole")
    assert not (Path(rows.cache) / "unfinished").exists()


def test_shards_are_cut_by_size_and_hold_every_document():
    assert cut(np.array([SHARD_BYTES] * 3)) == [0, 3]
    size = shards.SHARD_BYTES
    others = [shards.SHARD_BYTES] * 8
    assert cut(np.array([size, 1, size - 1, 1, *others])) == [0, 1, 3, *range(4, 13)]
    assert cut(np.array([1, 5 * size, 1, *others])) == [0, 1, 2, *range(3, 12)]
    assert cut(np.array([size + 1, *others])) == [0, *range(1, 10)]
    # Workers have something to share of a small corpus, too, but no crumbs.
    assert cut(np.array([2**19] * 24)) == [*range(0, 30, 6)]
    assert cut(np.array([2**19] * 8)) == [0, 6, 8]


def test_next_batch_is_read_while_one_is_encoded(rows, monkeypatch):
    read = Event()
    begun = []
    encode = shards.encode
    original = Documents.pieces

    def pieces(self, indices):
        for piece in original(self, indices):
            if begun:
                read.set()
            yield piece

    def encode_late(tokenizer, texts):
        begun.append(texts)
        assert read.wait(20), "nothing is read meanwhile"
        return encode(tokenizer, texts)

    monkeypatch.setattr(shards, "SHARD_BYTES", 10**9)
    monkeypatch.setattr(shards, "BATCH_BYTES", 3000)
    monkeypatch.setattr(shards, "encode", encode_late)
    monkeypatch.setattr(Documents, "pieces", pieces)
    prepare(rows)
    assert len(begun) > 5


PREPARE = """
import json, os, psutil, signal, sys
sys.path.insert(0, sys.argv[1])
from parallel3d.data import shards
shards.SHARD_BYTES, shards.BATCH_BYTES = 8000, 500
from parallel3d.data.prepare import prepare
from tests.data.documents import Settings

def progress(phase, done, total):
    if phase == "tokenising documents" and done > 200:
        print(*(child.pid for child in psutil.Process().children()), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

prepare(Settings(**json.loads(sys.argv[2])), progress)
"""


def start(settings):
    here = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", PREPARE, here, json.dumps(asdict(settings))]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def prepare_counting(settings):
    """Prepare; return the numbers of documents that were reported as tokenised."""
    seen = []

    def progress(phase, done, total):
        if phase == "tokenising documents":
            seen.append(done)

    prepare(settings, progress)
    return seen


@pytest.mark.slow  # by default a killed worker, Ctrl-C, and tests/data/test_corpus.py after kill -9
def test_after_kill_9_only_missing_documents_are_tokenised(rows, tmp_path, monkeypatch):
    """And the corpus is that of one process and one shard."""
    with start(replace(rows, workers=2)) as process:
        children = process.stdout.readline().split()
    assert len(children) == 2 and process.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 10
    while any(psutil.pid_exists(int(child)) for child in children):
        assert time.monotonic() < deadline, "a worker outlives the command"
        time.sleep(0.05)
    [work] = (Path(rows.cache) / "unfinished").iterdir()
    whole = [path for path in (work / "shards").iterdir() if path.suffix == ""]
    kept = 0
    for path in whole:
        first, last = map(int, path.name.split("-"))
        kept += last - first
    assert 100 < kept <= 400  # on a busy machine the workers may be done before the command hears
    seen = prepare_counting(rows)
    # The first that is heard of is what was kept; then each document once.
    assert seen[0] == kept and seen == sorted(seen) and seen[-1] == 400
    monkeypatch.setattr(shards, "SHARD_BYTES", 10**9)
    prepare(replace(rows, cache=str(tmp_path / "at once")))
    assert corpora(rows.cache) == corpora(tmp_path / "at once")


@pytest.fixture
def workers_left():
    """A function that returns the processes that this test has started."""
    before = psutil.Process().children()
    return lambda: [child for child in psutil.Process().children() if child not in before]


def interrupted(settings):
    """Prepare half of the corpus; return the folder of the unfinished work."""

    def interrupt(phase, done, total):
        if phase == "tokenising documents" and done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(settings, interrupt)
    return max((Path(settings.cache) / "unfinished").iterdir(), key=os.path.getmtime)


def resumed(settings):
    """Prepare; return how many documents did not have to be tokenised again."""
    seen = prepare_counting(settings)
    return seen[0] if len(seen) > 1 and seen[0] > 50 else 0


# By default the test of a killed worker ends the others.
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_ctrl_c_keeps_finished_shards_and_leaves_no_process(rows, workers, workers_left):
    interrupted(replace(rows, workers=workers))
    assert workers_left() == []
    # And the workers of one run are of no matter to the next.
    assert resumed(rows) > 100


def test_other_settings_start_afresh(rows, tmp_path):
    interrupted(rows)
    assert resumed(replace(rows, vocab_size=290)) == 0
    assert resumed(replace(rows, held_out_fraction=0.3)) == 0
    text = Path(rows.paths[0]).read_text()
    Path(rows.paths[0]).write_text(text.replace("399: ", "forty: "))
    assert resumed(rows) == 0
    # The same rows elsewhere are the same.
    other = tmp_path / "elsewhere.jsonl"
    other.write_text(text)
    assert resumed(replace(rows, paths=(str(other),))) > 100


def test_damaged_shard_is_rebuilt(rows, tmp_path):
    work = interrupted(rows)
    spoilt = sorted((work / "shards").iterdir())[0] / "train.bin"
    data = bytearray(spoilt.read_bytes())
    data[10] ^= 1
    spoilt.write_bytes(data)
    resumed(rows)
    prepare(replace(rows, cache=str(tmp_path / "at once")))
    assert corpora(rows.cache) == corpora(tmp_path / "at once")


def test_changed_row_is_reported_by_the_worker(rows, workers_left):
    def change(phase, done, total):
        if phase == "training the tokenizer" and done:
            path = Path(rows.paths[0])
            path.write_text(path.read_text().replace("399:", "XYZ:"))

    with pytest.raises(DataError, match=r"rows\.jsonl, line 400 changed"):
        prepare(replace(rows, workers=2), change)
    assert workers_left() == []


def test_killed_worker_is_reported(rows, workers_left, monkeypatch):
    """And the other one, here a program that waits, is ended; the killed one's shards are kept."""
    start = shards._start
    workers = []

    def start_one(work, number, count, write):
        if number == 0:
            workers.append(start(work, number, count, write))
        else:
            workers.append(subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL))
        return workers[-1]

    def kill(phase, done, total):
        if phase == "tokenising documents" and done > 100:
            workers[0].send_signal(signal.SIGKILL)

    monkeypatch.setattr(shards, "SHARD_BYTES", 1500)  # enough are left when it is killed
    monkeypatch.setattr(shards, "_start", start_one)
    with pytest.raises(DataError, match=r"was killed by signal 9, often .* lower data\.workers"):
        prepare(replace(rows, workers=2), kill)
    assert len(workers) == 2 and workers_left() == []
    assert resumed(rows) > 0


def test_old_unfinished_work_is_removed(rows):
    work = interrupted(rows)
    month_ago = time.time() - 31 * 86400
    os.utime(work, (month_ago, month_ago))
    interrupted(replace(rows, vocab_size=290))
    assert not work.exists()


def test_number_of_workers(monkeypatch):
    assert [shards.num_workers(asked, 3) for asked in (1, 2, 8)] == [1, 2, 3]
    for cores, expected in [(1, 1), (2, 1), (4, 1), (8, 8), (64, 40)]:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, n=cores: range(n))
        assert shards.num_workers("auto", 40) == expected
