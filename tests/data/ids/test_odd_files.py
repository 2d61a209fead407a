"""Files that are damaged, or of another kind than they seem: one message, and nothing left."""

import os
import struct
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from parallel3d.base.errors import DataError
from parallel3d.data import tokenised
from parallel3d.data.batches import Batches
from parallel3d.data.corpus import Corpus
from parallel3d.data.prepare import prepare
from tests.data.ids import writers
from tests.data.ids.test_formats import DOCUMENTS, ENDED, config_of

pytestmark = pytest.mark.gloo


def patched(path: Path, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def cut(path: Path, by: int = 4) -> None:
    os.truncate(path, path.stat().st_size - by)


NUM = len(ENDED)
# damage done to the .bin and the .idx of a good pair, and the message
PAIRS = [
    (lambda b, i: cut(b), r"a\.idx: sequence \d+ ends at byte .* is truncated"),
    (lambda b, i: cut(i), r"a\.idx has .* bytes, .* header; it is truncated"),
    (lambda b, i: cut(i, i.stat().st_size - 16), r"a\.idx has version 1 and the dtype code 0"),
    (lambda b, i: b.write_bytes(b""), r"a\.bin is empty \(0 bytes\)"),
    (lambda b, i: i.write_bytes(b""), r"a\.idx is empty \(0 bytes\)"),
    (lambda b, i: i.unlink(), r"a\.bin: its index .*a\.idx does not exist"),
    (lambda b, i: b.write_bytes(b.read_bytes() + b"12"), r"ends at byte .*a\.bin has .* bytes"),
    (lambda b, i: patched(i, 0, b"PK"), r"not an index .* use the data\.source of its format"),
    (lambda b, i: patched(i, 9, b"\2"), r"a\.idx has version 2 .* writes version 1"),
    (lambda b, i: patched(i, 17, b"\6"), r"a\.idx has version 1 and the dtype code 6"),
    (lambda b, i: patched(i, 17, b"\4"), r"sequence 2 begins at byte 10 and"),
    (lambda b, i: patched(i, 18, struct.pack("<Q", 2**60)), r"header; it is truncated"),
    (lambda b, i: patched(i, 34, struct.pack("<i", -5)), r"sequence 0 begins .* has -5 ids"),
    (
        lambda b, i: patched(i, 34 + 12 * NUM + 8, struct.pack("<q", NUM + 9)),
        r"document bounds do not ascend",
    ),
]


@pytest.mark.parametrize(("damage", "message"), PAIRS)
def test_damaged_megatron_pair_is_refused(damage, message, tmp_path):
    path = writers.megatron(tmp_path / "a.bin", ENDED)
    damage(path, path.with_suffix(".idx"))
    assert_refused(config_of("megatron", path), message, tmp_path)


OLD_PAIRS = [
    (lambda b, i: cut(b), r"a\.idx: sequence \d+ ends at byte .* is truncated"),
    (lambda b, i: cut(i), r"a\.idx has .* bytes, .* header; it is truncated"),
    (lambda b, i: cut(i, i.stat().st_size - 40), r"a\.idx has 40 bytes, .* it is truncated"),
    (lambda b, i: patched(i, 8, b"\2"), r"a\.idx has version 2 .* writes version 1"),
    (lambda b, i: patched(i, 16, b"\7"), r"a\.idx has version 1 and the dtype code 7"),
]


@pytest.mark.parametrize(("damage", "message"), OLD_PAIRS)
def test_damaged_pair_of_the_older_index_is_refused(damage, message, tmp_path):
    path = writers.old_megatron(tmp_path / "a.bin", ENDED)
    damage(path, path.with_suffix(".idx"))
    assert_refused(config_of("megatron", path), message, tmp_path)


def assert_refused(config, message, folder):
    with pytest.raises(DataError, match=message):
        prepare(config)
    left = {path.parent.name for path in (folder / "cache").rglob("*") if path.is_file()}
    assert left <= {"indexes"}


def write(name, writer, *arguments, **settings):
    return lambda folder: writer(folder / name, *arguments, **settings)


def half(name, writer, *arguments, beside=""):
    def write_half(folder):
        path = writer(folder / name, *arguments)
        cut(Path(f"{path}{beside}"))
        return path

    return write_half


FILES = [
    ("megatron", write("a.bin", writers.megatron, ENDED, modes=True), r"header; it is truncated"),
    ("megatron", write("a.bin", writers.megatron, []), r"a\.bin is empty"),
    ("megatron", write("a.bin", writers.megatron, [[7], [7]]), r"all documents are empty"),
    ("datatrove", half("a.ds", writers.datatrove, ENDED), r"one is truncated"),
    ("datatrove", half("a.ds", writers.datatrove, ENDED, beside=".index"), r"\.index is truncated"),
    ("datatrove", write("a.ds", writers.datatrove, ENDED, "uint64"), r"neither 2 nor 4 per id"),
    ("tokens", half("a.npy", writers.numpys, ENDED), r"a\.npy .* cannot be read"),
    ("tokens", half("a.bin", writers.llm_c, DOCUMENTS), r"header; it is truncated"),
    (
        "tokens",
        write("a.bin", writers.llm_c, DOCUMENTS, magic=20240522),
        r"id 55434 .* outside the vocabulary",
    ),
    ("tokens", write("a.npy", writers.raw, ENDED, "uint32"), r"every second id is 0.*token_dtype"),
    ("tokens", write("a.npy", writers.raw, DOCUMENTS), r"does not contain the end-of-text id 7"),
    ("tokens", write("a.npy", writers.numpys, ENDED, "float32"), r"contains float32 .* integers"),
    ("tokens", write("a.npy", writers.numpys, ENDED, ">u2"), r"contains >u2 .* little-endian"),
    ("tokens", write("a.npy", writers.raw, [*ENDED[:-1], [9, 300]]), r"id 300 \(uint16, place 1\)"),
    ("megatron", write("a.bin", writers.megatron, ENDED, "int32"), None),
]


@pytest.mark.parametrize(("source", "write_file", "message"), FILES)
def test_odd_file_is_refused(source, write_file, message, tmp_path):
    config = config_of(source, write_file(tmp_path))
    if message:
        assert_refused(config, message, tmp_path)
    else:
        assert len(prepare(config).train) > 0  # tokens


HEADER = "{'descr': '<u2', 'fortran_order': False, 'shape': (10,), }\n"
HEADERS = {
    "unclosed dictionary": (HEADER.replace("}", ""), "cannot be read"),
    "open string": (HEADER.replace("u2'", "u2"), r"cannot be read \(Cannot parse header"),
    "noise": (b"\x80(\xff[\0{" * 10, "cannot be read"),
    "not hashable": ("{[]: 1}\n", r"cannot be read \(unhashable"),
    "indentation": ("  x\n y\n", "cannot be read"),
    "no such type": (HEADER.replace("<u2", "zz"), "not a valid dtype"),
    "missing key": (HEADER.replace("'shape': (10,), ", ""), "correct keys"),
    "long": (HEADER + " " * 20_000, r"is large and may not be safe[^\n]*; write it again"),
    "code": ("__import__('os').abort()\n", "cannot be read"),
    "huge shape": (HEADER.replace("(10,)", f"({'9' * 30},)"), "cannot be read"),
    "negative shape": (HEADER.replace("(10,)", "(-10,)"), "cannot be read|header"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_broken_numpy_header_is_refused(name, tmp_path):
    header, message = HEADERS[name]
    path = tmp_path / "a.npy"
    data = header.encode() if isinstance(header, str) else header
    path.write_bytes(b"\x93NUMPY\2\0" + struct.pack("<I", len(data)) + data + bytes(20))
    assert_refused(config_of("tokens", path), rf"a\.npy .*{message}", tmp_path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x93NUMPY", r"cannot be read \(EOF"),
        (b"\x93NUMPY\1\0v\0{'descr'", r"cannot be read \(EOF"),
        (b"\x93NUMPY\4\0" + bytes(90), r"we only support format version .*\(4, 0\)"),
    ],
    ids=["magic number only", "truncated", "version 4"],
)
def test_truncated_or_newer_numpy_header_is_refused(data, message, tmp_path):
    (tmp_path / "a.npy").write_bytes(data)
    assert_refused(config_of("tokens", tmp_path / "a.npy"), message, tmp_path)


def test_id_outside_the_vocabulary_is_named(tmp_path):
    bad = [*ENDED[:20], [8, 9, -3, 7], *ENDED[20:]]
    path = writers.megatron(tmp_path / "a.bin", bad, "int32")
    assert_refused(config_of("megatron", path), r"document 21: id -3 \(int32, place 2\)", tmp_path)
    for check_ids in ("full", "sample"):
        config = config_of("megatron", path, vocab_size=257, check_ids=check_ids)
        assert_refused(config, r"document 3: id \d+ .* outside the vocabulary of 257", tmp_path)


def test_wrong_width_of_ids_is_refused(tmp_path):
    path = writers.raw(tmp_path / "a.npy", ENDED)
    config = config_of("tokens", path, token_dtype="uint32")
    assert_refused(config, r"does not contain the end-of-text|not a multiple of uint32", tmp_path)


def test_sampled_check_is_recorded_and_skips_other_documents(tmp_path, monkeypatch):
    monkeypatch.setattr("parallel3d.data.ids.validate.SAMPLED_DOCUMENTS", 10)
    bad = [*ENDED[:5], [299, 7], *ENDED[5:]]
    path = writers.megatron(tmp_path / "a.bin", bad, "int32")
    patched(path, 4 * sum(map(len, ENDED[:5])), struct.pack("<i", 300))
    corpus = prepare(config_of("megatron", path, check_ids="sample"))
    summary = corpus.summary()
    assert summary["check_ids"] == "sample" and summary["num_checked_ids"] < len(corpus.train)
    assert corpus.num_tokens == sum(map(len, bad))
    mixed = writers.megatron(tmp_path / "b.bin", [*ENDED[:20], *DOCUMENTS[20:]])
    message = r'\d of 10 sampled documents .* set data\.check_ids to "full"'
    with pytest.raises(DataError, match=message):
        prepare(config_of("megatron", mixed, check_ids="sample"))


def test_wrong_end_of_text_id_is_refused(tmp_path, monkeypatch):
    words = {f"w{i}": i for i in range(300)}
    tokenizer = SimpleNamespace(eos_token_id=7, get_vocab=lambda: words)
    monkeypatch.setattr(tokenised, "load_tokenizer", lambda _: tokenizer)
    monkeypatch.setattr(tokenised, "save_tokenizer", lambda _, folder: (folder / "a").touch())
    (tmp_path / "tokenizer").mkdir()
    settings = {"tokenizer": str(tmp_path / "tokenizer"), "end_of_text_id": None}
    right = writers.megatron(tmp_path / "a.bin", ENDED * 2)
    corpus = prepare(config_of("megatron", right, **settings))
    assert (corpus.vocab_size, corpus.end_of_text) == (300, 7)
    assert (corpus.tokenizer_directory / "a").is_file()
    wrong = writers.megatron(tmp_path / "b.bin", [[*ids, 5] for ids in DOCUMENTS * 2])
    with pytest.raises(DataError, match=r"all 80 documents .* end with id 5, but .* is 7"):
        prepare(config_of("megatron", wrong, **settings))
    assert prepare(config_of("megatron", wrong, **{**settings, "end_of_text_id": 7}))
    with pytest.raises(DataError, match=r"end_of_text_id = 5: .* ends documents with id 7"):
        prepare(config_of("megatron", wrong, **{**settings, "end_of_text_id": 5}))


def test_changed_or_truncated_file_is_detected(tmp_path):
    path = writers.megatron(tmp_path / "a.bin", ENDED)
    config = config_of("megatron", path)
    corpus = prepare(config)
    assert prepare(config).key == corpus.key
    batches = Batches(corpus.train, 8, seed=0)
    data = path.read_bytes()
    os.truncate(path, 100)
    with pytest.raises(DataError, match=r"a\.bin has 100 bytes, .* it shrank"):
        batches.microbatch(0, 50)
    with pytest.raises(DataError, match=r"a\.bin has 100 bytes, but had .* when it was prepared"):
        Corpus.open(corpus.directory)
    path.unlink()
    with pytest.raises(DataError, match=r"a\.bin cannot be read \(No such file"):
        Corpus.open(corpus.directory)
    path.write_bytes(np.frombuffer(data, "<u2").clip(0, 200).astype("<u2").tobytes())
    assert prepare(config).key != corpus.key


def test_checked_file_is_not_read_again(tmp_path, monkeypatch):
    path = writers.megatron(tmp_path / "a.bin", ENDED)
    first = prepare(config_of("megatron", path))
    monkeypatch.setattr("parallel3d.data.tokenised.check", lambda *_, **__: pytest.fail("again"))
    again = prepare(config_of("megatron", path, held_out_fraction=0.4))
    assert again.num_tokens == first.num_tokens and again.key != first.key
    assert again.counts().tolist() == first.counts().tolist()
