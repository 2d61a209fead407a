"""Files of chunks: read as numpy slices them, and as the safetensors library sees them."""

import os
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from parallel3d.base.errors import CheckpointError
from parallel3d.checkpoint import chunks as module
from parallel3d.checkpoint.chunks import Box, Chunk, ChunkFile, header
from tests.checkpoint.folders import write_tensors

pytestmark = pytest.mark.gloo


def chunk_of(value, name="w", kind="master", offsets=None):
    return Chunk(name, kind, Box(offsets or (0,) * value.ndim, value.shape))


@st.composite
def parts(draw):
    """A stored array's shape, a part of it, and the memory to read it into."""
    shape = tuple(draw(st.lists(st.integers(1, 7), max_size=3)))
    starts = tuple(draw(st.integers(0, size - 1)) for size in shape)
    ends = [draw(st.integers(a + 1, b)) for a, b in zip(starts, shape, strict=True)]
    sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
    order = draw(st.permutations(range(len(shape))))
    return shape, Box(starts, sizes), order, draw(st.booleans())


def memory(sizes, order, spread):
    """A tensor of these sizes whose dims lie in memory in any order, with gaps if `spread`."""
    stored = [sizes[dim] for dim in order]
    whole = torch.full([size * (2 if spread else 1) for size in stored], -1.0)
    view = whole[tuple(slice(None, None, 2) for _ in stored)] if spread else whole
    return whole, view.permute([order.index(dim) for dim in range(len(order))])


ALONE = (1,), Box((0,), (1,)), [0], True  # one element, whose stride says nothing


@settings(deadline=None)
@example(ALONE, 8 * 2**20, 64 * 2**10)
@given(parts(), st.sampled_from([8, 40, 8 * 2**20]), st.sampled_from([0, 16, 64 * 2**10]))
def test_read_part_equals_numpy_slice(tmp_path_factory, part, staging, gap):
    shape, box, order, spread = part
    value = np.random.default_rng(0).normal(size=shape).astype("<f4")
    offsets = tuple(range(3, 3 + len(shape)))
    chunk = chunk_of(value, offsets=offsets)
    path = tmp_path_factory.mktemp("chunks") / "shard.safetensors"
    write_tensors(path, {"other|master|0": np.ones(3, "<f4"), chunk.key: value})
    whole, out = memory(box.shape, order, spread)
    with pytest.MonkeyPatch.context() as patch, ChunkFile(path) as file:
        patch.setattr(module, "STAGING_BYTES", staging)
        patch.setattr(module, "GAP_BYTES", gap)
        moved = Box(tuple(a + b for a, b in zip(box.offsets, offsets, strict=True)), box.shape)
        file.read(chunk, moved, out)
    ends = [a + b for a, b in zip(*box, strict=True)]
    expected = value[tuple(slice(a, b) for a, b in zip(box.offsets, ends, strict=True))]
    assert np.array_equal(out.numpy(), expected)
    assert (whole == -1).sum() == whole.numel() - out.numel(), "nothing else is touched"


def test_contiguous_parts_are_read_without_a_copy(tmp_path):
    """Half of a file of 64 MiB: in the host's memory only `out` is new."""
    value = np.arange(2**24, dtype="<f4").reshape(2**12, 2**12)
    chunk = chunk_of(value)
    write_tensors(tmp_path / "a.safetensors", {chunk.key: value})
    rows = torch.empty(2**11, 2**12)
    columns = torch.empty(2**12, 2**11)
    tracemalloc.start()
    with ChunkFile(tmp_path / "a.safetensors") as file:
        file.read(chunk, Box((7, 0), (2**11, 2**12)), rows)
        # numpy's buffers are traced as they are asked for, touched or not.
        file.read(chunk, Box((0, 5), (2**12, 2**11)), columns)
    assert tracemalloc.get_traced_memory()[1] < 9 * 2**20
    tracemalloc.stop()
    assert np.array_equal(rows.numpy(), value[7 : 7 + 2**11])
    assert np.array_equal(columns.numpy(), value[:, 5 : 5 + 2**11])


