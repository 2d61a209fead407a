"""A streamed corpus has the samples of the local one, with less disk, through faults and kills."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from time import sleep

import fsspec
import numpy as np
import pytest

from parallel3d.base.errors import DataError
from parallel3d.config.data import DataConfig
from parallel3d.data import streams
from parallel3d.data.batches import Batches
from parallel3d.data.cache import locked
from parallel3d.data.prepare import prepare, prepare_manifests
from parallel3d.data.sharded import Shard, ShardCache
from tests.data.ids import writers
from tests.data.stores import http_store, s3_store

pytestmark = pytest.mark.gloo

LENGTH = 16
SHARDS = 8
EPOCHS = 2
SEED = 3
IDS = {"tokenizer": "none", "vocab_size": writers.SIZE, "end_of_text_id": writers.END}


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(streams, "FIRST_PAUSE_SECONDS", 0.01)


@pytest.fixture
def shards(tmp_path):
    folder = tmp_path / "shards"
    folder.mkdir()
    for number in range(SHARDS):
        # One is shorter than a sample.
        documents = writers.some_documents(10, seed=number) if number != 5 else [[9], [10, 11]]
        documents = [[*ids, writers.END] for ids in documents]
        writers.numpys(folder / f"{number:02}.npy", documents)
    return folder


def config(paths, folder, stream=True, **settings):
    data = {"source": "tokens", "held_out_fraction": 0, **IDS} | settings
    data |= {"paths": (str(paths),), "sequence_length": LENGTH, "cache": str(folder / "cache")}
    if stream:
        data = {"stream_window": 3, **data, "stream": True, "manifest": str(folder / "manifest")}
    return DataConfig(**data)


def local_samples(shards, folder, **settings):
    settings.pop("stream_window", 0)
    batches = Batches(prepare(config(shards, folder, False, **settings)).train, LENGTH, SEED)
    return samples(batches, batches.num_samples)


def samples(batches, step, dp=1, start=0, end=None):
    """The samples start .. end - 1 by index, read in steps that dp readers share."""
    end = end or EPOCHS * batches.num_samples
    read = []
    while start < end:
        size = min(step, end - start)
        for part in np.array_split(np.arange(start, start + size), dp):
            if len(part):
                tokens, labels = batches.microbatch(int(part[0]), len(part))
                read.append(np.hstack([tokens, labels[:, -1:]]))
        start += size
    return np.concatenate(read)


def digest(array):
    return sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def streamed(settings, *layout):
    batches = Batches(prepare(settings).train, LENGTH, SEED)
    try:
        return samples(batches, *layout)
    finally:
        batches.close()


def bytes_in(folder):
    """The bytes of a folder's files, some of which may be removed at the same time."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def slow(*names):
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("store", ["folder", *slow("s3", "http", "memory")])
def test_every_store_has_the_local_order(store, shards, tmp_path):
    local = local_samples(shards / "*.npy", tmp_path)

    def check(url):
        settings = config(f"{url}/*.npy", tmp_path, stream_window="all")
        prepare_manifests(settings)
        assert digest(streamed(settings, 40)) == digest(local)

    if store == "folder":
        check(shards)
    elif store == "http":
        with http_store(shards) as server:
            check(server.url)
    elif store == "s3":
        with s3_store([*shards.iterdir()]) as url:
            check(url)
    else:
        # For gs:// and hf://, which fsspec reads by the same interface.
        fsspec.filesystem("memory").put(f"{shards}/", "/streamed", recursive=True)
        check("memory://streamed")


