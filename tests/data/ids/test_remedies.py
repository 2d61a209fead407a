"""Each remedy of the messages about files of ids is applied, and the file is read."""

import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from parallel3d.data import sharded, streams
from parallel3d.data.batches import Batches
from parallel3d.data.corpus import Corpus
from parallel3d.data.export import export_megatron
from parallel3d.data.ids import arrow
from parallel3d.data.prepare import prepare, prepare_manifests
from parallel3d.data.tokenizer import save_tokenizer, train_tokenizer
from tests.data import test_streams
from tests.data.ids import writers
from tests.data.ids.test_formats import DOCUMENTS, ENDED, config_of
from tests.data.ids.test_odd_files import OLD_PAIRS, PAIRS
from tests.remedies import refused

pytestmark = pytest.mark.gloo


def assert_read(config) -> Corpus:
    corpus = prepare(config)
    assert len(corpus.train) > 0
    return corpus


def cut(path: Path, by: int = 4) -> None:
    os.truncate(path, path.stat().st_size - by)


# What the messages say: copy it (both) again, write it (both) again, preprocess the text again.
AGAIN = r"again"


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("number", range(len(PAIRS)))
def test_damaged_pair_is_written_again(tmp_path, number, old):
    """The index of files that were checked, in the cache, must not remember the damage."""
    damages = OLD_PAIRS if old else PAIRS
    if number >= len(damages):
        return
    damage, _ = damages[number]
    write = writers.old_megatron if old else writers.megatron
    path = write(tmp_path / "a.bin", ENDED)
    config = config_of("megatron", path)
    damage(path, path.with_suffix(".idx"))
    with refused("index of Megatron-LM" if (number, old) == (7, False) else AGAIN):
        prepare(config)
    write(path, ENDED)
    assert_read(config)


def test_flat_array_has_the_source_of_its_format(tmp_path):
    path = writers.raw(tmp_path / "a.bin", ENDED)
    (tmp_path / "a.idx").write_bytes(b"no index of Megatron-LM")
    with refused('use the data.source of its format, such as "tokens"'):
        prepare(config_of("megatron", path))
    assert_read(config_of("tokens", path))


def test_empty_files_are_written_again_or_left_out(tmp_path):
    for name, documents in {"a": ENDED, "b": []}.items():
        writers.megatron(tmp_path / f"{name}.bin", documents)
    both = config_of("megatron", tmp_path / "*.bin")
    with refused("write it again, or remove it from data.paths"):
        prepare(both)
    assert_read(config_of("megatron", tmp_path / "a.bin"))
    writers.megatron(tmp_path / "b.bin", [[writers.END], [writers.END]])
    with refused("leave it out of the source"):
        prepare(both)
    assert_read(config_of("megatron", tmp_path / "a.bin"))
    writers.megatron(tmp_path / "b.bin", ENDED)
    assert_read(both)


@pytest.mark.parametrize("beside", ["", ".index"])
def test_truncated_files_of_datatrove_are_copied_again(tmp_path, beside):
    path = writers.datatrove(tmp_path / "a.ds", ENDED)
    cut(Path(f"{path}{beside}"))
    with refused("opy"):
        prepare(config_of("datatrove", path))
    writers.datatrove(path, ENDED)
    assert_read(config_of("datatrove", path))


def test_paths_of_datatrove_name_its_ids(tmp_path):
    writers.datatrove(tmp_path / "a.ds", ENDED)
    with refused("use their paths, or corpus/**/*.ds"):
        prepare(config_of("datatrove", tmp_path / "*.index"))
    assert_read(config_of("datatrove", tmp_path / "a.ds"))
    assert_read(config_of("datatrove", tmp_path / "**/*.ds"))


def test_arrays_are_written_as_the_message_says(tmp_path):
    path = writers.numpys(tmp_path / "a.npy", ENDED, "float32")
    with refused("write it again as uint16 or uint32 [ids]"):
        prepare(config_of("tokens", path))
    for dtype in ("uint16", "uint32"):
        assert_read(config_of("tokens", writers.numpys(path, ENDED, dtype)))
    cut(path)
    with refused("write it again with numpy.save"):
        prepare(config_of("tokens", path))
    assert_read(config_of("tokens", writers.numpys(path, ENDED)))


