"""Files that are hashed while chunks are read: in any order, each byte of them, none in vain."""

import os
from itertools import permutations

import numpy as np
import pytest
import torch
from xxhash import xxh3_128_hexdigest

from parallel3d.checkpoint.manifest import Entry
from parallel3d.huggingface.hashed import HashedChunks
from tests.checkpoint.folders import write_tensors

pytestmark = pytest.mark.gloo

SHAPES = {"a": (3, 4), "b": (300_000,), "c": (2, 3)}


@pytest.fixture
def made(tmp_path):
    path = tmp_path / "shard.safetensors"
    values = {n: np.random.default_rng(0).normal(size=s).astype("<f4") for n, s in SHAPES.items()}
    write_tensors(path, {f"{n}|master|{','.join('0' * v.ndim)}": v for n, v in values.items()})
    data = path.read_bytes()
    return path, Entry(len(data), xxh3_128_hexdigest(data)), values


def out_of(shape, turned):
    return torch.empty(shape[::-1]).t() if turned and len(shape) == 2 else torch.empty(shape)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("order", [*permutations("abc"), "b", "", "aab"], ids="".join)
def test_hash_covers_all_bytes_in_order(made, order, turned):
    path, entry, values = made
    file = HashedChunks(path, entry)
    chunks = {chunk.name: chunk for chunk in file.chunks}
    for name in order:
        out = out_of(SHAPES[name], turned)
        file.read(chunks[name], out)
        assert np.array_equal(out.numpy(), values[name])
    assert file.check() == file.check() == ""
    assert HashedChunks(path, Entry(entry.size, "0" * 32)).check() != ""


def test_sequential_reads_read_each_byte_once(made, monkeypatch):
    path, entry, _ = made
    file = HashedChunks(path, entry)
    first = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    read = []
    preadv = os.preadv

    def counted(descriptor, buffers, at):
        read.append((at, preadv(descriptor, buffers, at)))
        return read[-1][1]

    monkeypatch.setattr(os, "preadv", counted)
    for chunk in file.chunks:
        file.read(chunk, torch.empty(chunk.box.shape))
    assert read[0][0] == first and sum(count for _, count in read) == entry.size - first
    assert file._done == entry.size and file.check() == ""


@pytest.mark.parametrize("at", [9, -1, 600_000])
@pytest.mark.parametrize("read", ["", "abc"])
def test_changed_byte_is_detected(made, at, read):
    path, entry, _ = made
    file = HashedChunks(path, entry)
    chunks = {chunk.name: chunk for chunk in file.chunks}
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    for name in read:
        file.read(chunks[name], torch.empty(SHAPES[name]))
    assert "do not match the manifest" in file.check()


def test_changed_length_is_detected(made):
    path, entry, _ = made
    data = path.read_bytes()
    for other in (data[:-4], data + b"\0"):
        path.write_bytes(data)
        file = HashedChunks(path, entry)
        path.write_bytes(other)
        assert "do not match the manifest" in file.check()
