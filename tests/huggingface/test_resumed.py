"""One trained checkpoint, resumed anywhere and saved without a step: everywhere the same bytes."""

from itertools import product

import pytest

from parallel3d.checkpoint import resume
from parallel3d.checkpoint.load import load
from parallel3d.checkpoint.save import Saver
from parallel3d.data.sources import silent
from parallel3d.huggingface.card import About
from parallel3d.huggingface.conversion import export
from parallel3d.huggingface.from_ranks import save_weights
from parallel3d.huggingface.source import CheckpointSource
from parallel3d.huggingface.weight_files import INDEX, WeightFiles
from parallel3d.models import layers
from parallel3d.verify.local_ranks import run_locally
from tests.checkpoint.resharding import STEPS, Side, Trained, state

pytestmark = [pytest.mark.gloo, pytest.mark.slow]

SHARDS = 20_000  # bytes of one
TRAINED = Side((1, 2, 1), 3)
RESUMED = [Side(mesh, zero) for mesh, zero in product(
    [(1, 1, 1), (2, 2, 2), (1, 1, 4), (4, 1, 1)], [1, 3]
)]  # fmt: skip


def train_on_rank(rank, root):
    trained = Trained(TRAINED, root)
    trained.train()
    config = trained.config
    saver = Saver(
        trained.engine, trained.mesh, layers(config.model), folder=root, asynchronous=False
    )
    saver.save(state(STEPS) | {"config": config.to_dict()})
    saver.require_saved()
    trained.mesh.barrier()


def save_on_rank(rank, sides, root):
    for side in sides:
        trained = Trained(side, root)
        found, _ = resume.find(root, str(root / f"step-{STEPS}"), trained.mesh)
        load(
            found.folder, found.files, found.state,
            engine=trained.engine, mesh=trained.mesh, layers=layers(trained.config.model),
        )  # fmt: skip
        run = root / str(side)
        save_weights(trained.engine, trained.mesh, run, config=trained.config, shard_bytes=SHARDS)
        trained.mesh.barrier()
        trained.engine.close()


def test_a_checkpoint_resumed_on_any_mesh_leaves_the_bytes_of_its_export(tmp_path):
    run_locally(train_on_rank, TRAINED.world_size, tmp_path, timeout=200)
    source = CheckpointSource(tmp_path / f"step-{STEPS}")
    layout = WeightFiles(source.config.model, shard_bytes=SHARDS)
    about = About(source.config, STEPS, 0)
    assert export(source, about, layout, tmp_path / "out", silent).ok
    wanted = {n: (tmp_path / "out" / n).read_bytes() for n in ("config.json", INDEX, *layout.files)}
    assert len(layout.files) > 2
    for size in (1, 4, 8):
        sides = [side for side in RESUMED if side.world_size == size]
        run_locally(save_on_rank, size, sides, tmp_path, timeout=200)
    for side in RESUMED:
        weights = tmp_path / str(side) / "weights"
        found = {name: (weights / name).read_bytes() for name in wanted}
        assert {n for n in wanted if found[n] != wanted[n]} == set(), side
        assert {path.name for path in weights.iterdir()} - wanted.keys() == {
            "README.md", "generation_config.json",
        }, side  # fmt: skip