def test_type_of_ids_is_set_as_the_message_says(tmp_path):
    wide = writers.raw(tmp_path / "a.npy", ENDED, "uint32")
    with refused('set data.token_dtype to "uint32"'):
        prepare(config_of("tokens", wide))
    assert_read(config_of("tokens", wide, token_dtype="uint32"))
    odd = writers.raw(tmp_path / "b.npy", [*ENDED, ENDED[0][:1] * (1 + sum(map(len, ENDED)) % 2)])
    assert odd.stat().st_size % 4
    with refused("or data.token_dtype must be set to its type"):
        prepare(config_of("tokens", odd, token_dtype="uint32"))
    assert_read(config_of("tokens", odd, token_dtype="uint16"))


def test_end_of_text_is_that_of_the_file(tmp_path):
    other = [[*ids, 5] for ids in DOCUMENTS]
    path = writers.raw(tmp_path / "a.npy", other)
    with refused("set data.tokenizer or data.end_of_text_id to those of the file"):
        prepare(config_of("tokens", path))
    assert_read(config_of("tokens", path, end_of_text_id=5))


def test_vocabulary_is_that_of_the_file(tmp_path):
    path = writers.megatron(tmp_path / "a.bin", ENDED)
    with refused("set data.tokenizer or data.vocab_size to those of the file"):
        prepare(config_of("megatron", path, vocab_size=257))
    assert_read(config_of("megatron", path, vocab_size=300))


@pytest.mark.slow
def test_tokenizer_of_the_ids_is_named(tmp_path):
    """Ids whose documents end with another token than the tokenizer's: all three remedies."""
    for name, words in {"own": ["a b"], "other": ["c d e"]}.items():
        trained = train_tokenizer(words, 290)
        if name == "own":
            trained.add_special_tokens({"eos_token": "<own>"})
        save_tokenizer(trained, tmp_path / name)
    added = json.loads((tmp_path / "own/tokenizer.json").read_text())["added_tokens"]
    (own_end,) = [token["id"] for token in added if token["content"] == "<own>"]
    ids = [[x % 250 + 1 for x in row[:-1]] + [own_end] for row in DOCUMENTS * 2]
    path = writers.megatron(tmp_path / "a.bin", ids)
    settings = {"vocab_size": 300, "end_of_text_id": None}
    with refused("use the tokenizer of the file, or set data.end_of_text_id = 0"):
        prepare(config_of("megatron", path, tokenizer=str(tmp_path / "other"), **settings))
    assert_read(config_of("megatron", path, tokenizer=str(tmp_path / "own"), **settings))
    intended = settings | {"end_of_text_id": 0}
    assert_read(config_of("megatron", path, tokenizer=str(tmp_path / "other"), **intended))
    with refused("remove the setting, or set eos_token in its tokenizer_config.json"):
        wrong = settings | {"end_of_text_id": own_end}
        prepare(config_of("megatron", path, tokenizer=str(tmp_path / "other"), **wrong))


def test_sample_that_is_not_enough_becomes_a_full_check(tmp_path, monkeypatch):
    monkeypatch.setattr("parallel3d.data.ids.validate.SAMPLED_DOCUMENTS", 10)
    path = writers.megatron(tmp_path / "a.bin", [*ENDED[:20], *DOCUMENTS[20:]])
    with refused('set data.check_ids to "full"'):
        prepare(config_of("megatron", path, check_ids="sample"))
    assert_read(config_of("megatron", path, check_ids="full"))


def test_file_that_changes_while_it_is_checked_is_prepared_again(tmp_path, monkeypatch):
    path = writers.megatron(tmp_path / "a.bin", ENDED)
    with monkeypatch.context() as planted:
        check = planted_change(path)
        planted.setattr("parallel3d.data.tokenised.check", check)
        with refused("run the preparation again"):
            prepare(config_of("megatron", path))
    assert_read(config_of("megatron", path))


def planted_change(path):
    """A check of a file that is written to meanwhile."""
    from parallel3d.data.ids.validate import check

    def changing(*arguments, **settings):
        result = check(*arguments, **settings)
        writers.megatron(path, ENDED[:-1])
        return result

    return changing


def test_shrunk_or_changed_file_is_restored_or_prepared_again(tmp_path):
    path = writers.megatron(tmp_path / "a.bin", ENDED)
    config = config_of("megatron", path)
    corpus = prepare(config)
    batches = Batches(corpus.train, 8, seed=0)
    data = path.read_bytes()
    os.truncate(path, 100)
    with refused("it shrank since it was prepared. Write it again"):
        batches.microbatch(0, 50)
    with refused("restore it, or run `parallel3d prepare` again"):
        Corpus.open(corpus.directory)
    path.write_bytes(data)
    Corpus.open(corpus.directory)
    Batches(corpus.train, 8, seed=0).microbatch(0, 50)
    writers.megatron(path, ENDED[:-1])
    with refused("run `parallel3d prepare` again"):
        Corpus.open(corpus.directory)
    assert_read(config)


