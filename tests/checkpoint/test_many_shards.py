"""A checkpoint of more files than a process may open: verified, inspected and loaded as any."""

import contextlib
import io
import json
import os
import resource
import sys

import pytest

from launch import checkpoint as command
from parallel3d.checkpoint import resume
from parallel3d.checkpoint.load import load
from parallel3d.engine import KINDS
from parallel3d.models import layers
from parallel3d.verify.local_ranks import run_locally
from tests.cases import Case
from tests.checkpoint.coordinates import value_of, write
from tests.checkpoint.resharding import Side, Trained, differences

pytestmark = pytest.mark.gloo


@pytest.fixture
def unsynced(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def load_under_a_limit(rank, checkpoints, limit, root):
    """What is wrong in what was loaded, how much was compared; what the command says on rank 0."""
    trained = Trained(Side((1, 2, 1), 3), root)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    found, rejected = resume.find(checkpoints, "auto", trained.mesh)
    assert found, rejected
    load(
        found.folder, found.files, found.state,
        engine=trained.engine, mesh=trained.mesh, layers=layers(trained.config.model),
    )  # fmt: skip
    shapes = {name: tuple(p["shape"]) for name, p in found.state["parameters"].items()}
    wrong = differences(
        trained, {f"{n}|{k}": value_of(n, k, s) for n, s in shapes.items() for k in KINDS}
    )
    said = [] if rank else [run_command(which, found.folder) for which in ("verify", "inspect")]
    trained.mesh.barrier()
    return *wrong, said


def run_command(which, folder):
    sys.argv = ["checkpoint.py", which, str(folder), "--json"]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert command.main() == command.DONE
    return json.loads(out.getvalue())


@pytest.mark.parametrize(
    ("sizes", "limit"),
    [((2, 16, 4), 64), pytest.param((2, 128, 4), 256, marks=pytest.mark.slow)],
    ids=["128 of 64", "1024 of 256"],
)
def test_ranks_load_more_shards_than_they_may_open(sizes, limit, tmp_path, unsynced):
    """Every element of every master and moment is the one that the writers of all ranks had."""
    folder = write(tmp_path / "checkpoints", sizes, Case().config)
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(shards) == sizes[0] * sizes[1] * sizes[2] > limit
    results = run_locally(load_under_a_limit, 2, tmp_path / "checkpoints", limit, tmp_path)
    for wrong, compared, _ in results:
        assert not wrong and compared > 0
    verified, inspected = results[0][2]
    assert verified == {"ok": True, "bad": [], "left_over": []}
    assert [file["file"] for file in inspected["files"] if file["chunks"]] == shards
