"""A step trained again on any mesh: the same, or the first tensor that differs is named."""

import json
import os
import shutil
from contextlib import contextmanager
from math import prod

import pytest
from rich.console import Console

from parallel3d.base.errors import CheckpointError
from parallel3d.extras.guard import replay as replaying
from parallel3d.mesh.mesh import Mesh
from parallel3d.train.ending import DONE
from parallel3d.verify.local_ranks import run_locally
from tests.checkpoint.drill import changed, prepared_config
from tests.meshes import sizes_of
from tests.train.running import folder_of, start

pytestmark = [pytest.mark.gloo, pytest.mark.usefixtures("cpu_adam")]

# of the whole batch, 2 samples each
STEP = 3
MICROBATCHES = 2


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of four steps on 1x2x1, with checkpoints of the steps 1, 3 and 4."""
    raw = prepared_config(tmp_path_factory.mktemp("replay"))
    settings = {f"parallel3d.model.{n}_pdrop": 0.0 for n in ("embd", "resid", "attn")}
    settings |= {"parallel3d.pipeline.activation_checkpointing": "none"}
    settings |= {"train_batch_size": 2 * MICROBATCHES, "parallel3d.run.name": "run"}
    settings |= {"parallel3d.checkpoint.at": [1, 3], "parallel3d.train.digest_every": 1}
    settings |= {"parallel3d.train.steps": STEP + 1, "parallel3d.checkpoint.every": 0}
    raw = changed(raw, settings)
    del raw["gradient_accumulation_steps"]
    assert [ended.code for ended in start(raw, (1, 2, 1))] == [DONE] * 2
    return folder_of(raw)


@contextmanager
def planted(kind, name, microbatch):
    """One layer's output, or the gradient of it, is off by 1 % in one microbatch of the step."""
    build = replaying.assemble

    def assemble(*args, **options):
        parts = build(*args, **options)
        key = parts.stages.key
        stages = parts.stages
        own = {
            parts.layers[index].name: layer
            for stage, layers in stages.module.layers.items()
            for index, layer in zip(stages.layers_of_stage[stage], layers, strict=True)
        }

        def spoil(_, __, output):
            if (key.step, key.microbatch) != (STEP - 1, microbatch):
                return output
            if kind == "output":
                return output * 1.01
            output.register_hook(lambda gradient: gradient * 1.01)
            return output

        if name in own:
            own[name].register_forward_hook(spoil)
        return parts

    replaying.assemble = assemble
    try:
        yield
    finally:
        replaying.assemble = build


def replay_on_rank(rank, run, sizes, faults=(), alone=False):
    """What replays say: a clean one, then one for each fault, which forgets the one before.

    `alone`: no replay on another mesh is compared, but the one before.
    """
    config, checkpoint = replaying.replay_config(run, STEP, sizes_of(sizes), [])
    config = config.resolve(int(os.environ["WORLD_SIZE"]))
    mesh = Mesh(**sizes_of(sizes)._asdict())
    console = Console(quiet=True)
    reports = [replaying.replay(config, mesh, run, checkpoint, console)]
    for fault in faults:
        name = "x".join(map(str, sizes))
        if rank == 0 and not alone:
            (run / "replays" / name / f"step-{STEP}.json").unlink()
        with planted(*fault):
            reports.append(replaying.replay(config, mesh, run, checkpoint, console))
    return reports


def test_replay_has_same_bits_on_same_mesh_and_names_a_fault_on_another(run):
    layer = "blocks.0"
    (again,), other_rank = run_locally(replay_on_rank, 2, run, (1, 2, 1))
    assert [again] == other_rank
    assert again["same"] and again["bound"] == 0 and again["first_tensor"] is None
    assert (again["steps"], again["digests"]) == (2, 2)  # after the checkpoint of step 1
    trace = json.loads((run / "replays/1x2x1/step-3.json").read_text())
    assert len(trace) == 2 * MICROBATCHES * 4
    ((clean, report),) = run_locally(replay_on_rank, 1, run, (1, 1, 1), [("gradient", layer, 1)])
    assert clean["same"] and clean["bound"] == 1e-4 and clean["digests"] == 0
    first = report["first_tensor"]
    assert not report["same"]
    assert (first["tensor"], first["layer"]) == ("gradient", layer)
    assert (first["stage"], first["microbatch"], first["replay"]) == (0, 1, "1x2x1")
    ours, theirs = first["norms"]
    assert ours / theirs == pytest.approx(1.01, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 1, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2)], ids=str)
def test_other_meshes(run, sizes):
    """Dividing a gradient by dp lets replays with unlike dp agree; a fault is named again."""
    shutil.rmtree(run / "replays", ignore_errors=True)
    run_locally(replay_on_rank, 1, run, (1, 1, 1))
    faults = [("output", "blocks.1", 0)]
    for clean, wrong in run_locally(replay_on_rank, prod(sizes), run, sizes, faults, True):
        assert clean["same"] and clean["bound"] == 1e-4
        first = wrong["first_tensor"]
        assert not wrong["same"] and (first["layer"], first["tensor"]) == ("blocks.1", "output")
        assert first["stage"] == sizes[0] - 1


def test_other_steps_are_refused(run):
    with pytest.raises(CheckpointError, match=r"--step 1: .* has no checkpoint before it"):
        replaying.replay_config(run, 1, None, [])
    with pytest.raises(CheckpointError, match=r"--step 9: .* has 4 steps"):
        replaying.replay_config(run, 9, None, [])
