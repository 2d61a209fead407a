"""Rows as documents: lines of JSON, packed or not, and parquet; what is wrong is named."""

import bz2
import gzip
import json
import lzma
import os

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import compute, parquet

from parallel3d.base.errors import DataError
from parallel3d.data.rows import FileReader, column_texts
from tests.data.documents import READ, names_of, read_source, texts_at, texts_of

pytestmark = pytest.mark.gloo

AWKWARD = [
    *READ.values(),
    "\n",
    "a\nb\u2028c\x85d",
    '"quoted"\\',
    "\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"),
]


def json_lines(texts, field="text"):
    lines = [json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(texts)]
    return "".join(lines).encode()


def zstd(data):
    return pa.compress(data, codec="zstd", asbytes=True)


def lz4(data):
    packed = pa.BufferOutputStream()
    with pa.CompressedOutputStream(packed, "lz4") as stream:
        stream.write(data)
    return packed.getvalue().to_pybytes()


PACKED = {
    "rows.jsonl": bytes,
    "rows.jsonl.gz": gzip.compress,
    "rows.jsonl.bz2": bz2.compress,
    "rows.jsonl.zst": zstd,
    # Two packed files one after the other are one.
    "joined.jsonl.gz": lambda data: gzip.compress(data[:50]) + gzip.compress(data[50:]),
    "joined.jsonl.zst": lambda data: zstd(data[:50]) + zstd(data[50:]),
}


@pytest.mark.parametrize("name", PACKED)
def test_json_lines_are_read(tmp_path, name):
    (tmp_path / name).write_bytes(PACKED[name](json_lines(AWKWARD)))
    documents = read_source("jsonl", [tmp_path / name])
    assert texts_of(documents) == AWKWARD
    assert names_of(documents)[:2] == [f"{tmp_path / name}, line {i}" for i in (1, 2)]
    assert texts_at(documents, [0, 3, 4, 8]) == [AWKWARD[i] for i in (0, 3, 4, 8)]
    # Back again, by the reader that has read on.
    assert texts_at(documents, [1]) == [AWKWARD[1]]


@pytest.mark.parametrize("group", [1, 3, 1000])
def test_parquet_rows_are_read(tmp_path, group):
    path = tmp_path / "rows.parquet"
    table = pa.table({"id": range(len(AWKWARD)), "text": AWKWARD})
    parquet.write_table(table, path, row_group_size=group, compression="zstd")
    documents = read_source("parquet", [path])
    assert texts_of(documents) == AWKWARD
    assert documents.name(4) == f"{path}, row 5"
    assert texts_at(documents, [0, 3, 8]) == [AWKWARD[i] for i in (0, 3, 8)]


STRINGS = {
    "string": pa.string(),
    "large": pa.large_string(),
    "view": pa.string_view(),
    "category": pa.dictionary(pa.int32(), pa.string()),
    "small category": pa.dictionary(pa.int8(), pa.large_string()),
}


@pytest.mark.parametrize("inside", [False, True], ids=["column", "struct"])
@pytest.mark.parametrize("name", STRINGS)
def test_every_kind_of_string_is_read(tmp_path, name, inside):
    array = pa.array(AWKWARD).cast(pa.string())
    kind = STRINGS[name]
    if pa.types.is_dictionary(kind):
        array = array.dictionary_encode()
    column = array.cast(kind)
    field = "text"
    if inside and name != "view":  # pyarrow cannot write such structs
        column = pa.StructArray.from_arrays([column], names=["text"])
        field = "meta.text"
    table = pa.table({field.partition(".")[0]: column})
    path = tmp_path / "rows.parquet"
    parquet.write_table(table, path, row_group_size=4)
    assert texts_of(read_source("parquet", [path], text_field=field)) == AWKWARD


def test_runs_of_strings_are_read_from_arrow(tmp_path):
    """Parquet has no such type, and `datasets` caches Arrow streams."""
    runs = compute.run_end_encode(pa.array(["a", "a", "b"]))
    path = tmp_path / "rows.arrow"
    table = pa.table({"text": runs})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    rows = column_texts(str(path), "x", "text", False, range(1, 9))
    assert [text for _, text in rows] == [b"a", b"a", b"b"]