@pytest.mark.parametrize(
    "name", ["jsonl", *slow("megatron", "datatrove", "raw", "parquet", "text")]
)
def test_every_source_has_the_samples_of_its_local_corpus(name, tmp_path):
    folder = tmp_path / "shards"
    settings = {"source": name}
    folder.mkdir()
    for number in range(3):
        documents = [[*ids, writers.END] for ids in writers.some_documents(12, seed=number)]
        texts = [" ".join(f"w{x}" for x in ids[:-1]) for ids in documents]
        if name == "megatron":
            pattern = writers.megatron(folder / f"{number}.bin", documents)
        elif name == "datatrove":
            pattern = writers.datatrove(folder / f"{number}.ds", documents)
        elif name == "raw":
            settings["source"] = "tokens"
            pattern = writers.raw(folder / f"{number}.npy", documents)
        elif name == "parquet":
            import pyarrow as pa
            from pyarrow import parquet

            pattern = folder / f"{number}.parquet"
            settings["token_field"] = "input_ids"
            parquet.write_table(pa.table({"input_ids": documents, "other": texts}), pattern)
        elif name == "jsonl":
            pattern = folder / f"{number}.jsonl"
            pattern.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        else:
            settings["documents"] = "line"
            pattern = folder / f"{number}.txt"
            pattern.write_text("\n\n".join(texts) + "\n")
    if name in ("jsonl", "text"):
        settings |= {
            "tokenizer": tokenizer_of(tmp_path),
            "vocab_size": 4096,
            "end_of_text_id": None,
        }
    pattern = folder / f"*{pattern.suffix}"
    local = local_samples(pattern, tmp_path, **settings)
    settings = config(pattern, tmp_path, **settings, stream_window="all")
    prepare_manifests(settings)
    local_settings = settings.model_copy(update={"stream": False, "held_out_fraction": 0})
    assert prepare(settings).key == prepare(local_settings).key
    assert digest(streamed(settings, 64)) == digest(local)


def tokenizer_of(folder):
    from parallel3d.data.tokenizer import save_tokenizer, train_tokenizer

    (folder / "tokenizer").mkdir()
    save_tokenizer(train_tokenizer(["w1 w2 w3"], 300), folder / "tokenizer")
    return str(folder / "tokenizer")


def test_samples_are_equal_on_any_mesh_with_a_small_cache(shards, tmp_path):
    settings = config(shards / "*.npy", tmp_path)
    prepare_manifests(settings)
    limit = prepare(settings).train.tokens.num_bytes_needed
    settings = settings.model_copy(update={"stream_cache_bytes": limit})
    cache = tmp_path / "cache/streams"
    seen = []
    batches = Batches(prepare(settings).train, LENGTH, SEED)
    whole = []
    for start in range(0, EPOCHS * batches.num_samples, 8):
        whole.append(samples(batches, 8, start=start, end=start + 8))
        seen.append(bytes_in(cache))
    batches.close()
    whole = np.concatenate(whole)[: EPOCHS * batches.num_samples]
    assert max(seen) <= limit
    for layout in ((16, 2), (28, 4)):
        assert digest(streamed(settings, *layout)) == digest(whole)
    local = local_samples(shards / "*.npy", tmp_path)
    count = batches.num_samples
    for epoch in range(EPOCHS):
        part = slice(epoch * count, (epoch + 1) * count)
        assert sorted(map(bytes, whole[part])) == sorted(map(bytes, local[part]))
    small = settings.model_copy(update={"stream_cache_bytes": limit - 1})
    with pytest.raises(DataError, match=r"stream_cache_bytes = .* need .* bytes; raise it"):
        prepare(small)


READER = """
import json, sys
import numpy as np
from tests.data import test_streams as test
from parallel3d.base import fault
settings = test.DataConfig.model_validate_json(sys.argv[1])
batches = test.Batches(test.prepare(settings).train, test.LENGTH, test.SEED)
start = int(open(sys.argv[2]).read() or 0)
with open(sys.argv[3], "ab") as out:
    out.truncate(start * (test.LENGTH + 1) * 8)
    while start < int(sys.argv[4]):
        end = min(start + 8, int(sys.argv[4]))
        out.write(test.samples(batches, 8, start=start, end=end).tobytes())
        out.flush()
        start = end
        open(sys.argv[2], "w").write(str(start))
batches.close()
"""


