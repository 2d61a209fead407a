"""Each format gives the documents that an independent writer put in, in the same order as text."""

from functools import partial
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest

from parallel3d.config.data import DataConfig
from parallel3d.data.batches import Batches, first_sample
from parallel3d.data.corpus import Corpus, TokenStream
from parallel3d.data.documents import ENTRY
from parallel3d.data.evaluation_samples import held_out_bytes, train_frequencies
from parallel3d.data.ids import id_file, validate
from parallel3d.data.prepare import prepare
from parallel3d.data.split import split_documents
from tests.data.documents import document_of
from tests.data.ids import writers
from tests.data.ids.writers import END, SIZE, some_documents

pytestmark = pytest.mark.gloo

DOCUMENTS = some_documents()
ENDED = [[*ids, END] for ids in DOCUMENTS]


def written(source, writer, name, *arguments, **options):
    """Return a function that writes a file into a folder and returns its source and path."""
    return lambda folder: (source, writer(folder / name, *arguments, **options))


megatron = partial(written, "megatron", writers.megatron, "a.bin")
old_megatron = partial(written, "megatron", writers.old_megatron, "a.bin")
datatrove = partial(written, "datatrove", writers.datatrove, "a.ds")
llm_c = partial(written, "tokens", writers.llm_c, "a.bin")
raw = partial(written, "tokens", writers.raw, "a.npy")
FORMATS = {
    "megatron": megatron(ENDED),
    "megatron without ends": megatron(DOCUMENTS),
    "megatron int32": megatron(ENDED, "int32"),
    "megatron int64": megatron(ENDED, "int64"),
    "megatron int16": megatron(ENDED, "int16"),
    "megatron sentences": megatron(ENDED, sentences=3),
    "old megatron": old_megatron(ENDED),
    "old megatron int16": old_megatron(ENDED, "int16"),
    "datatrove": datatrove(ENDED),
    "datatrove uint32": datatrove(ENDED, "uint32"),
    "datatrove, no ends": datatrove(DOCUMENTS),
    "datatrove, no index": datatrove(ENDED, index=False),
    "raw": raw(ENDED),
    "raw, the last end missing": raw([*ENDED[:-1], DOCUMENTS[-1]]),
    "numpy": written("tokens", writers.numpys, "a.npy", ENDED, "int64"),
    "llm.c": llm_c(DOCUMENTS),
    "llm.c for llama": llm_c(DOCUMENTS, 20240801, 7, "uint32"),
}


def config_of(source="tokens", path: Path = Path(), **changes) -> DataConfig:
    settings = {"tokenizer": "none", "vocab_size": SIZE, "end_of_text_id": END}
    settings |= {"held_out_fraction": 0.2, "sequence_length": 8, **changes}
    settings = {"paths": (str(path),), "cache": str(path.parent / "cache"), **settings}
    return DataConfig(**{"source": source, **settings})


def by_hand(documents=DOCUMENTS) -> list[TokenStream]:
    """The training and the held-out stream of the documents, in memory."""
    rows = [np.array(ids, "<u4").tobytes() for ids in documents]
    digests = [blake2b(row, digest_size=16).digest() for row in rows]
    table = np.array(
        [(0, 0, 0, len(row), digest) for row, digest in zip(rows, digests, strict=True)], ENTRY
    )
    [held_out] = split_documents([table], 0.2)
    streams = []
    for part in (False, True):
        chosen = [
            [*ids, END] for ids, apart in zip(documents, held_out, strict=True) if apart == part
        ]
        bounds = np.cumsum([0, *map(len, chosen)])
        streams.append(TokenStream(np.concatenate(chosen), bounds))
    return streams


def check_streams(corpus: Corpus, documents=DOCUMENTS) -> None:
    for stream, expected in zip((corpus.train, corpus.held_out), by_hand(documents), strict=True):
        assert isinstance(stream, TokenStream)
        assert stream.tokens[:].tolist() == expected.tokens.tolist()
        assert stream.bounds[:].tolist() == expected.bounds.tolist()
        for index in range(stream.num_documents):
            assert document_of(stream, index).tolist() == document_of(expected, index).tolist()


@pytest.mark.parametrize("name", FORMATS)
def test_format_has_expected_documents_samples_and_counts(name, tmp_path):
    source, path = FORMATS[name](tmp_path)
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    corpus = prepare(config_of(source, path))
    check_streams(corpus)
    again = Corpus.open(corpus.directory)
    for stream, expected in zip((again.train, again.held_out), by_hand(), strict=True):
        ours = Batches(stream, 8, seed=3)
        theirs = Batches(expected, 8, seed=3)
        # Resumed anywhere, a sample depends on its index alone.
        for first in (0, 5, 10**6 + 3):
            pairs = zip(ours.microbatch(first, 9), theirs.microbatch(first, 9), strict=True)
            for one, other in pairs:
                assert one.dtype == other.dtype and np.array_equal(one, other)
    ids = np.concatenate(ENDED)
    assert corpus.counts().tolist() == np.bincount(ids, minlength=SIZE).tolist()
    trained = np.bincount(by_hand()[0].tokens, minlength=SIZE) + 1
    assert train_frequencies(corpus) == pytest.approx(trained / trained.sum())
    assert held_out_bytes(corpus) is None  # nobody knows the text
    assert corpus.num_tokens == len(ids) and corpus.num_documents == len(DOCUMENTS)
    assert corpus.summary()["check_ids"] == "full"
    # Read where it lies: nothing in the cache is as large, and the files are as they were.
    assert not (corpus.directory / "tokens.bin").exists()
    assert {file: file.read_bytes() for file in before} == before


