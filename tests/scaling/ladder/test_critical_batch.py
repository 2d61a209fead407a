"""Forks of a run with several batches: what each trains on, and the curve through their losses."""

import argparse
import json
from math import inf

import numpy as np
import pytest

from parallel3d.base.errors import ConfigError
from parallel3d.config import RunConfig
from parallel3d.config.learning_rate import rate
from parallel3d.extras.scaling.ladder.critical_batch import fit, forks_of
from tests.config.configs import raw

pytestmark = pytest.mark.pure

SIZES = [1024 * 2**power for power in range(7)]
TRAIN = "parallel3d.train"


def loss(tokens, half):
    return 2 + 0.2 * tokens / (tokens + half)


def test_curve_is_recovered_within_its_interval():
    random = np.random.default_rng(1)
    held = 0
    true = next(n for n in range(1024, 10**5) if loss(n, 4e4) > loss(1024, 4e4) + 0.01)
    for _ in range(25):
        noise = 0.002 * random.normal(size=len(SIZES))
        low, high = fit(SIZES, loss(np.array(SIZES), 4e4) + noise, 0.01).interval
        held += low <= true <= high
    assert held >= 22  # 95 % of 25 are 23.75
    exact = fit(SIZES, list(loss(np.array(SIZES), 4e4)), 0.01)
    assert exact.critical_batch_tokens == pytest.approx(true, rel=0.02)
    assert exact.loss(np.array(SIZES)) == pytest.approx(loss(np.array(SIZES), 4e4), abs=1e-4)


def test_equally_good_batches_have_no_bound():
    flat = fit(SIZES, [2.0, 2.001, 1.999, 2.0, 2.001, 1.999, 2.0], 0.01)
    assert flat.critical_batch_tokens > SIZES[-1] and flat.interval[1] == inf
    assert "above the largest batch, 65,536 (95 %:" in str(flat) and "no bound" in str(flat)


@pytest.fixture
def run(tmp_path):
    """A run of 100 steps of 8 samples, with a checkpoint where the rate is half the peak."""
    folder = tmp_path / "run"
    settings = {f"{TRAIN}.steps": 200, "optimizer.type": "Muon", "optimizer.params.adam_lr": 0.01}
    settings[f"{TRAIN}.lr_schedule"] = {"type": "linear", "min_ratio": 0.0}
    settings |= {"parallel3d.mesh": {"pp": 1, "dp": 2, "tp": 1}}
    config = raw(**settings, train_batch_size=8, train_micro_batch_size_per_gpu=4)
    config.pop("gradient_accumulation_steps", None)
    config = RunConfig.from_dict(config).resolve(2).with_vocab_size(300)
    start = folder / "checkpoints/step-100"
    start.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    (start / "manifest.json").write_text("{}")
    (start / "state.json").write_text(json.dumps({"next_sample": 800}))
    return folder


def args(run, **changes):
    flags = {"run": run, "step": None, "batches": [4, 8, 16, 32], "tokens": None}
    flags |= {"batch_lr": "sqrt", "tolerance": 0.01, "parallel": 1}
    return argparse.Namespace(**flags | changes)


def test_forks_train_on_the_same_samples_at_scaled_rates(run):
    forks = [rung.run for rung in forks_of(args(run)).rungs]
    config = forks[0].config
    assert {fork.config.samples_of_steps(fork.steps) for fork in forks} == {800 + 8 * 32}
    assert [fork.steps - 100 for fork in forks] == [64, 32, 16, 8]
    own = json.loads((run / "config.json").read_text())["optimizer"]["params"]
    for fork, size in zip(forks, (4, 8, 16, 32), strict=True):
        assert fork.config.batch_size_at(800) == size and fork.config.batch_size_at(0) == 8
        expected = own["lr"] / 2 * (size / 8) ** 0.5
        assert rate(fork.config, 100, 800) == rate(fork.config, fork.steps - 1, 1000)
        assert rate(fork.config, 100, 800) == pytest.approx(expected)
        assert fork.config.optimizer.params.adam_lr == pytest.approx(own["adam_lr"] / 2)
    assert config.checkpoint.resume == str(run / "checkpoints/step-100")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batches": [8, 16]}, "name 4 or more multiples of dp=2"),
        ({"batches": [3, 8, 16, 32]}, "name 4 or more multiples of dp=2"),
        ({"step": 50}, "--step 50: is no checkpoint of"),
    ],
)
def test_impossible_measurement_is_refused(changes, words, run):
    with pytest.raises(ConfigError, match=words):
        forks_of(args(run, **changes))


def test_skipped_samples_are_refused(run):
    state = run / "checkpoints/step-100/state.json"
    state.write_text(state.read_text().replace("800", "808"))
    with pytest.raises(ConfigError, match="left out samples before step 100"):
        forks_of(args(run))