def read_through_kills(settings, tmp_path, end):
    """The first samples, read by processes of which five are killed."""
    (tmp_path / "at").touch()
    arguments = [settings.model_dump_json(), str(tmp_path / "at"), str(tmp_path / "out"), str(end)]
    points = ["before_rename 1", "after_rename 3", "before_folder_fsync 1", "before_rename 2"]
    points = [f"kill atomic.{point} 0" for point in points]
    for fault in [*points, "kill atomic.after_folder_fsync 2 0", None]:
        environment = os.environ | ({"PARALLEL3D_FAULT": fault} if fault else {})
        command = [sys.executable, "-c", READER, *arguments]
        done = subprocess.run(command, env=environment, timeout=100, capture_output=True, text=True)
        assert done.returncode == (-9 if fault else 0), done.stderr
    left = [path.name for path in (tmp_path / "cache/streams").iterdir()]
    assert not [name for name in left if name.endswith((".partial", ".need"))]
    return np.fromfile(tmp_path / "out", np.int64).reshape(-1, LENGTH + 1)


@pytest.mark.slow
def test_stream_resumes_after_five_kills(shards, tmp_path):
    settings = config(shards / "*.npy", tmp_path)
    prepare_manifests(settings)
    count = Batches(prepare(settings).train, LENGTH, SEED).num_samples
    read = read_through_kills(settings, tmp_path, count)
    other = settings.model_copy(update={"cache": str(tmp_path / "other")})
    assert digest(read) == digest(streamed(other, 32)[:count])


def prepared(server, tmp_path, **settings):
    settings = config(f"{server.url}/*.npy", tmp_path, **settings)
    prepare_manifests(settings)
    return settings


def test_failed_and_truncated_requests_are_retried(shards, tmp_path):
    with http_store(shards) as server:
        settings = prepared(server, tmp_path)
        clean = digest(streamed(settings.model_copy(update={"cache": str(tmp_path / "c")}), 40))
        server.faults = {
            "03.npy": ["fail"] * 4,
            "06.npy": ["cut", "cut"],
            "07.npy": ["fail", "cut"],
        }
        assert digest(streamed(settings, 40)) == clean
        assert not any(server.faults.values())
        # Each shard once more, for the manifest and for the other cache.
        assert len(server.requests) >= 3 * SHARDS + 8


@pytest.mark.parametrize("damage", ["changed", *slow("unreachable", "missing")])
def test_unusable_shard_gives_one_message(damage, shards, tmp_path):
    with http_store(shards) as server:
        settings = prepared(server, tmp_path)
        path = shards / "04.npy"
        entries = json.loads((tmp_path / "manifest/shards.json").read_text())
        files = [entry["files"][0] for entry in entries]
        (recorded,) = [file for file in files if file["path"].endswith("04.npy")]
        if damage == "changed":
            path.write_bytes(path.read_bytes()[:-2] + b"\1\1")
        elif damage == "missing":
            path.unlink()
        else:
            server.faults = {"04.npy": ["fail"] * 1000}
        with pytest.raises(DataError) as caught:
            streamed(settings, 40)
        message = str(caught.value)
        assert "04.npy" in message and recorded["hash"] in message
        assert f"{recorded['size']:,} bytes" in message
        if damage != "unreachable":
            assert 'set data.on_error to "skip"' in message
        cache = tmp_path / "cache/streams"
        assert not [*cache.glob("*.partial"), *cache.glob("*.need"), *cache.glob("*.lost")]


def test_lost_shard_is_skipped_alike_on_every_mesh(shards, tmp_path, capfd):
    with http_store(shards) as server:
        settings = prepared(server, tmp_path, on_error="skip")
        whole = streamed(settings.model_copy(update={"cache": str(tmp_path / "clean")}), 40)
        lost = np.load(shards / "04.npy").astype(np.int64).tobytes()
        (shards / "04.npy").unlink()
        read, on_four = (
            streamed(settings.model_copy(update={"cache": str(tmp_path / name)}), *layout)
            for name, layout in (("one", (40, 1)), ("four", (28, 4)))
        )
        assert digest(read) == digest(on_four)
    assert capfd.readouterr().err.count("skipped shard 1 of this node") == 2
    differs = (read != whole).any(axis=1)
    was_lost = np.array([window.tobytes() in lost for window in whole])
    # Every other sample is at its place. One an epoch begins in the lost shard and ends after it.
    assert differs[was_lost].all() and was_lost.sum() > 15
    assert differs.sum() <= was_lost.sum() + EPOCHS
    assert not any(window.tobytes() in lost for window in read)