def test_every_sample_comes_once_over_changing_meshes_and_formats(tmp_path):
    """Over dp 2 -> 1 -> 4, each with another batch size and the ids in another format."""
    expected = Batches(by_hand()[0], 8, seed=1)
    seen = []
    start = 0
    for name, dp, micro_batch, num_steps in (
        ("megatron int32", 2, 3, 4),
        ("raw", 1, 5, 3),
        ("datatrove, no ends", 4, 2, None),
    ):
        folder = tmp_path / name
        folder.mkdir()
        batches = Batches(prepare(config_of(*FORMATS[name](folder))).train, 8, seed=1)
        split = {"micro_batch": micro_batch, "num_microbatches": 2, "dp": dp}
        size = 2 * dp * micro_batch
        for _ in range(num_steps or (expected.num_samples - start) // size):
            for place in np.ndindex(2, dp):
                first = first_sample(start, *place, **split)
                seen += batches.microbatch(first, micro_batch)[0].tolist()
            start += size
    assert start > expected.num_samples - size
    assert sorted(seen) == sorted(expected.microbatch(0, start)[0].tolist())
    assert len({tuple(sample) for sample in seen}) > 0.9 * start


def test_key_depends_on_the_ids_and_not_on_the_format(tmp_path):
    keys = set()
    folders = set()
    for name in ("megatron", "old megatron", "datatrove uint32", "raw", "numpy"):
        folder = tmp_path / name
        folder.mkdir()
        corpus = prepare(config_of(*FORMATS[name](folder), cache=str(tmp_path / "cache")))
        keys.add(corpus.key)
        folders.add(corpus.directory)
        check_streams(corpus)
    assert len(keys) == 1 and len(folders) == 5


def test_files_are_read_in_the_order_of_their_names(tmp_path):
    for number in range(4):
        writers.megatron(tmp_path / f"{number}.bin", ENDED[10 * number : 10 * number + 10])
    for pattern in ("*", "*.bin", "*.idx"):
        check_streams(prepare(config_of("megatron", tmp_path / pattern)))


def test_empty_documents_are_skipped_and_counted(tmp_path):
    documents = [[], *ENDED[:20], [END], [], *ENDED[20:], [END]]
    corpus = prepare(config_of("datatrove", writers.datatrove(tmp_path / "a.ds", documents)))
    check_streams(corpus)
    assert corpus.summary()["num_empty_documents"] == 4
    # Where an end-of-text begins the file, it ends no document.
    for bare in ([], [[END]]):
        path = writers.raw(tmp_path / "a.npy", [*bare, *ENDED[:20], [END], *ENDED[20:], [END]])
        corpus = prepare(config_of("tokens", path))
        assert corpus.summary()["num_empty_documents"] == 2
        check_streams(corpus)
    ids = np.concatenate(ENDED)
    assert corpus.counts().tolist() == np.bincount(ids, minlength=SIZE).tolist()


def test_long_documents_and_files_of_many_blocks_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(id_file, "BLOCK", 50)
    monkeypatch.setattr(validate, "BLOCK", 50)
    for name in ("megatron", "megatron without ends", "llm.c"):
        folder = tmp_path / name
        folder.mkdir()
        check_streams(prepare(config_of(*FORMATS[name](folder))))


def test_vocabulary_above_65536_needs_wide_ids(tmp_path):
    documents = some_documents(size=128_256)
    ended = [[*ids, END] for ids in documents]
    for writer, source, dtype in (
        (writers.raw, "tokens", "uint32"),
        (writers.datatrove, "datatrove", "uint32"),
        (writers.megatron, "megatron", "int32"),
    ):
        folder = tmp_path / source
        folder.mkdir()
        path = writer(folder / "a.bin", ended, dtype)
        corpus = prepare(config_of(source, path, vocab_size=128_256))
        check_streams(corpus, documents)
        assert corpus.train.tokens.dtype == np.uint32


def test_ids_are_indexed_like_an_array(tmp_path):
    corpus = prepare(config_of(*FORMATS["megatron"](tmp_path)))
    ids = corpus.train.tokens
    expected = by_hand()[0].tokens
    assert len(ids) == len(expected) and np.array_equal(ids[:], expected)
    for key in (5, slice(3, 90), slice(9, 3), slice(-3, None), [4, 4, 2], [[1], [2]]):
        assert np.array_equal(ids[key], expected[key]), key
    assert ids[np.empty((0, 9), int)].shape == (0, 9)
    with pytest.raises(AssertionError, match="out of bounds"):
        ids[[len(expected)]]
