"""The start-up self-test passes where the engine is right, and fails loudly where it is not."""

import time
import tomllib
from pathlib import Path

import pytest

from parallel3d.engine import Engine, EngineSettings, quirks
from parallel3d.engine.selftest import KNOWN_GOOD, self_test
from parallel3d.mesh import Mesh
from tests.gloo.parity import Case, compare, train_on_rank
from tests.ranks import RankFailed, run_ranks

MODES = [
    {"zero_stage": stage, "offload_optimizer": offload, "precision": precision,
     "gradient_reduction": reduction}
    for stage, offload, precision, reduction in [
        (1, "none", "fp32", "per_step"), (1, "none", "bf16", "per_microbatch"),
        (1, "cpu", "fp32", "per_microbatch"), (3, "none", "fp32", "per_step"),
        (3, "none", "fp32", "per_microbatch"), (3, "none", "bf16", "per_step"),
        (3, "cpu", "fp32", "per_step"), (3, "cpu", "bf16", "per_microbatch"),
    ]
]  # fmt: skip


def settings_of(mode):
    return EngineSettings(micro_batch_size=1, weight_decay=0.1, **mode)


def run_all(rank, shape):
    mesh, seconds = Mesh(*shape), []
    for mode in MODES:
        start = time.monotonic(), time.process_time()
        self_test(settings_of(mode), mesh)
        seconds.append((time.monotonic() - start[0], time.process_time() - start[1]))
    return seconds


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2, 2), (3, 1, 2)], ids=str)
def test_it_passes_in_every_mode(shape):
    pp, dp, tp = shape
    for mode, (wall, cpu) in zip(MODES, run_ranks(run_all, pp * dp * tp, shape)[0], strict=True):
        print(f"{wall:.2f} s, {cpu:.2f} s of one core: {mode}")


def train_afterwards(rank, case):
    self_test(settings_of({"zero_stage": case.zero_stage}), Mesh(*case.mesh))
    return train_on_rank(rank, case)


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_the_real_engine_is_right_after_it(zero_stage):
    case = Case(mesh=(2, 1, 1), zero_stage=zero_stage, steps=2, batch=8)
    errors = compare(case, run_ranks(train_afterwards, 2, case))
    assert errors.within(1e-5), errors


def overwrite_gradients():
    quirks.start_backward = lambda engine: None


def count_by_deepspeed():
    quirks.count_once = lambda held: None


def divide_by_microbatches():
    quirks.accumulation_steps = lambda: 2
    told = EngineSettings.deepspeed_config

    def config(settings, dp_size):
        config = told(settings, dp_size)
        return config | {"train_batch_size": 2 * config["train_batch_size"]}

    EngineSettings.deepspeed_config = config


def skip_the_step():
    step = Engine.step
    Engine.step = lambda engine, lr: step(engine, 0.0)


def fail(rank, mode, take_away):
    take_away()
    self_test(settings_of(mode), Mesh(2, 1, 1))


@pytest.mark.parametrize(
    ("take_away", "mode", "says"),
    [
        (count_by_deepspeed, {}, "gradient norm, backward from a given loss: .* instead of"),
        (count_by_deepspeed, {"zero_stage": 1}, "gradient norm, backward from a given loss"),
        (divide_by_microbatches, {}, "gradient norm, backward from a given output's gradient"),
        (skip_the_step, {}, "up.weight after the steps: off by"),
        (overwrite_gradients, {"gradient_reduction": "per_microbatch"}, "DeepSpeed"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_it_fails_loudly_without_a_remedy(take_away, mode, says):
    with pytest.raises(RankFailed, match=says) as caught:
        run_ranks(fail, 2, mode, take_away)
    message = str(caught.value)
    assert "TrainingError" in message
    assert "the self-test of DeepSpeed 0." in message
    assert KNOWN_GOOD in message


def test_the_known_good_versions_are_those_that_are_installed():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert f"deepspeed{KNOWN_GOOD}" in project["project"]["dependencies"]
