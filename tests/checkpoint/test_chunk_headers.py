"""Headers that are damaged, or made by somebody who means harm: each is refused by name."""

import json
import os
import pickle
import struct
import tracemalloc

import pytest
import torch

from parallel3d.base.errors import CheckpointError
from parallel3d.checkpoint.chunks import ChunkFile
from tests.checkpoint.folders import write_raw

pytestmark = pytest.mark.gloo


class Exploit:
    def __reduce__(self):
        return os.system, ("touch exploited",)


def entry(start=0, end=8, shape=(2,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


KEY = "w|master|0"
# A header, the bytes after it, and a word of the refusal.
BAD_HEADERS = [
    (b"not JSON", b"", "not a safetensors file of chunks"),
    (b"[]", b"", "not a JSON object"),
    (b'{"w|master|0": 1, "w|master|0": 2}', b"", "occurs twice"),
    (b"[" * 100_000, b"", "nested too deeply"),
    (b"\xff\xfe{}", b"", "not a safetensors file of chunks"),
    (b'{"w|master|0": NaN}', b"", "NaN"),
    (b'{"w|master|' + b"9" * 5000 + b'": 1}', b"", "must have dtype"),
    (b'{"w": ' + b"9" * 5000 + b"}", b"", "not a safetensors file of chunks"),
    ({KEY: entry()}, b"1234567", "describes"),
    ({KEY: entry()}, b"123456789", "describes"),
    ({KEY: entry(0, 2**62, (2**60,))}, b"", "describes"),
    ({KEY: entry(2**62, 2**62 + 8)}, b"12345678", "begins at byte"),
    ({KEY: entry(4, 12)}, b"123456789abc", "begins at byte"),
    ({KEY: entry(), "v|master|0": entry(4, 12)}, b"123456789abc", "begins at byte"),
    ({KEY: entry(), "v|master|0": entry()}, b"12345678", "begins at byte"),
    ({KEY: entry(), "v|master|0": entry(12, 20)}, bytes(20), "begins at byte"),
    ({KEY: entry(-8, 0)}, b"", "data_offsets"),
    ({KEY: entry(8, 0)}, bytes(8), "needs 8 bytes"),
    ({KEY: entry(0, 8.0)}, bytes(8), "data_offsets"),
    ({KEY: entry(0, 2**64)}, bytes(8), "data_offsets"),
    ({KEY: entry() | {"data_offsets": [0]}}, bytes(8), "data_offsets"),
    ({KEY: entry() | {"data_offsets": "08"}}, bytes(8), "data_offsets"),
    ({KEY: entry(shape=(3,))}, bytes(8), "needs 12 bytes"),
    ({KEY: entry(shape=(-2,))}, bytes(8), "shape"),
    ({KEY: entry(shape=(True, 2))}, bytes(8), "shape"),
    ({KEY: entry(shape=("2",))}, bytes(8), "shape"),
    ({KEY: entry(0, 0, (0,))}, b"", "shape"),
    ({"w|master|" + ",".join("0" * 17): entry(shape=[1] * 16 + [2])}, bytes(8), "shape"),
    ({KEY: entry(dtype="BF16", shape=(4,))}, bytes(8), "not F32"),
    ({KEY: entry(dtype="I32")}, bytes(8), "not F32"),
    ({KEY: entry(dtype=["F32"] * 99)}, bytes(8), "not F32"),
    ({KEY: {"dtype": "F32", "shape": [2]}}, bytes(8), "must have dtype"),
    ({KEY: entry() | {"more": 1}}, bytes(8), "must have dtype"),
]
BAD_KEYS = [
    "w",
    "w|master",
    "w|master|",
    "|master|0",
    "w|master|0,0",
    "w|master|-1",
    "w|master|01",
    "w|master|0,",
    "w|master|1e3",
    "w|master|\u0663",
    "w|master|0\n",
    "w|master|" + "1" * 19,
]
BAD_HEADERS += [({key: entry()}, bytes(8), "is not name\\|kind\\|offsets") for key in BAD_KEYS]


@pytest.mark.parametrize(("entries", "data", "word"), BAD_HEADERS)
def test_bad_header_is_refused(tmp_path, entries, data, word):
    path = tmp_path / "bad.safetensors"
    write_raw(path, entries, data)
    with pytest.raises(CheckpointError, match=word) as refusal:
        ChunkFile(path)
    assert str(refusal.value).startswith(f"{path}: ") and len(str(refusal.value)) < 500


@pytest.mark.parametrize("length", [10**15, 2**64 - 1, 2**63, 2**40])
def test_huge_header_is_refused_before_memory_is_allocated(tmp_path, length):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{}")
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=f"claims {length:,} of the file's 10 bytes"):
        ChunkFile(path)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_long_header_of_a_sparse_file_is_refused(tmp_path):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(struct.pack("<Q", 2**35) + b"{}")
    os.truncate(path, 2**36)
    with pytest.raises(CheckpointError, match="its header claims"):
        ChunkFile(path)


def test_pickle_is_never_loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "a.safetensors"
    path.write_bytes(pickle.dumps(Exploit()))
    with pytest.raises(CheckpointError, match="its header claims"):
        ChunkFile(path)
    torch.save({"w": torch.ones(3)}, path)
    with pytest.raises(CheckpointError, match="its header claims"):
        ChunkFile(path)
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]


def test_pipes_folders_and_missing_files_are_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "empty.safetensors").touch()
    for name in ("pipe", "folder", "empty", "none"):
        with pytest.raises(CheckpointError, match=f"{name}.safetensors"):
            ChunkFile(tmp_path / f"{name}.safetensors")


def test_refused_file_is_closed(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    (tmp_path / "a.safetensors").write_bytes(b"12345678")
    for path in (tmp_path / "a.safetensors", tmp_path):
        with pytest.raises(CheckpointError):
            ChunkFile(path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_control_characters_of_a_header_are_escaped_in_messages(tmp_path):
    """A key of control characters is shown as such, not written to a terminal."""
    path = tmp_path / "a.safetensors"
    write_raw(path, json.dumps({"\x1b[2J\ud800": entry()}).encode(), bytes(8))
    with pytest.raises(CheckpointError) as refusal:
        ChunkFile(path)
    assert "\x1b" not in str(refusal.value) and str(refusal.value).encode()
