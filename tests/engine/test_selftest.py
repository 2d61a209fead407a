"""The start-up self-test passes where the engine is right, and fails loudly where it is not."""

import os
import time
import tomllib
from pathlib import Path

import pytest

from parallel3d.engine import Engine, EngineSettings, selftest
from parallel3d.engine.quirks import core, nvme
from parallel3d.engine.selftest import KNOWN_GOOD, self_test
from parallel3d.mesh.mesh import Mesh
from parallel3d.verify.local_ranks import RankFailed, run_locally
from tests.cases import Case, compare_on_rank
from tests.engine.settings import settings_of
from tests.meshes import sizes_of
from tests.verify.measuring import errors_of

pytestmark = pytest.mark.gloo

DECAY = {"weight_decay": 0.1}
MODES = [
    {
        "zero_stage": stage,
        "offload_optimizer": offload,
        "offload_param": param,
        "precision": precision,
        "gradient_reduction": reduction,
    }
    for stage, offload, param, precision, reduction in [
        (0, "none", "none", "fp32", "per_step"),
        (0, "cpu", "none", "fp16", "per_microbatch"),
        (1, "none", "none", "fp32", "per_step"),
        (1, "none", "none", "bf16", "per_microbatch"),
        (1, "cpu", "none", "fp32", "per_microbatch"),
        (1, "none", "none", "bf16", "per_step"),
        (2, "none", "none", "fp16", "auto"),
        (2, "cpu", "none", "bf16", "auto"),
        (3, "none", "none", "fp32", "per_step"),
        (3, "none", "none", "fp32", "per_microbatch"),
        (3, "none", "none", "bf16", "per_step"),
        (3, "cpu", "none", "fp16", "per_step"),
        (3, "cpu", "none", "bf16", "per_microbatch"),
        (3, "none", "cpu", "fp32", "per_step"),
        (3, "cpu", "cpu", "fp16", "per_microbatch"),
        (3, "nvme", "none", "fp32", "per_step"),
        (3, "nvme", "nvme", "bf16", "per_microbatch"),
        (3, "none", "nvme", "fp16", "per_step"),
    ]
] + [
    {"zero_stage": 3, "precision": "fp32", "weights": weights, "offload_param": param}
    for weights in ("per_step", "per_pass")
    for param in ("none", "nvme")
]


def run_all(rank, shape, modes, folder):
    mesh = Mesh(**sizes_of(shape)._asdict())
    seconds = []
    for mode in modes:
        start = time.monotonic(), time.process_time()
        self_test(settings_of(params=DECAY, folder=folder, **mode), mesh)
        seconds.append((time.monotonic() - start[0], time.process_time() - start[1]))
    return seconds


# Each stage, each place of optimizer and parameters, and each precision.
FEW = [MODES[number] for number in (1, 5, 7, 8, 14, 16, 18)]


@pytest.mark.usefixtures("cpu_adam", "operators")
@pytest.mark.parametrize(
    ("shape", "nvme", "chosen"),
    [
        ((2, 1, 1), "", FEW),
        ((2, 1, 1), "nvme", FEW),
        *(
            pytest.param(shape, nvme, MODES, marks=pytest.mark.slow)
            for shape in [(1, 1, 1), (2, 1, 1), (2, 2, 2), (3, 1, 1)]
            for nvme in ("", "nvme")
        ),
    ],
    ids=lambda value: f"{len(value)} modes" if value in (FEW, MODES) else str(value),
)
def test_self_test_passes_in_every_mode(shape, nvme, chosen, tmp_path):
    pp, dp, tp = shape
    modes = [mode for mode in chosen if ("nvme" in mode.values()) == bool(nvme)]
    seconds = run_locally(run_all, pp * dp * tp, shape, modes, str(tmp_path))[0]
    for mode, (wall, cpu) in zip(modes, seconds, strict=True):
        print(f"{wall:.2f} s, {cpu:.2f} s of one core: {mode}")
    assert os.listdir(tmp_path) == []  # nothing is left on disk


def train_afterwards(rank, case, reference):
    self_test(
        settings_of(params=DECAY, zero_stage=case.zero_stage), Mesh(**sizes_of(case.mesh)._asdict())
    )
    return compare_on_rank(rank, case, reference)


@pytest.mark.slow  # tests/train/test_trainer.py trains after it by default, under ZeRO-3
@pytest.mark.parametrize("zero_stage", [1, 3])
def test_engine_is_right_after_the_self_test(zero_stage):
    case = Case(mesh=(2, 1, 1), zero_stage=zero_stage, steps=2, batch=8)
    errors = errors_of(case.config, run_locally(train_afterwards, 2, case, case.reference))
    assert errors.within(1e-5), errors


def nothing(*_):
    """Stand in for a remedy."""


def overwrite_gradients():
    core.start_backward = nothing


def count_by_deepspeed():
    core.count_once = nothing


def divide_by_microbatches():
    deepspeed_config = EngineSettings.deepspeed_config

    def config(settings, *sizes):
        config = deepspeed_config(settings, *sizes)
        size = {"train_batch_size": 2 * config["train_batch_size"]}
        return config | size | {"gradient_accumulation_steps": 2}

    EngineSettings.deepspeed_config = config


def skip_the_step():
    step = Engine.step

    def step_nowhere(engine, lr):
        return step(engine, 0.0)

    Engine.step = step_nowhere


def leave_gradients_unaligned():
    nvme.align_gradients = nothing


def fail(rank, mode, take_away, folder):
    take_away()
    self_test(settings_of(params=DECAY, folder=folder, **mode), Mesh(pp=2))


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize(
    ("take_away", "mode", "expected"),
    [
        (count_by_deepspeed, {}, "gradient norm, backward from a loss: off by"),
        pytest.param(
            count_by_deepspeed,
            {"zero_stage": 1},
            "gradient norm, backward from a loss",
            marks=pytest.mark.slow,
        ),
        (divide_by_microbatches, {}, "gradient norm, backward from an output gradient"),
        (skip_the_step, {}, "up.weight after the steps: off by"),
        (leave_gradients_unaligned, {"offload_optimizer": "nvme"}, "after the steps: off by"),
        (overwrite_gradients, {"gradient_reduction": "per_microbatch"}, "DeepSpeed"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_self_test_fails_without_a_remedy(take_away, mode, expected, tmp_path):
    with pytest.raises(RankFailed, match=expected) as caught:
        run_locally(fail, 2, mode, take_away, str(tmp_path))
    message = str(caught.value)
    assert "TrainingError" in message
    assert "the self-test of DeepSpeed 0." in message
    assert KNOWN_GOOD in message


def test_remedy_of_a_failed_self_test_is_another_version(monkeypatch):
    """Where the version that is known to be correct is installed, the others are."""
    settings = settings_of()
    for version, is_other in (("0.19.8", False), ("0.19.8+cu13", False), ("0.19.9", True)):
        monkeypatch.setattr(selftest.deepspeed, "__version__", version)
        message = selftest._message(settings, "differ", "none")
        assert ("pip install 'deepspeed==0.19.8'" in message) == is_other
        assert ("constraints.txt: install those" in message) != is_other
    constraints = (Path(__file__).parents[2] / "constraints.txt").read_text().splitlines()
    assert f"deepspeed{KNOWN_GOOD}" in constraints
    assert any(line.startswith("torch==") for line in constraints)


def test_known_good_versions_match_the_requirements():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert f"deepspeed{KNOWN_GOOD}" in project["project"]["dependencies"]