def test_mismatched_manifest_is_refused(shards, tmp_path):
    settings = config(shards / "*.npy", tmp_path)
    with pytest.raises(DataError, match=r"not a complete manifest; run .* --manifest"):
        prepare(settings)
    prepare_manifests(settings)
    for key, value, message in (
        ("sequence_length", 2 * LENGTH, "made for samples of at most 16 tokens"),
        ("vocab_size", 400, r"data\.vocab_size = 400: .* was made with 300"),
        ("token_dtype", "uint32", "was made with 'auto'"),
    ):
        with pytest.raises(DataError, match=message):
            prepare(settings.model_copy(update={key: value}))
    other = settings.model_copy(update={"manifest": str(shards)})
    with pytest.raises(DataError, match="is not a manifest; use a new folder"):
        prepare_manifests(other)
    assert len([*shards.iterdir()]) == SHARDS


def test_cache_names_the_shard_that_a_reader_waits_for(tmp_path):
    waiting_for = []

    def fetch(shard, folder):
        waiting_for.append(cache.waiting_for)
        (folder / "ids.bin").write_bytes(b"1234")

    cache = ShardCache(tmp_path / "cache", 10**6, fetch)
    shard = Shard(tmp_path, {}, "key", "the-shard.npy", num_bytes=4, fetch_bytes=4)
    assert cache.read(shard, np.dtype(np.uint16), 1, 1).tobytes() == b"34"
    assert waiting_for == ["the-shard.npy"] and cache.waiting_for == ""


def test_counting_padding_reads_no_shard(shards, tmp_path):
    settings = config(shards / "*.npy", tmp_path, on_error="skip")
    prepare_manifests(settings)
    batches = Batches(prepare(settings).train, LENGTH, SEED)
    assert batches.padding(0, 40) == 0
    assert not (tmp_path / "cache/streams").exists()


def rows_of_text(tmp_path, *rows, **settings):
    """The settings of a stream of jsonl shards with these rows; None stands for a flawed one."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, texts in enumerate(rows):
        lines = [json.dumps({"text": text}) for text in texts]
        (folder / f"{number}.jsonl").write_text("\n".join(lines) + "\n")
    text = {"source": "jsonl", "tokenizer": tokenizer_of(tmp_path), "end_of_text_id": None}
    text |= {"on_error": "skip", "stream_window": "all"} | settings
    return config(folder / "*.jsonl", tmp_path, **text)


def test_share_of_skipped_documents_counts_all_shards(tmp_path):
    good = "w1 w2 w3 " * 20
    settings = rows_of_text(tmp_path, [good, None], [good] * 8)
    prepare_manifests(settings)
    corpus = prepare(settings)
    assert corpus.facts.skipped == {"null": 1} and corpus.num_documents == 9
    assert len(streamed(settings, 8)) > 0
    with pytest.raises(DataError, match=r"1 of 10 documents .* data\.max_skipped = 0\.09 allows"):
        prepare_manifests(settings.model_copy(update={"max_skipped": 0.09}))


def test_tokenizer_is_loaded_before_threads_need_it(tmp_path, monkeypatch):
    """Two threads must not import transformers at once."""
    settings = rows_of_text(tmp_path, ["w1 w2 " * 20] * 4)
    prepare_manifests(settings)
    corpus = prepare(settings)
    monkeypatch.setattr(streams, "load_tokenizer", None)
    batches = Batches(corpus.train, LENGTH, SEED)
    assert batches.microbatch(0, 4)[0].any()
    batches.close()


def test_manifest_writers_wait_for_one_another(shards, tmp_path):
    settings = config(shards / "*.npy", tmp_path)
    phases = []
    with ThreadPoolExecutor(1) as pool, locked(tmp_path / "manifest", lambda: None):
        waiting = pool.submit(prepare_manifests, settings, lambda phase, *_: phases.append(phase))
        while not phases:
            sleep(0.01)
        assert phases == [f"waiting for another process to write {tmp_path}/manifest"]
        assert not (tmp_path / "manifest").exists()
    waiting.result()
    assert prepare(settings).num_documents
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manifest", "shards"]