# Columns


def table_config(tmp_path, **columns):
    parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    names = [name for name in columns if name != "input_ids"]
    settings = {"weight_field": names[0]} if names else {}
    if names == ["labels"]:
        settings = {"label_field": "labels"}
    path = tmp_path / "a.parquet"
    return config_of("parquet", path, token_field="input_ids", held_out_fraction=0, **settings)


@pytest.mark.slow
def test_columns_of_ids_are_named_or_mended(tmp_path):
    for name, column in {"ids": [[1, 7]], "input_ids": ["a"]}.items():
        parquet.write_table(pa.table({name: column, "other": [[2, 7]]}), tmp_path / "a.parquet")
        config = config_of(
            "parquet", tmp_path / "a.parquet", token_field="input_ids", held_out_fraction=0
        )
        with refused("set token_field to the"):
            prepare(config)
        assert_read(config.model_copy(update={"token_field": "other"}))
    parquet.write_table(pa.table({"input_ids": [[1, 7], None]}), tmp_path / "a.parquet")
    with refused("fix or remove the row"):
        prepare(config)
    parquet.write_table(pa.table({"input_ids": [[1, 7]]}), tmp_path / "a.parquet")
    assert_read(config)


def test_weights_and_labels_are_written_as_the_messages_say(tmp_path):
    ids = [[1, 2, 7], [3, 4, 7]]
    with refused("write one number per id"):
        prepare(table_config(tmp_path, input_ids=ids, weights=[[1.0], [1.0, 0.0, 1.0]]))
    assert_read(table_config(tmp_path, input_ids=ids, weights=[[1.0, 1, 1], [1.0, 0, 1]]))
    with refused("each label must be the id of its own token, or -100"):
        prepare(table_config(tmp_path, input_ids=ids, labels=[[2, 7, -100], [4, 7, -100]]))
    assert_read(table_config(tmp_path, input_ids=ids, labels=[[-100, 2, 7], [-100, 4, 7]]))
    bad = prepare(table_config(tmp_path, input_ids=ids, weights=[[1.0, -1, 1], [1.0, 0, 1]]))
    with refused("weights must be finite and >= 0"):
        Batches(bad.train, 2, seed=0).weights(0, 2)
    good = prepare(table_config(tmp_path, input_ids=ids, weights=[[1.0, 0, 1], [1.0, 0, 1]]))
    assert Batches(good.train, 2, seed=0).weights(0, 2).shape == (2, 2)


def test_compressed_arrow_is_written_again_without(tmp_path):
    path = str(tmp_path / "a.arrow")
    table = pa.table({"ids": [list(range(5000))]})
    for compression, remedy in (("zstd", "write it again without compression"), (None, "")):
        options = pa.ipc.IpcWriteOptions(compression=compression)
        with (
            pa.OSFile(path, "wb") as sink,
            pa.ipc.new_stream(sink, table.schema, options=options) as stream,
        ):
            stream.write_table(table)
        if remedy:
            with refused(remedy):
                arrow.read(path, "name", "ids")
    assert arrow.read(path, "name", "ids").num_tokens >= 5000


@pytest.mark.slow
def test_data_sets_are_saved_as_the_messages_say(tmp_path):
    import datasets

    table = datasets.Dataset.from_dict({"input_ids": ENDED})
    table.select(range(0, 20, 2)).save_to_disk(tmp_path / "whole")
    datasets.DatasetDict(train=table, other=table).save_to_disk(tmp_path / "splits")
    settings = {"paths": (), "token_field": "input_ids", "validation_split": None}

    def hub(name, **changes):
        own = settings | {"name": str(tmp_path / name), **changes}
        return config_of("hub", tmp_path / "x", **own)

    with refused("name one split"):
        prepare(hub("splits", split="train[:50%]"))
    assert_read(hub("splits", split="other"))
    with refused("check name, subset and split"):
        prepare(hub("splits", split="tran"))
    with refused('write a part as "train[:50%]" or "train[1000:2000]"'):
        text = {"token_field": None, "tokenizer": "train", "end_of_text_id": None}
        prepare(hub("splits", split="train[5", **text))


# Export


