"""docs/checkpoint.md is right: its reader reads what we write, and its examples are of our form."""

import ast
import json
import re
from math import prod
from pathlib import Path

import numpy as np
import pytest
from xxhash import xxh3_128_hexdigest

from parallel3d.checkpoint.chunks import MAX_HEADER_BYTES, Box, Chunk, boxes_of, header, shift
from parallel3d.checkpoint.manifest import TOKENIZER_FILES, Entry, manifest_bytes, verify
from parallel3d.train.bad_steps import KEY
from tests.checkpoint.folders import KINDS, SHAPES, make_checkpoint, state_of, values_of

pytestmark = pytest.mark.gloo

PAGE = (Path(__file__).parents[2] / "docs" / "checkpoint.md").read_text()
READER = re.search(r"### A reader\n.*?```python\n(.*?)```", PAGE, re.DOTALL)[1]


@pytest.fixture
def read():
    """The function that the page shows."""
    scope = {}
    exec(compile(READER, "docs/checkpoint.md", "exec"), scope)
    return scope["read"]


def test_reader_imports_only_numpy_and_the_standard_library():
    modules = set()
    for node in ast.walk(ast.parse(READER)):
        if isinstance(node, ast.ImportFrom):
            modules.add(node.module)
        elif isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
    assert modules == {"json", "struct", "pathlib", "numpy"}
    assert sum(bool(line.strip()) for line in READER.splitlines()) <= 25


# A part of a tensor-parallel layer, the whole of another, a vector, a scalar, an odd name.
CUT = {
    "blocks.0.qkv.weight": ((3, 8, 5), 1),
    "blocks.0.down.weight": ((5, 12), 1),
    "blocks.0.norm.weight": ((5,), None),
    "blocks.10.scale": ((), None),
    "odd|name ï": ((2, 7), 0),
}


@pytest.mark.parametrize("ranks", [(1, 1), (2, 1), (1, 3), (2, 5)])
def test_reader_returns_written_values(tmp_path, read, ranks):
    """Each parameter cut in tensor-parallel parts, and each of these flat over the ZeRO ranks."""
    tp, dp = ranks
    shapes = {name: shape for name, (shape, _) in CUT.items()}
    values = values_of(3, shapes)
    files = [[] for _ in range(tp * dp)]
    for name, (shape, dim) in CUT.items():
        parts = tp if dim is not None else 1
        for part in range(parts):
            local = list(shape)
            first = [0] * len(shape)
            if dim is not None:
                local[dim] //= parts
                first[dim] = part * local[dim]
            share = -(-prod(local) // dp)
            for rank in range(dp):
                start = min(rank * share, prod(local))
                stop = min((rank + 1) * share, prod(local))
                for kind in KINDS:
                    for box, _ in boxes_of(local, start, stop):
                        files[part * dp + rank].append(Chunk(name, kind, shift(box, first)))
    folder = tmp_path / "step-7"
    folder.mkdir()
    entries = {}
    for number, chunks in enumerate(files):
        data = header(chunks)
        for chunk in chunks:
            data += values[chunk.name, chunk.kind][slices(chunk.box)].tobytes()
        save(folder, f"shard-{number:05d}-of-{len(files):05d}.safetensors", data, entries)
    save(folder, "state.json", json.dumps(state_of(7, shapes)).encode(), entries)
    (folder / "manifest.json").write_bytes(manifest_bytes(7, entries))
    assert verify(folder) == []
    for (name, kind), value in values.items():
        array = read(folder, name, kind)
        assert array.shape == value.shape and array.tobytes() == value.tobytes(), (name, kind)


def slices(box: Box):
    return tuple(slice(at, at + size) for at, size in zip(*box, strict=True))


def save(folder, name, data, entries):
    (folder / name).write_bytes(data)
    entries[name] = Entry(len(data), xxh3_128_hexdigest(data))


def test_reader_reads_a_hand_made_folder_and_reports_missing_elements(tmp_path, read):
    folder = make_checkpoint(tmp_path)
    values = values_of()
    for name in SHAPES:
        assert np.array_equal(read(folder, name), values[name, "master"])
    state = state_of(10)
    state["parameters"]["embedding.weight"]["shape"] = [6, 2]
    (folder / "state.json").write_text(json.dumps(state))
    with pytest.raises(AssertionError, match="2 elements are nowhere"):
        read(folder, "embedding.weight")


def test_example_manifest_is_canonical():
    example = re.search(r"### manifest\.json\n\n```json\n(.*?)```", PAGE, re.DOTALL)[1]
    content = json.loads(example)
    files = {name: Entry(**entry) for name, entry in content["files"].items()}
    assert manifest_bytes(content["step"], files) == example.encode()


def test_example_header_entry_is_valid():
    example = re.search(r"    (\"blocks.*\|.*)", PAGE)[1]
    ((key, entry),) = json.loads(f"{{{example}}}").items()
    chunk = Chunk.from_key(key, entry["shape"])
    begin, end = entry["data_offsets"]
    assert end - begin == 4 * chunk.box.numel
    assert f"{chunk.box.numel} elements" in PAGE
    assert f"{MAX_HEADER_BYTES:,}" in PAGE


def test_every_key_of_a_state_is_documented():
    table = PAGE[PAGE.index("### state.json") : PAGE.index("### manifest.json")]
    described = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    # Two keys are only written with some settings, or with a tokenizer.
    assert set(described) == set(state_of(1)) | {KEY, TOKENIZER_FILES}
