"""A checkpoint of more files than a process may open, and the work of each of many ranks."""

import contextlib
import io
import json
import os
import resource
import sys
from collections import Counter
from functools import cache
from math import prod

import pytest
import torch

from launch import checkpoint as command
from parallel3d.checkpoint import load as loading
from parallel3d.checkpoint import on_disk
from parallel3d.checkpoint.chunks import Chunk, boxes_of
from parallel3d.checkpoint.find import find_newest
from parallel3d.checkpoint.load import load, make_index
from parallel3d.checkpoint.manifest import read_manifest
from parallel3d.model.spec import named_params
from parallel3d.models import layers
from parallel3d.tensor.cut import even_split
from parallel3d.verify.local_ranks import run_locally
from tests.cases import Case
from tests.checkpoint.folders import KINDS, seal, state_of, write_tensors
from tests.checkpoint.resharding import MODELS, STEPS, Side, Trained, differences
from tests.checkpoint.test_index import Rank

pytestmark = pytest.mark.gloo
MODEL = layers(Case(model=MODELS["shallow"]).config.model)
SHAPES = {name: spec.shape for name, spec in named_params(MODEL).items()}


@cache
def value_of(name, kind):
    """A whole tensor: its numbers tell each element of each tensor from every other."""
    first = 100_000 * (sum(name.encode()) % 97) + 30_000_000 * KINDS.index(kind) / 100
    numel = prod(SHAPES[name])
    return first + torch.arange(numel, dtype=torch.float32).reshape(SHAPES[name])


def write(checkpoints, count):
    """A checkpoint in `count` files, each of which has an equal share of every tensor."""
    folder = checkpoints / f"step-{STEPS}"
    folder.mkdir(parents=True)
    for number in range(count):
        tensors = {}
        for name, shape in SHAPES.items():
            for box, _ in boxes_of(shape, *even_split(prod(shape), count, number)):
                where = tuple(slice(at, at + size) for at, size in zip(*box, strict=True))
                for kind in KINDS:
                    tensors[Chunk(name, kind, box).key] = value_of(name, kind)[where].numpy()
        write_tensors(folder / f"shard-{number:05d}-of-{count:05d}.safetensors", tensors)
    (folder / "state.json").write_text(json.dumps(state_of(STEPS, SHAPES)))
    seal(folder, STEPS)
    return folder, sorted(path.name for path in folder.glob("*.safetensors"))


def load_under_a_limit(rank, checkpoints, limit, root):
    """Return the differences, the number of compared elements, and rank 0's reports."""
    trained = Trained(Side((1, 2, 1), 3, model="shallow"), root)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    checkpoint, rejected = find_newest([on_disk.DiskPlace(trained.mesh, checkpoints)])
    assert checkpoint, rejected
    model = layers(trained.config.model)
    load(checkpoint, engine=trained.engine, mesh=trained.mesh, layers=model)
    wrong = differences(trained, {f"{n}|{k}": value_of(n, k) for n in SHAPES for k in KINDS})
    reports = (
        [] if rank else [run_command(which, checkpoint.folder) for which in ("verify", "inspect")]
    )
    trained.mesh.barrier()
    return *wrong, reports


def run_command(which, folder):
    sys.argv = ["checkpoint.py", which, str(folder), "--json"]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert command.main() == command.DONE
    return json.loads(out.getvalue())


@pytest.mark.parametrize(
    ("count", "limit"), [(80, 64), pytest.param(1024, 256, marks=pytest.mark.slow)]
)
def test_ranks_load_more_shards_than_the_open_file_limit(count, limit, tmp_path):
    """Every element of every master and moment is the one that was written."""
    _, shards = write(tmp_path / "checkpoints", count)
    results = run_locally(load_under_a_limit, 2, tmp_path / "checkpoints", limit, tmp_path)
    for wrong, compared, _ in results:
        assert not wrong and compared > 0
    verified, inspected = results[0][2]
    assert verified == {"ok": True, "bad": [], "left_over": []}
    assert [file["file"] for file in inspected["files"] if file["chunks"]] == shards


@pytest.mark.parametrize("count", [8, 32, pytest.param(1024, marks=pytest.mark.slow)])
def test_work_of_a_rank_does_not_grow_with_the_number_of_shards(count, tmp_path, monkeypatch):
    """It opens its own file to hash it, to see that it is what its name says, and for the index."""
    folder, shards = write(tmp_path, count)
    headers = [
        json.dumps(loading._packed_rows(folder, {rank: shards[rank]}, SHAPES, KINDS))
        for rank in range(count)
    ]
    opened = Counter()
    really_open = os.open

    def noted(path, *args, **options):
        opened[os.path.basename(path)] += 1
        return really_open(path, *args, **options)

    monkeypatch.setattr(os, "open", noted)
    # The manifest's names are sorted: the state comes after the shards.
    files = read_manifest(folder).files
    opened.clear()
    on_disk._check_share(folder, files, 3, count + 1)
    index = make_index(folder, shards, SHAPES, list(SHAPES), Rank(3, count, headers), KINDS)
    assert opened == {shards[3]: 3}
    index.check_tiling(folder, SHAPES)
    chunks = sum(boxes_in(count)) * len(KINDS)
    assert sum(map(len, headers)) < 100 * count + 40 * chunks  # bytes that the others send


def boxes_in(count):
    for number in range(count):
        for shape in SHAPES.values():
            yield len(boxes_of(shape, *even_split(prod(shape), count, number)))
