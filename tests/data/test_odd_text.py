"""Odd input: a message with file, line and remedy, or a document that is left out and counted."""

import gzip
import os

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from parallel3d.base.errors import DataError
from parallel3d.data import lines
from parallel3d.data import sources as sources_module
from parallel3d.data.documents import find_documents
from parallel3d.data.prepare import prepare
from parallel3d.data.sources import find_files
from tests.data.documents import Settings, contents, names_of, read_source, texts_of

pytestmark = pytest.mark.gloo

GOOD = [f'{{"text": "good {i}"}}\n' for i in range(20)]
LONG = "ab \u20ac" * 10_000


def lines_of(*more):
    return "".join(GOOD).encode() + b"".join(x.encode() if isinstance(x, str) else x for x in more)


def table(**columns):
    def write(path):
        parquet.write_table(pa.table(columns), path)

    return write


def loop(path):
    path.symlink_to(path.name)


# file name, content, skipped documents, message
ODD = {
    "0 bytes": ("a.txt", b"", {"empty": 1}, None),
    "no rows": ("a.jsonl", b"", {"empty": 0}, None),
    "blank lines": ("a.jsonl", b"\n \n\n", {"empty": 0}, None),
    "empty text": ("a.jsonl", lines_of('{"text": ""}\n'), {"empty": 1}, None),
    "empty cell": ("a.parquet", table(text=["a", "", "b"]), {"empty": 1}, None),
    "byte order mark alone": ("a.txt", b"\xef\xbb\xbf", {"empty": 1}, None),
    "not UTF-8": ("a.txt", b"caf\xe9", {"not UTF-8": 1}, r"a\.txt is not UTF-8: byte 0xe9 at .*3 "),
    "not UTF-8 far on": (
        "a.txt", b"x" * 5000 + b"\xff" + b"x" * 99, {"not UTF-8": 1}, r"at offset 5000 .*iconv",
    ),
    "cut UTF-8": ("a.txt", b"x" * 4095 + b"\xe2\x82", {"not UTF-8": 1}, r"at offset 4095 "),
    "UTF-16": (
        "a.jsonl", lines_of("x".encode("utf-16")), {"not UTF-8": 1}, r"line 21 is not UTF-8",
    ),
    "NUL bytes": ("a.txt", bytes(9000), {"only NUL bytes": 1}, r"a\.txt contains only NUL bytes"),
    "not JSON": ("a.jsonl", lines_of("{'a'}\n"), {"not JSON": 1}, r"line 21 is not JSON: .*write"),
    "cut JSON": ("a.jsonl", lines_of('{"text": "a'), {"not JSON": 1}, r"line 21 is not JSON"),
    "null": (
        "a.jsonl", lines_of('{"text": null}\n'), {"null": 1}, r'line 21: field "text" is null',
    ),
    "null cell": ("a.parquet", table(text=["a", None]), {"null": 1}, r"row 2: column .* is null"),
    "nested": (
        "a.jsonl", lines_of('{"text": {"text": "a"}}\n'), {"not a string": 1},
        r'line 21: field "text" is an object, not a string; .*text_field',
    ),
    "list column": (
        "a.parquet", table(text=[["a"], ["b"]]), {"not a string": 2},
        r'column "text" holds list<.*>, not strings; set text_field',
    ),
    "no column": ("a.parquet", table(body=["a"] * 3), {"no such field": 3}, r'it has "body"; set'),
    "gz cut short": (
        "a.jsonl.gz",
        gzip.compress(lines_of() + np.random.default_rng(0).bytes(99))[:-60],
        {"unreadable file": 1},
        r"a\.jsonl\.gz cannot be read \(.*\); make it readable",
    ),
    "link to itself": ("a.txt", loop, {"unreadable file": 1}, r"a\.txt cannot be read \(Too many"),
    "no parquet": ("a.parquet", b"none", {"unreadable file": 1}, r"a\.parquet is no Parquet file"),
    "empty parquet": ("a.parquet", b"", {"unreadable file": 1}, r"a\.parquet is no Parquet file"),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_odd_input_is_refused_or_skipped_and_counted(name, tmp_path, small):
    file, data, skipped, message = ODD[name]
    kind = file.split(".")[1]
    path = tmp_path / file
    if isinstance(data, bytes):
        path.write_bytes(data)
    else:
        data(path)
    beside = tmp_path / f"b.{kind}"
    if kind == "parquet":
        parquet.write_table(pa.table({"text": [f"other {i}" for i in range(80)]}), beside)
    else:
        beside.write_text("".join(GOOD[:2]))
    source = {"txt": "text"}.get(kind, kind)
    keys = {"source": source, "paths": (f"{tmp_path}/?.{kind}*",), "max_skipped": 0.6}
    settings = Settings(**keys, cache=str(tmp_path / "cache"))
    if message:
        with pytest.raises(DataError, match=message) as caught:
            prepare(settings)
        assert str(path) in str(caught.value) and 'data.on_error to "skip"' in str(caught.value)
        assert not (tmp_path / "cache/corpora").exists()
    documents = read_source(**keys, on_error="skip")
    counts = {kind: count for kind, count in documents.skips.counts.items() if count}
    assert counts == {kind: count for kind, count in skipped.items() if count}
    assert f"{beside}" in names_of(documents)[-1]
    assert not any("\ufeff" in text for text in texts_of(documents))
    if message:
        [listed] = documents.skips.listed
        assert listed["file"] == str(path) and listed["reason"] in skipped


def test_first_20_problems_are_reported_at_once(tmp_path):
    bad = ["", "[1]\n", '{"body": "a"}\n', "[2]\n", '{"text": 3}\n']
    for number, more in enumerate(bad):
        (tmp_path / f"{number}.jsonl").write_text("".join([*GOOD[:3], *bad[: number + 1], more]))
    with pytest.raises(DataError) as caught:
        read_source("jsonl", [tmp_path / "*.jsonl"])
    text = str(caught.value)
    assert text.startswith("14 documents cannot be used; fix them, or set data.on_error")
    assert "1.jsonl, line 4 is a list" in text and "1.jsonl, line 5 is a list" in text
    assert '4.jsonl, line 7: field "text" is a number' in text
    # No more than 20: then the next files are not read.
    (tmp_path / "0.jsonl").write_text("[]\n" * 30)
    with pytest.raises(DataError, match=r"^20 documents or more cannot be used") as caught:
        read_source("jsonl", [tmp_path / "*.jsonl"])
    assert len(str(caught.value).splitlines()) == 21


def test_too_many_flawed_documents_are_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join([*GOOD[:9], "[]\n"]))
    settings = {"source": "jsonl", "paths": [tmp_path / "a.jsonl"], "on_error": "skip"}
    assert len(read_source(**settings, max_skipped=0.1)) == 9
    rule = (
        r"^1 of 10 documents \(10\.0%\) cannot be used, more than data\.max_skipped = 0\.09 allows"
    )
    with pytest.raises(DataError, match=rule) as caught:
        read_source(**settings, max_skipped=0.09)
    assert "line 10 is a list" in str(caught.value)