@pytest.mark.parametrize(
    "kind", [pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(2)], ids=str
)
def test_binary_column_is_refused_with_its_remedy(tmp_path, kind):
    path = tmp_path / "rows.parquet"
    parquet.write_table(pa.table({"text": pa.array([b"ab", b"cd"], kind)}), path)
    with pytest.raises(DataError, match=r'column "text" holds .*binary.*cast it to string if'):
        read_source("parquet", [path])


@pytest.mark.parametrize(
    "values", [[1, 2], [[1], [2]], [1.5, 2.5], pa.array([1, 2]).dictionary_encode()], ids=str
)
def test_column_of_another_type_is_refused(tmp_path, values):
    path = tmp_path / "rows.parquet"
    parquet.write_table(pa.table({"text": values}), path)
    with pytest.raises(DataError, match=r'column "text" holds .*, not strings; set text_field'):
        read_source("parquet", [path])


@pytest.mark.parametrize("name", ["rows.jsonl", "rows", "rows.jsonl.gz", "rows.jsonl.xz"])
@pytest.mark.parametrize("pack", ["none", "gzip", "bz2", "zstd", "lz4", "xz"])
def test_compression_is_known_by_the_first_bytes(tmp_path, name, pack):
    packers = {
        "none": bytes,
        "gzip": gzip.compress,
        "bz2": bz2.compress,
        "zstd": zstd,
        "lz4": lz4,
        "xz": lzma.compress,
    }
    (tmp_path / name).write_bytes(packers[pack](json_lines(AWKWARD)))
    documents = read_source("jsonl", [tmp_path / name])
    assert texts_of(documents) == AWKWARD
    assert texts_at(documents, [0, 3, 4, 8]) == [AWKWARD[i] for i in (0, 3, 4, 8)]


@pytest.mark.parametrize(
    ("source", "content", "message"),
    [
        ("jsonl", b"PK\x03\x04" + bytes(40), "is a zip archive; unpack it"),
        ("text", b"PK\x03\x04" + bytes(40), "is a zip archive; unpack it"),
        ("parquet", gzip.compress(b"PAR1", mtime=0), "is packed by gzip as a whole; unpack it"),
        ("text", b"PAR1" + bytes(40), 'is a Parquet file; set its source to "parquet"'),
        ("jsonl", b"PAR1" + bytes(40), 'is a Parquet file; set its source to "parquet"'),
        ("text", b"\x93NUMPY" + bytes(40), 'an array of NumPy; set its source to "tokens"'),
        ("parquet", b'{"text": "a"}', 'is no Parquet file; set its source to "jsonl"'),
    ],
)
def test_file_of_another_format_is_refused_with_its_remedy(tmp_path, source, content, message):
    (tmp_path / "rows").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_source(source, [tmp_path / "rows"])


