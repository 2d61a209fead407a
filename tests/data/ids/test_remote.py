"""Ids of remote files are those of local ones, through a bounded cache that survives anything."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import fsspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel3d.base.errors import DataError
from parallel3d.data.batches import Batches
from parallel3d.data.corpus import Corpus
from parallel3d.data.ids import id_file as remote
from parallel3d.data.ids.id_file import (
    REMOTE_BLOCK,
    SET_BYTES,
    WAYS,
    BlockCache,
    Range,
    RemoteFiles,
)
from parallel3d.data.prepare import prepare
from parallel3d.data.show import as_text, samples, summarise
from tests.data.ids import locked, writers
from tests.data.ids.slow import SlowFiles
from tests.data.ids.test_formats import DOCUMENTS, FORMATS, check_streams, config_of

pytestmark = pytest.mark.gloo


@pytest.fixture(autouse=True)
def nothing_read():
    SlowFiles.reads.clear()
    yield
    SlowFiles.speed = None


def by_url(source, url, cache):
    return prepare(config_of(source, Path("x"), paths=(str(url),), cache=str(cache)))


def key(number):
    return int(number + 1).to_bytes(16, "little")


def data_of(number, size=REMOTE_BLOCK):
    return np.random.default_rng(number).bytes(size)


@pytest.mark.parametrize(
    "name",
    ["megatron", "old megatron", "datatrove", "datatrove, no index", "raw", "numpy", "llm.c"],
)
def test_a_format_by_its_url_is_as_by_its_path(name, tmp_path):
    source, path = FORMATS[name](tmp_path)
    cache = str(tmp_path / "cache")
    local = prepare(config_of(source, path, cache=cache))
    memory = fsspec.filesystem("memory")
    for file in tmp_path.iterdir():
        if file.is_file():
            memory.pipe(f"/{tmp_path.name}/{file.name}", file.read_bytes())
    at = f"memory://{tmp_path.name}"
    for pattern in (f"{at}/{path.name}", f"{at}/*{path.suffix}"):
        corpus = by_url(source, pattern, cache)
        check_streams(corpus)
        assert corpus.key == local.key and corpus.directory != local.directory
    check_streams(Corpus.open(corpus.directory, 2 * SET_BYTES))  # cold
    check_streams(Corpus.open(corpus.directory, 2 * SET_BYTES))
    memory.rm(f"/{tmp_path.name}", recursive=True)
    with pytest.raises(DataError, match="cannot be read"):
        Corpus.open(corpus.directory).train.tokens[:]
    check_streams(Corpus.open(corpus.directory, 2 * SET_BYTES))  # of the cache alone


def slow_corpus(folder, num_documents=300):
    documents = [[*ids, writers.END] for ids in writers.some_documents(num_documents, seed=1)]
    path = writers.megatron(folder / "ids.bin", documents)
    return by_url("megatron", f"slow://{path}", folder / "cache"), path


def test_once_the_cache_is_ahead_nothing_is_read_from_afar(tmp_path, monkeypatch):
    """And until then each block once, and never more than a sample needs."""
    monkeypatch.setattr(remote, "REMOTE_BLOCK", 512)
    corpus, path = slow_corpus(tmp_path)
    SlowFiles.reads.clear()
    for turn in range(3):
        # So many sets that none has more than its share by chance.
        opened = Corpus.open(corpus.directory, 64 * SET_BYTES)
        batches = Batches(opened.train, 8, seed=turn)
        batches.microbatch(0, batches.num_samples)
        assert {name for name, _, _ in SlowFiles.reads} == {str(path)}
        read = sum(size for _, size, _ in SlowFiles.reads)
        assert 0.5 * path.stat().st_size < read <= path.stat().st_size
    one = Batches(Corpus.open(corpus.directory, 0).train, 8, seed=0)
    SlowFiles.reads.clear()
    one.microbatch(0, 4)
    assert 1 <= len(SlowFiles.reads) <= 4
    # A stretch of many documents is read in whole blocks.
    SlowFiles.reads.clear()
    assert len(corpus.train.tokens[:2000]) == 2000
    assert len(SlowFiles.reads) < 16  # some of them for what is held out in between


def test_errors_of_remote_files_have_the_name(tmp_path):
    corpus, path = slow_corpus(tmp_path)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(DataError, match=r"ids\.bin is shorter than .* bytes, .*it shrank"):
        corpus.train.tokens[:]
    with pytest.raises(DataError, match=r"ids\.bin has .* bytes; one of them is truncated"):
        by_url("megatron", f"slow://{path}", tmp_path / "c")
    for url, message in (
        (f"slow://{tmp_path}/none.bin", "matches no file"),
        ("nothing-known://a/b.bin", r"nothing-known://a/b\.bin cannot be read .*known"),
        ("adl://a/b.bin", r"adl://a/b\.bin cannot be read: .*pip install parallel3d\[remote\]"),
    ):
        with pytest.raises(DataError, match=message):
            by_url("tokens", url, tmp_path / "c")


def test_the_bound_holds_and_what_was_used_stays(tmp_path, monkeypatch):
    clock = iter(range(1, 10**6))
    monkeypatch.setattr(remote, "time", SimpleNamespace(time=lambda: next(clock)))
    path = tmp_path / "remote/blocks"
    cache = BlockCache(path, SET_BYTES + 5)  # one set: the order of use is exact
    for number in range(WAYS):
        cache.put(key(number), data_of(number))
    assert cache.get(key(0)) == data_of(0)
    for number in range(WAYS, 2 * WAYS - 1):
        cache.put(key(number), data_of(number))
    kept = [number for number in range(2 * WAYS) if cache.get(key(number))]
    assert kept == [0, *range(WAYS, 2 * WAYS - 1)]
    cache = BlockCache(path, limit := 3 * SET_BYTES - 1)
    for number in range(200):
        cache.put(key(number), data_of(number, REMOTE_BLOCK - number))
    kept = [number for number in range(200) if cache.get(key(number)) is not None]
    assert all(cache.get(key(number)) == data_of(number, REMOTE_BLOCK - number) for number in kept)
    assert len(kept) == 2 * WAYS and path.stat().st_size <= limit
    assert 512 * path.stat().st_blocks <= limit + 2**16
    # Of another limit, at the same time.
    smaller = BlockCache(path, SET_BYTES)
    for number in range(200):
        assert cache.get(key(number)) in (None, data_of(number, REMOTE_BLOCK - number))
    smaller.put(key(1), data_of(1))
    assert smaller.get(key(1)) == data_of(1)


@pytest.mark.parametrize("written", ["nothing", "half a block", "block", "half an entry", "all"])
def test_what_a_killed_process_has_half_written_is_no_block(tmp_path, monkeypatch, written):
    path = tmp_path / "blocks"
    before = BlockCache(path, SET_BYTES)
    for number in range(WAYS):
        before.put(key(number), data_of(number))
    write, calls = os.pwrite, []

    def killed(file, data, place):
        calls.append(place)
        whole = {"nothing": 0, "half a block": 0.5, "block": 1, "half an entry": 1.5, "all": 2}
        left = whole[written] - len(calls) + 1
        if left > 0:
            write(file, data[: int(len(data) * min(left, 1))], place)
        if left < 1:
            raise KeyboardInterrupt
        return len(data)

    monkeypatch.setattr(os, "pwrite", killed)
    try:
        before.put(key(100), data_of(100))
    except KeyboardInterrupt:
        assert written != "all"
    monkeypatch.undo()
    after = BlockCache(path, SET_BYTES)
    found = {n: after.get(key(n)) for n in (*range(WAYS), 100)}
    assert all(data in (None, data_of(n)) for n, data in found.items())
    assert sum(data is None for data in found.values()) in (1, 2)
    assert (found[100] is not None) == (written == "all")
    after.put(key(100), data_of(100))
    assert after.get(key(100)) == data_of(100)


def test_a_disk_that_is_full_keeps_nothing_and_a_folder_that_cannot_be_written_is_named(tmp_path):
    cache = BlockCache(tmp_path / "blocks", SET_BYTES)
    os.dup2(os.open(tmp_path / "blocks", os.O_RDONLY), cache._file.fileno())
    cache.put(key(1), data_of(1))
    assert cache.get(key(1)) is None
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"file/blocks cannot be written .* set data\.cache"):
        BlockCache(tmp_path / "file/blocks", SET_BYTES)


@settings(max_examples=40)
@given(st.data())
def test_any_ranges_are_the_files_bytes(data):
    files = {"a": data_of(1, 3 * 64 + 17), "b": data_of(2, 5), "c": data_of(3, 2 * 64)}
    asked = []

    def read(ranges):
        asked.extend(ranges)
        return [files[r.path][r.start : r.end] for r in ranges]

    ranges = []
    for _ in range(data.draw(st.integers(1, 8))):
        url = data.draw(st.sampled_from("abc"))
        start = data.draw(st.integers(0, len(files[url]) - 1))
        ranges.append(Range(url, start, data.draw(st.integers(start + 1, len(files[url])))))
    kept = {}
    memory = SimpleNamespace(get=kept.get, put=kept.__setitem__)
    sizes = {url: len(whole) for url, whole in files.items()}
    reader = RemoteFiles(sizes, "corpus", memory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote, "read_ranges", read)
        patch.setattr(remote, "REMOTE_BLOCK", 64)
        for _ in range(2):
            assert reader.read(ranges) == [files[r.path][r.start : r.end] for r in ranges]
            # No byte comes twice.
            assert sum(r.end - r.start for r in asked) == sum(map(len, kept.values()))
        assert RemoteFiles(sizes, "", None).read(ranges) == [
            files[r.path][r.start : r.end] for r in ranges
        ]


def test_a_password_in_a_url_is_shown_nowhere(tmp_path):
    path = writers.numpys(tmp_path / "ids.npy", [[*ids, writers.END] for ids in DOCUMENTS])
    url = f"{locked.OPEN}{path}"
    corpus = by_url("tokens", url, tmp_path / "cache")
    part = {"source": "tokens", "paths": (url,)}
    mixture = config_of("mixture", Path("x"), paths=(), mixture=(part, part))
    mixed = prepare(mixture.model_copy(update={"cache": str(tmp_path / "cache")}))
    for shown in (
        json.dumps([corpus.summary(), mixed.summary(), samples(corpus, 8, 0, 3)]),
        as_text(summarise(mixed, None)),
    ):
        assert "secret" not in shown
    assert corpus.name(0).startswith(f"locked://user:***@host{path}, ")
    # Its library shows the URL in its own messages.
    wrong = url.replace("secret", "secreto")
    for refused in (wrong, f"{locked.OPEN}{tmp_path}/none.npy", url.replace("secret", "***")):
        with pytest.raises(DataError, match=r"user:\*\*\*@host") as caught:
            by_url("tokens", refused, tmp_path / "cache")
        assert "secret" not in str(caught.value)
    assert "its password was masked" in str(caught.value)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"user:\*\*\*@host.* truncated"):
        by_url("tokens", url, tmp_path / "other")