def test_exported_pair_is_removed_or_has_another_prefix(tmp_path):
    corpus = prepare(config_of("megatron", writers.megatron(tmp_path / "a.bin", ENDED)))
    export_megatron(corpus, str(tmp_path / "out"))
    with refused("remove it, or use another prefix"):
        export_megatron(corpus, str(tmp_path / "out"))
    export_megatron(corpus, str(tmp_path / "other"))
    assert (tmp_path / "other.bin").read_bytes() == (tmp_path / "out.bin").read_bytes()
    for end in (".bin", ".idx"):
        (tmp_path / f"out{end}").unlink()
    export_megatron(corpus, str(tmp_path / "out"))
    assert (tmp_path / "out.bin").read_bytes() == (tmp_path / "other.bin").read_bytes()
    with refused("use a prefix in an existing, writable folder"):
        export_megatron(corpus, str(tmp_path / "none/out"))
    (tmp_path / "none").mkdir()
    export_megatron(corpus, str(tmp_path / "none/out"))
    assert (tmp_path / "none/out.bin").read_bytes() == (tmp_path / "other.bin").read_bytes()


# Streams


@pytest.fixture
def stream(tmp_path):
    folder = tmp_path / "shards"
    folder.mkdir()
    for number in range(4):
        documents = [[*ids, writers.END] for ids in writers.some_documents(20, seed=number)]
        writers.numpys(folder / f"{number}.npy", documents)
    return test_streams.config(folder / "*.npy", tmp_path, stream_window=2)


def test_manifest_is_made_and_made_again(stream, tmp_path):
    with refused("run `parallel3d prepare --config ... --manifest`"):
        prepare(stream)
    prepare_manifests(stream)
    assert len(test_streams.streamed(stream, 8)) > 0
    longer = stream.model_copy(update={"sequence_length": 32})
    with refused("--manifest` again"):
        prepare(longer)
    prepare_manifests(longer)
    prepare(longer)
    other = longer.model_copy(update={"vocab_size": 400})
    with refused("set it back, or run `parallel3d prepare --config ... --manifest` again"):
        prepare(other)
    prepare(longer)
    prepare_manifests(other)
    prepare(other)
    elsewhere = stream.model_copy(update={"manifest": str(tmp_path / "shards")})
    with refused("use a new folder"):
        prepare_manifests(elsewhere)
    prepare_manifests(stream.model_copy(update={"manifest": str(tmp_path / "new")}))


@pytest.mark.slow
def test_room_for_shards_is_raised_or_needed_less(stream, tmp_path):
    prepare_manifests(stream)
    needed = prepare(stream).train.tokens.num_bytes_needed
    small = stream.model_copy(update={"stream_cache_bytes": needed - 1})
    with refused("raise it, lower stream_window, or write smaller shards"):
        prepare(small)
    assert_read(small.model_copy(update={"stream_cache_bytes": needed}))
    assert_read(small.model_copy(update={"stream_window": 1}))
    for path in (tmp_path / "shards").iterdir():
        ids = np.load(path)
        np.save(path, ids[: len(ids) // 2])
    prepare_manifests(small)
    assert_read(small)


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_lost_shard_is_restored_skipped_or_counted_anew(stream, tmp_path, damage, monkeypatch):
    monkeypatch.setattr(streams, "FIRST_PAUSE_SECONDS", 0.01)
    prepare_manifests(stream)
    path = tmp_path / "shards/1.npy"
    data = path.read_bytes()
    path.write_bytes(data[:-2] + b"\1\1") if damage == "changed" else path.unlink()
    remedy = 'restore it, make the manifest again, or set data.on_error to "skip"'
    with refused(remedy):
        test_streams.streamed(stream, 8)

    def elsewhere(name, **changes):
        return stream.model_copy(update={"cache": str(tmp_path / name), **changes})

    assert len(test_streams.streamed(elsewhere("skip", on_error="skip"), 8)) > 0
    prepare_manifests(stream)
    assert len(test_streams.streamed(elsewhere("anew"), 8)) > 0
    path.write_bytes(data)
    prepare_manifests(stream)
    assert len(test_streams.streamed(elsewhere("restored"), 8)) > 0


@pytest.mark.slow
def test_truncated_shard_in_the_cache_is_removed(stream, tmp_path):
    prepare_manifests(stream)
    assert len(test_streams.streamed(stream, 8)) > 0
    cache = tmp_path / "cache/streams"
    for path in cache.glob(f"*/{sharded.IDS}"):
        os.truncate(path, 2)
    with refused(f"is truncated; remove {cache}"):
        test_streams.streamed(stream, 8)
    for path in sorted(cache.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    assert len(test_streams.streamed(stream, 8)) > 0