def test_skipped_documents_are_stored_with_the_index(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text("".join([*GOOD, "[]\n", '{"text": ""}\n']))
    settings = Settings("jsonl", (str(tmp_path / "a.jsonl"),), cache=str(tmp_path / "c"))
    rule = ("skip", 0.1)
    first = find_documents(find_files(settings), tmp_path / "c", rule=rule)
    again = find_documents(find_files(settings), tmp_path / "c", rule=rule)
    assert [*(tmp_path / "c/indexes").iterdir()]
    assert first.skips == again.skips and first.skips.counts == {"not JSON": 1, "empty": 1}
    with pytest.raises(DataError, match="line 21 is a list"):
        find_documents(find_files(settings), tmp_path / "c")


def test_too_many_unreadable_files_are_refused(tmp_path):
    for number in range(4):
        rows = [f'{{"text": "{number} {row}"}}\n' for row in range(100)]
        (tmp_path / f"{number}.jsonl").write_text("".join(rows))
    loop(tmp_path / "4.jsonl")
    settings = {"source": "jsonl", "paths": [tmp_path / "*.jsonl"], "on_error": "skip"}
    with pytest.raises(DataError, match=r"^1 of 5 files \(20\.0%\) cannot be used, .* 0\.1 allows"):
        read_source(**settings, max_skipped=0.1)
    documents = read_source(**settings, max_skipped=0.2)
    assert len(documents) == 400 and documents.skips.counts == {"unreadable file": 1}


def test_file_that_failed_once_is_read_the_next_time(tmp_path, monkeypatch):
    for number in range(2):
        (tmp_path / f"{number}.jsonl").write_text("".join(GOOD))
    settings = Settings("jsonl", (f"{tmp_path}/*.jsonl",), cache=str(tmp_path / "c"))
    files = find_files(settings)
    rule = ("skip", 0.9)
    whole = lines.open_text

    def failing(path):
        if path.endswith("1.jsonl"):
            raise OSError(5, "Input/output error")
        return whole(path)

    with monkeypatch.context() as disk:
        disk.setattr(lines, "open_text", failing)
        during = find_documents(files, tmp_path / "c", rule=rule)
    assert len(during) == 20 and during.skips.counts == {"unreadable file": 1}
    after = find_documents(files, tmp_path / "c", rule=rule)
    assert len(after) == 40 and after.skips.counts == {}
    assert len(find_documents(files, tmp_path / "c")) == 40


def test_empty_files_of_the_library_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(sources_module.sysconfig, "get_path", lambda name: str(tmp_path))
    for name, text in {"a.py": "x = 1\n", "b/__init__.py": "", "b/c.py": "y = 2\n"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    documents = read_source("python-stdlib")
    assert texts_of(documents) == ["x = 1\n", "y = 2\n"]
    assert documents.skips.counts == {"empty": 1}


def test_summary_lists_skipped_documents_of_each_part(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join([*GOOD, "[]\n"]))
    (tmp_path / "b.jsonl").write_text("".join([*GOOD, '{"text": ""}\n']).replace("good", "b"))
    parts = [Settings("jsonl", (str(tmp_path / f"{x}.jsonl"),)) for x in "ab"]
    common = {"cache": str(tmp_path / "cache"), "on_error": "skip"}
    for _ in range(2):
        summary = prepare(Settings("mixture", mixture=tuple(parts), **common)).summary()
        skipped = [part["skipped"] for part in summary["mixture"]]
        assert skipped == [{"not JSON": 1}, {"empty": 1}]
        assert summary["mixture"][0]["skipped_first"][0]["line"] == 21


def vanish(path):
    path.unlink()
    return "cannot be read"


def grow(path):
    path.write_bytes(path.read_bytes() + b"more")
    return "changed during the preparation"


@pytest.mark.parametrize("change", [vanish, grow])
def test_file_that_vanishes_or_grows_during_reading_is_refused(tmp_path, monkeypatch, change):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"{name} " * 100)
    reasons = []

    def progress(phase, done, total):
        if not phase.startswith("reading") and not reasons:
            reasons.append(change(tmp_path / "b.txt"))

    settings = Settings("text", (f"{tmp_path}/*.txt",), cache=str(tmp_path / "cache"))
    with pytest.raises(DataError, match=r"b\.txt") as caught:
        prepare(settings, progress)
    assert reasons[0] in str(caught.value)
    assert not [name for name in contents(tmp_path / "cache") if "corpora/" in name]


def test_lines_appended_during_reading_are_ignored(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(GOOD[:3]))
    documents = read_source("jsonl", [tmp_path / "a.jsonl"])
    with open(tmp_path / "a.jsonl", "a") as file:
        file.write(GOOD[3])
    assert texts_of(documents) == ["good 0", "good 1", "good 2"]


def test_recursive_folders_are_read_once(tmp_path, monkeypatch):
    monkeypatch.setattr(sources_module.glob, "glob", one_level(sources_module.glob.glob))
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/c.txt").write_text("c")
    for name in ("one", "two"):
        (tmp_path / "a/b" / name).symlink_to(tmp_path)
    for pattern in ("**/*.txt", "a/**/*.txt", "**/b/**/*.txt", "**/b/*.txt"):
        assert len(read_source("text", [f"{tmp_path}/{pattern}"])) == 1


def one_level(glob):
    """Two links make `glob` take 2^40 steps."""

    def checked(pattern, **more):
        assert "**" + os.sep not in pattern
        return glob(pattern, **more)

    return checked


@pytest.mark.skipif(not os.access("/proc/kmsg", os.R_OK), reason="needs the kernel's log")
def test_endless_file_counts_as_empty(tmp_path):
    """The kernel's log has the size 0, and reading it waits for the next message."""
    config = Settings(source="text", paths=("/proc/kmsg",), cache=str(tmp_path))
    with pytest.raises(DataError, match="has no text"):
        prepare(config)
