"""docs/add-an-optimizer.md: one file, and no other is edited."""

import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file

from parallel3d.base.mesh_sizes import MeshSizes
from parallel3d.config import RunConfig
from parallel3d.verify.case import CaseTask, check
from parallel3d.verify.local_ranks import run_locally
from parallel3d.verify.measure import worst
from parallel3d.verify.reference import prepare
from tests.launch.launching import Place, torchrun
from tests.own_optimizers import SGD, scratch
from tests.verify.configs import config_of

pytestmark = pytest.mark.gloo

TYPE = {"type": "SGD", "params": {"lr": 0.05, "weight_decay": 0.01}}


def raw_config(folder, **settings):
    raw = config_of(schedule="one_f_one_b", microbatches=2, **settings)
    raw["parallel3d"]["run"] = {"optimizer_folders": [folder]}
    return raw | {"optimizer": TYPE}


def on_rank(rank, raw, size, reference, task):
    """Compare as `verify` does; the server of these processes does not know the scratch folder."""
    config = RunConfig.from_dict(raw).resolve(size).completed()
    return check(rank, config, reference, task)


def errors_of(config, reference, **task):
    """The largest difference of loss, gradient norm and weights from plain PyTorch."""
    size = config.mesh.pp * config.mesh.dp * config.mesh.tp
    reference = replace(reference, schedule=None)
    ranks = run_locally(on_rank, size, config.to_dict(), size, reference, CaseTask(**task))
    return max(worst((r.loss, r.grad_norm, r.weights.largest)) for r in ranks)


def test_optimizer_of_the_page_trains_like_pytorch_and_resumes(tmp_path):
    run_locally(abs, 1)  # so that the server that forks ranks does not inherit the scratch folder
    with scratch(tmp_path / "mine") as folder:
        config = RunConfig.from_dict(raw_config(folder))
        replicas = MeshSizes(dp=2)
        stages = MeshSizes(pp=2)
        small, reference = prepare(config, [replicas, stages], tmp_path)
        assert small[replicas].optimizer.type == "sgd"
        saved = errors_of(small[replicas], reference, saves=tmp_path / "saved")
        resumed = errors_of(small[stages], reference, resumes=tmp_path / "saved")
    assert saved < 1e-5 and resumed < 1e-5, (saved, resumed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("momentum=params.momentum)", "momentum=params.momentum * 0.99)"),
        ("SGD(groups, lr", "SGD([g | {'weight_decay': 0.0} for g in groups], lr"),
    ],
)
def test_verify_detects_a_mistake_in_the_optimizer(tmp_path, right, wrong):
    assert right in SGD
    with scratch(tmp_path / "mine", sgd=SGD.replace(right, wrong, 1)) as folder:
        config = RunConfig.from_dict(raw_config(folder))
        alone = MeshSizes()
        small, reference = prepare(config, [alone], tmp_path)
        assert errors_of(small[alone], reference) > 3e-5


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("offload", ["none", "cpu", "nvme"])
def test_commands_accept_the_optimizer(tmp_path, offload):
    """It is planned and verified; it trains on 2x2x1, and its checkpoint goes on on 1x1x2."""
    place = Place(tmp_path / "place")
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "sgd.py").write_text(SGD)
    raw = raw_config(str(mine))
    where = {"device": offload} | ({"nvme_path": str(tmp_path)} if offload == "nvme" else {})
    raw["zero_optimization"]["offload_optimizer"] = where
    place.assert_optimizer_is_known(raw, "2x2x1")
    outcome = place.run(torchrun(4), "--parallel3d.run.name", "whole", steps=4)
    assert outcome.returncode == 0, outcome.stderr
    moved = {"run.name": "moved", "mesh.pp": 1, "mesh.dp": 1, "mesh.tp": 2}
    moved |= {"checkpoint.resume": "runs/whole/checkpoints/step-2"}
    pairs = [x for name, value in moved.items() for x in (f"--parallel3d.{name}", value)]
    pairs += ["--gradient_accumulation_steps", 4]
    outcome = place.run(torchrun(2), *pairs, steps=4)
    assert outcome.returncode == 0, outcome.stderr
    whole = tensors(place.root / "runs/whole/checkpoints/step-4")
    resumed = tensors(place.root / "runs/moved/checkpoints/step-4")
    assert {kind for _, kind in whole} == {"master", "momentum_buffer"}
    assert whole.keys() == resumed.keys()
    for key, values in whole.items():
        assert np.abs(values - resumed[key]).max() < 1e-5, key
    assert "momentum_buffer" in place.call("checkpoint", "inspect", "runs/whole")
    place.call("checkpoint", "verify", "runs/moved")
    adam = json.dumps({"type": "AdamW", "params": {"lr": 0.05}})
    outcome = place.run(torchrun(2), *pairs, "--parallel3d.run.name", "adam", "--optimizer", adam)
    assert outcome.returncode != 0
    assert outcome.stderr.count('optimizer.type was "sgd" and is now "adamw"') == 1, outcome.stderr


def tensors(folder):
    """All values of a checkpoint by parameter and kind, in the order of their places."""
    chunks = {}
    for file in folder.glob("*.safetensors"):
        for key, values in load_file(file).items():
            name, kind, offsets = key.split("|")
            place = [int(offset) for offset in offsets.split(",") if offset]
            chunks.setdefault((name, kind), []).append((place, values))
    whole = {}
    for key, parts in chunks.items():
        stops = [np.add(place, values.shape) for place, values in parts]
        whole[key] = np.full(np.max(stops, axis=0), np.nan)
        for (place, values), stop in zip(parts, stops, strict=True):
            whole[key][tuple(map(slice, place, stop))] = values
    return whole