@pytest.mark.parametrize("width", [1024, 1000])
@pytest.mark.parametrize("three", [False, True])
def test_transposed_destination_is_read_band_by_band(tmp_path, monkeypatch, width, three):
    """Rows of whole pages, and others; the last band is smaller than those before it."""
    shape = (37, 2, width // 2) if three else (37, width)
    value = np.arange(37 * width, dtype="<f4").reshape(shape)
    chunk = chunk_of(value)
    write_tensors(tmp_path / "a.safetensors", {chunk.key: value})
    monkeypatch.setattr(module, "TRANSPOSED_ROWS", 16)
    whole = torch.full((*shape[1:], 41), -1.0)
    for box in (chunk.box, Box((3, 1, *(0,) * three), (34, 1 if three else 1000 - 1, *shape[2:]))):
        out = whole[..., 2 : 2 + box.shape[0]].movedim(-1, 0)
        out = out[:, : box.shape[1]]
        with ChunkFile(tmp_path / "a.safetensors") as file:
            file.read(chunk, box, out)
        ends = [a + b for a, b in zip(*box, strict=True)]
        expected = value[tuple(slice(a, b) for a, b in zip(box.offsets, ends, strict=True))]
        assert np.array_equal(out.numpy(), expected)
    assert (whole[..., :2] == -1).all() and (whole[..., 39:] == -1).all()


@pytest.mark.parametrize(("width", "num_reads"), [(2**10, 1), (2**16, 16)])
def test_small_gaps_are_read_over_and_large_gaps_are_skipped(
    tmp_path, monkeypatch, width, num_reads
):
    value = np.arange(16 * width, dtype="<f4").reshape(16, width)
    chunk = chunk_of(value)
    write_tensors(tmp_path / "a.safetensors", {chunk.key: value})
    reads = []

    def counted(descriptor, buffers, at):
        reads.append(len(buffers[0]))
        return preadv(descriptor, buffers, at)

    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", counted)
    out = torch.empty(16, 8)
    with ChunkFile(tmp_path / "a.safetensors") as file:
        file.read(chunk, Box((0, 40), (16, 8)), out)
    assert np.array_equal(out.numpy(), value[:, 40:48])
    assert len(reads) == num_reads and sum(reads) == (4 * 16 * 8 if num_reads > 1 else value.nbytes)


VALUES = {
    "a.weight|master|0,0": np.arange(6, dtype="<f4").reshape(2, 3),
    "a.weight|exp_avg|4,0": np.full((1, 3), np.nan, "<f4"),
    "b|exp_avg_sq|": np.array(7, "<f4"),
    "odd | ï\n|name|master|12": np.array([-0.0, np.inf], "<f4"),
}


def test_safetensors_library_reads_our_files(tmp_path):
    chunks = [Chunk.from_key(key, value.shape) for key, value in VALUES.items()]
    head = header(chunks)
    assert len(head) % 8 == 0
    path = tmp_path / "a.safetensors"
    path.write_bytes(head + b"".join(value.tobytes() for value in VALUES.values()))
    with safe_open(path, "numpy") as file:
        assert set(file.keys()) == set(VALUES)
        for key, value in VALUES.items():
            assert file.get_tensor(key).dtype == np.float32
            assert file.get_tensor(key).tobytes() == value.tobytes()
            assert file.get_tensor(key).shape == value.shape
    with ChunkFile(path) as file:
        assert list(file.chunks) == chunks, "in the order of the file"


@pytest.mark.parametrize("metadata", [None, {"format": "np"}])
def test_files_of_the_safetensors_library_are_read(tmp_path, metadata):
    path = tmp_path / "a.safetensors"
    save_file(VALUES, path, metadata=metadata)
    with ChunkFile(path) as file:
        assert {chunk.key for chunk in file.chunks} == set(VALUES)
        for chunk in file.chunks:
            out = torch.empty(chunk.box.shape)
            file.read(chunk, chunk.box, out)
            assert out.numpy().tobytes() == VALUES[chunk.key].tobytes()


def test_file_truncated_after_opening_is_refused(tmp_path):
    value = np.arange(100, dtype="<f4")
    path = tmp_path / "a.safetensors"
    write_tensors(path, {"w|master|0": value})
    with ChunkFile(path) as file:
        os.truncate(path, path.stat().st_size - 1)
        chunk = chunk_of(value)
        file.read(chunk, Box((0,), (99,)), torch.empty(99))
        with pytest.raises(CheckpointError, match=r"a.safetensors: ends at byte .* too early"):
            file.read(chunk, chunk.box, torch.empty(100))
