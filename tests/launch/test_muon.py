"""The commands with Muon: it is planned, verified and trained, and goes on on another mesh."""

import numpy as np
import pytest

from tests.engine.test_add_an_optimizer import tensors
from tests.launch.launching import Place, torchrun
from tests.verify.configs import MUON, config_of

pytestmark = [pytest.mark.drill, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.usefixtures("cpu_adam")
def test_muon_is_trained_planned_verified_and_resumed_on_another_mesh(tmp_path):
    place = Place(tmp_path / "place")
    raw = config_of(schedule="one_f_one_b", microbatches=2, offload="cpu", optimizer=MUON)
    place.assert_optimizer_is_known(raw, "2x2x1,1x1x2")
    outcome = place.run(torchrun(4), "--parallel3d.run.name", "whole", steps=4)
    assert outcome.returncode == 0, outcome.stderr
    changes = {
        "parallel3d.run.name": "moved",
        "parallel3d.mesh.pp": 1,
        "parallel3d.mesh.tp": 2,
        "zero_optimization.stage": 1,
        "zero_optimization.offload_optimizer.device": "none",
        "parallel3d.checkpoint.resume": "runs/whole/checkpoints/step-2",
    }
    pairs = [str(x) for name, value in changes.items() for x in (f"--{name}", value)]
    outcome = place.run(torchrun(4), *pairs, steps=4)
    assert outcome.returncode == 0, outcome.stderr
    whole, moved = (
        tensors(place.root / f"runs/{name}/checkpoints/step-4") for name in ("whole", "moved")
    )
    assert whole.keys() == moved.keys()
    for key, values in whole.items():
        assert np.abs(values - moved[key]).max() < 1e-5, key
    kept = {name: {kind for n, kind in whole if n == name} for name, _ in whole}
    for name, kinds in kept.items():
        matrix = name.startswith("blocks") and whole[name, "master"].ndim > 1 and "bias" not in name
        own = {"momentum_buffer"} if matrix else {"exp_avg", "exp_avg_sq"}
        assert kinds == {"master", *own}, name
    assert "momentum_buffer" in place.call("checkpoint", "inspect", "runs/whole")
    place.call("checkpoint", "verify", "runs/moved")