def test_rows_without_text_are_skipped(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(
        b'\xef\xbb\xbf{"body": "a"}\r\n\n  \n{"body": ""}\n{"body": "b"}'
    )
    lines = read_source("jsonl", [tmp_path / "a.jsonl"], text_field="body")
    assert texts_of(lines) == ["a", "b"]
    assert names_of(lines)[1].endswith("a.jsonl, line 5")
    parquet.write_table(pa.table({"text": ["", "a", "", "b"]}), tmp_path / "a.parquet")
    rows = read_source("parquet", [tmp_path / "a.parquet"])
    assert texts_of(rows) == ["a", "b"] and names_of(rows)[1].endswith("row 4")


def test_files_are_read_in_the_order_of_their_names(tmp_path):
    for name in ("b.jsonl", "a.jsonl"):
        (tmp_path / name).write_bytes(json_lines([f"{name} {i}" for i in range(3)]))
    documents = read_source("jsonl", [tmp_path / "*.jsonl"])
    assert texts_of(documents) == [f"{x}.jsonl {i}" for x in "ab" for i in range(3)]
    assert texts_at(documents, [1, 4]) == ["a.jsonl 1", "b.jsonl 1"]


@settings(max_examples=20)
@given(texts=st.lists(st.text(min_size=1), min_size=1), data=st.data())
def test_any_text_is_read_back_at_any_index(tmp_path_factory, texts, data):
    path = tmp_path_factory.mktemp("any") / "rows.jsonl"
    texts = [text.encode(errors="ignore").decode() or "x" for text in texts]
    lines = [json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts]
    path.write_text("".join(lines), newline="\n")
    documents = read_source("jsonl", [path])
    chosen = sorted(data.draw(st.sets(st.integers(0, len(texts) - 1))))
    assert texts_of(documents) == texts
    assert texts_at(documents, chosen) == [texts[i] for i in chosen] or not chosen


GOOD = '{"text": "good"}\n'
BAD_LINES = [
    ('{"text": "a"', r"rows\.jsonl, line 2 is not JSON: .* column 13 .*; write one object"),
    ("plain words", r"line 2 is not JSON: Expecting value: .*column 1"),
    ("[" * 100_000, r"line 2 cannot be read: maximum recursion depth"),
    (f'{{"n": {"9" * 5000}, "text": "a"}}', r"line 2 cannot be read: Exceeds the limit .*digits"),
    ('["a"]', r"line 2 is a list, not an object; .*\{\"text\": \"\.\.\.\"\}"),
    ('{"body": "a", "id": 1}', r'line 2 has no field "text"; it has "body"; set text_field'),
    ("{}", r'line 2 has no field "text"; it has none'),
    ('{"text": 3}', r'line 2: field "text" is a number, not a string; fix or remove'),
    (b'{"text": "caf\xe9"}', r"line 2 is not UTF-8: byte 0xe9 at offset 13 .*iconv"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_bad_line_is_named_with_remedy(tmp_path, line, message):
    data = line if isinstance(line, bytes) else line.encode()
    (tmp_path / "rows.jsonl").write_bytes(GOOD.encode() + data + b"\n" + GOOD.encode())
    with pytest.raises(DataError, match=message):
        read_source("jsonl", [tmp_path / "rows.jsonl"])


NOT_UTF8 = pa.array([b"a", b"caf\xe9"]).view(pa.string())
BAD_TABLES = [
    (pa.table({"text": [1, 2]}), r'column "text" holds int64, not strings; set text_field'),
    (pa.table({"text": NOT_UTF8}), r"row 2 is not UTF-8: byte 0xe9 at offset 3"),
    (pa.table({"text": [""]}), r"rows\.parquet has no text; use files"),
]


@pytest.mark.parametrize(("table", "message"), BAD_TABLES)
def test_bad_table_is_named_with_remedy(tmp_path, table, message):
    parquet.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=message):
        read_source("parquet", [tmp_path / "rows.parquet"])


@pytest.mark.parametrize("change", [b'{"text": "other"}\n', b"", b"\n" * 20, b'{"text": 1}'])
def test_file_changed_after_indexing_is_refused(tmp_path, change):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD.encode() * 3)
    documents = read_source("jsonl", [path])
    path.write_bytes(GOOD.encode() + change)
    with pytest.raises(DataError, match=r"line [23](:| changed)"):
        texts_of(documents)


def test_indexed_rows_are_not_scanned_again(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD.encode() * 3)
    scans = []
    scan = FileReader.scan

    def counted_scan(reader):
        scans.append(reader)
        return scan(reader)

    monkeypatch.setattr(FileReader, "scan", counted_scan)
    first = read_source("jsonl", [path], cache=tmp_path / "cache")
    again = read_source("jsonl", [path], cache=tmp_path / "cache")
    assert len(scans) == 1 and np.array_equal(first.table, again.table)
    # Same size, and the time that it had: the inode's own time tells.
    state = path.stat()
    path.write_bytes(GOOD.replace("good", "evil").encode() * 3)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert texts_of(read_source("jsonl", [path], cache=tmp_path / "cache")) == ["evil"] * 3
    read_source("jsonl", [path], cache=tmp_path / "cache")
    assert len(scans) == 2
    [index, _] = (tmp_path / "cache/indexes").iterdir()
    index.write_bytes(index.read_bytes()[:-1])
    read_source("jsonl", [path], cache=tmp_path / "cache")
    assert len(list((tmp_path / "cache/indexes").iterdir())) == 2
