"""Documents by file, by line and by blank line, fields within fields; long lines of JSON."""

import gzip
import json

import pyarrow as pa
import pytest
from pyarrow import parquet

from parallel3d.base.errors import DataError
from tests.data.documents import names_of, read_source, texts_at, texts_of

pytestmark = pytest.mark.gloo

LONG = "ab \u20ac" * 10_000
TEXT = "\ufeffone\r\n\r\nt\u20acwo\nthree\n \n\n\nfour\n\nfive" + LONG
DOCUMENTS = {
    "line": ["one", "t\u20acwo", "three", " ", "four", "five" + LONG],
    "blank_line": ["one", "t\u20acwo\nthree", "four", "five" + LONG],
    "file": [TEXT.removeprefix("\ufeff")],
}


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_text_is_cut_by_file_line_or_blank_line(tmp_path, small, documents, name):
    data = TEXT.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    for ending in ("", "\n"):
        if ending and name == "a.txt":
            (tmp_path / name).write_bytes(data + b"\n")
        read = read_source("text", [tmp_path / name], documents=documents)
        expected = DOCUMENTS[documents]
        if ending and documents == "file" and name == "a.txt":
            expected = [expected[0] + "\n"]
        assert texts_of(read) == expected
        chosen = sorted({len(expected) // 2, len(expected) - 1})
        assert texts_at(read, chosen) == [expected[i] for i in chosen]
    if documents == "line":
        assert names_of(read)[:2] == [f"{tmp_path / name}, line {i}" for i in (1, 3)]
        assert read.skips.counts == {"empty": 4}
    if documents == "blank_line":
        assert names_of(read)[1].endswith("line 3") and read.skips.counts == {}


def test_lone_byte_order_mark_between_blank_lines_is_skipped(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\n\n\ufeff\n\n\n\ntwo\n")
    read = read_source("text", [tmp_path / "a.txt"], documents="blank_line")
    assert texts_of(read) == ["one", "two"] and read.skips.counts == {"empty": 1}


FLAWED = {
    # Each flaw is known only once the blank line behind it was read.
    "cut character": (b"abc\xe2\n\ntwo\n\nthree\n", [1], ["two", "three"]),
    "NUL bytes": (b"one\n\n\0\0\n\nthree\n\nfour\n", [3], ["one", "three", "four"]),
    "cut at the end": (b"one\n\ntwo\xe2", [3], ["one"]),
    # And these before it.
    "not UTF-8": (b"a\xff\nmore\n\ntwo\n\nthree\n", [1], ["two", "three"]),
    "at a piece's end": (b"\xff" * 1000 + b"\nmore\n\ntwo\n", [1], ["two"]),
    "far on": (b"one\n" + b"b" * 990 + b"\xff" * 10 + b"\nmore\n\ntwo\n", [1], ["two"]),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", FLAWED)
def test_only_flawed_blocks_are_skipped(tmp_path, small, name, packed):
    data, rows, texts = FLAWED[name]
    path = tmp_path / ("a.txt.gz" if packed else "a.txt")
    path.write_bytes(gzip.compress(data) if packed else data)
    settings = {"documents": "blank_line", "on_error": "skip", "max_skipped": 0.6}
    read = read_source("text", [path], **settings)
    assert texts_of(read) == texts
    assert [x["line"] for x in read.skips.listed] == rows and read.skips.num_flawed == len(rows)


NESTED = {"meta": {"text": "inner", "a.b": {"c": "dotted"}}, "x.y": "literal", "x": {"y": "no"}}


@pytest.mark.parametrize(
    ("field", "text"), [("meta.text", "inner"), ("meta.a.b.c", "dotted"), ("x.y", "literal")]
)
def test_nested_field_is_read(tmp_path, small, field, text):
    rows = [NESTED, {**NESTED, "z": LONG}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert texts_of(read_source("jsonl", [tmp_path / "a.jsonl"], text_field=field)) == [text] * 2
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert (
        texts_of(read_source("parquet", [tmp_path / "a.parquet"], text_field=field)) == [text] * 2
    )
    with pytest.raises(DataError, match=r'has no (field|column) "meta\.none"'):
        read_source("jsonl", [tmp_path / "a.jsonl"], text_field="meta.none")
    with pytest.raises(DataError, match=r'has no column "meta\.none"'):
        read_source("parquet", [tmp_path / "a.parquet"], text_field="meta.none")


HALVES = {
    "in another value": (r'{"a": "\ud800", "b": ["\udc00x"], "text": "%s"}', None),
    "in a key": (r'{"\ud800": 1, "b": {"\udfff": 2}, "text": "%s"}', None),
    "in the text": (r'{"a": "\ud800", "text": "%s\ud800"}', 'field "text" has half of .*character'),
    "in a name that is told": (r'{"\ud800": "%s"}', r'has no field "text"; it has "\\ud800"'),
    "no escape": (r'{"a": "%s", "b": "\ud8", "text": ""}', "is not JSON"),
}


@pytest.mark.parametrize("text", ["short", LONG])
@pytest.mark.parametrize("name", HALVES)
def test_lone_surrogate_is_refused_only_in_the_text(tmp_path, small, name, text):
    line, message = HALVES[name]
    (tmp_path / "a.jsonl").write_text(line % text + "\n", encoding="utf-8")
    if message is None:
        assert texts_of(read_source("jsonl", [tmp_path / "a.jsonl"])) == [text]
        return
    with pytest.raises(DataError, match=message) as caught:
        read_source("jsonl", [tmp_path / "a.jsonl"])
    assert str(caught.value).encode()


def test_too_long_json_line_is_refused_by_name(tmp_path):
    """Up to the limit it is read whole, and what comes behind a longer one is read, too."""
    path = tmp_path / "a.jsonl"
    fits = json.dumps({"text": "a" * 88})
    path.write_text(f"{fits}\n{json.dumps({'text': 'b' * 300})}\n{fits}")
    assert len(fits) == 100
    with pytest.raises(DataError, match=r"a\.jsonl, line 2 has more than 100 bytes; raise"):
        read_source("jsonl", [path], max_line_bytes=100)
    read = read_source("jsonl", [path], max_line_bytes=100, on_error="skip", max_skipped=0.5)
    assert texts_of(read) == ["a" * 88] * 2 and read.skips.counts == {"too long a line": 1}
    assert len(texts_of(read_source("jsonl", [path], max_line_bytes=400))) == 3
