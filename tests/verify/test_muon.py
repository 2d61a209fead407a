"""Muon on a mesh equals Muon in one process of plain transformers, whatever cuts its matrices."""

from dataclasses import replace
from functools import cache
from itertools import product
from math import prod

import pytest

from parallel3d.config import RunConfig
from parallel3d.schedule import schedules
from parallel3d.verify.case import CaseTask, checked
from parallel3d.verify.measure import TOLERANCE
from parallel3d.verify.reference import prepare
from tests.meshes import sizes_of
from tests.verify.configs import MUON, config_of

pytestmark = [pytest.mark.gloo, pytest.mark.usefixtures("cpu_adam")]

FULL = [(2, 2, 2), (4, 1, 1), (1, 4, 1), (1, 1, 4), (2, 1, 2)]
BY_DEFAULT = [(1, 1, 2), (1, 2, 1), (2, 1, 1), (1, 2, 2)]  # with fewer microbatches
TWO_AXES = [(2, 2, 1), (2, 1, 2)]  # with fewer samples and layers than FULL needs
STAGES = {
    name: next(n for n in (2, 1, 3) if schedules.why_not(name, 2, 4, n) is None)
    for name in schedules.names()
}
MODELS = ["gpt", "gpt untied", "llama", "llama untied"]
MUP = {"type": "mup", "base_width": 16, "base_depth": 2}
OTHER = {
    "scale": "match_rms_adamw",
    "coefficients": "polar_express",
    "per_head": True,
    "nesterov": False,
    "momentum": 0.9,
    "adam_weight_decay": 0.05,
    "muon_lr": 0.02,
    "clip": "adam_only",
}


def raw_config(params=None, **settings):
    """A config with Muon that clips, as a user could write it."""
    muon = MUON | {"params": MUON["params"] | (params or {})}
    return config_of(optimizer=muon, **settings) | {"gradient_clipping": 1.0}


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """A small config, and the reference that all meshes of a model and an optimizer share."""

    @cache
    def train(model, params, meshes, microbatches):
        name = model.removesuffix(" mup")
        raw = raw_config(dict(params), model=name, microbatches=microbatches)
        if model.endswith(" mup"):
            raw["parallel3d"]["model"]["parametrization"] = MUP
        return prepare(RunConfig.from_dict(raw), meshes, tmp_path_factory.mktemp("reference"))

    def of(mesh, model, zero, offload="none", params=None, **settings):
        group = next(meshes for meshes in (BY_DEFAULT, TWO_AXES, FULL) if mesh in meshes)
        meshes = tuple(map(sizes_of, group))
        microbatches = 2 if group is BY_DEFAULT else 4
        small, reference = train(model, tuple((params or {}).items()), meshes, microbatches)
        raw = small[sizes_of(mesh)].to_dict()
        raw["zero_optimization"] |= {"stage": zero, "offload_optimizer": {"device": offload}}
        for name, value in settings.items():
            block, _, key = name.partition("_")
            raw["parallel3d"][block][key] = value
        config = RunConfig.from_dict(raw).resolve(prod(mesh)).completed()
        return config, replace(reference, schedule=None)

    return of


def errors_of(case, **task):
    errors, _ = checked(*case, CaseTask(**task), timeout=200)
    print(errors, errors.evaluation)
    return errors


# What cuts a matrix, and what differs by it: dp at each ZeRO stage, tp by rows and by columns, key
# and value heads that several tp ranks hold, a stage that holds no matrix, and muP's rates.
FEW = [
    ((1, 2, 2), "gpt", 0, "none", {}, {}),
    ((2, 1, 1), "llama untied mup", 2, "cpu", OTHER, {}),
    ((2, 1, 2), "llama untied mup", 2, "cpu", OTHER, {}),
    # Experts, and a router, which is AdamW's: by default in tests/pipeline/test_experts.py.
    ((1, 2, 2), "moe", 1, "none", {}, {}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "model", "zero", "offload", "params", "settings"), FEW)
def test_interacting_settings(mesh, model, zero, offload, params, settings, case):
    errors = errors_of(case(mesh, model, zero, offload, params, **settings))
    assert errors.within(TOLERANCE["fp32"]), errors


def test_muon_resumes_on_another_mesh(case, tmp_path):
    """With tp, dp and muP, then on stages with the optimizer on the host."""
    model = "llama untied mup"
    saved = case((1, 2, 2), model, 1, params=OTHER, mesh_sequence_parallel=True)
    assert errors_of(saved, saves=tmp_path).within(TOLERANCE["fp32"])
    resumed = case((2, 1, 1), model, 2, "cpu", params=OTHER)
    assert errors_of(resumed, resumes=tmp_path).within(TOLERANCE["fp32"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "resumed"), [((1, 1, 2), (1, 2, 1)), ((2, 1, 2), (2, 2, 1))], ids=str
)
def test_muon_resumes_on_other_axes(saved, resumed, case, tmp_path):
    assert errors_of(case(saved, "gpt", 1), saves=tmp_path).within(1e-5)
    assert errors_of(case(resumed, "gpt", 3, "cpu"), resumes=tmp_path).within(1e-5)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("mesh", FULL, ids=lambda mesh: "x".join(map(str, mesh)))
def test_every_stage_and_offload(mesh, model, case):
    errors = {
        (zero, offload, bool(params)): errors_of(case(mesh, model, zero, offload, params))
        for zero, offload, params in product(range(4), ("none", "cpu"), ({}, OTHER))
    }
    assert not {k: e for k, e in errors.items() if not e.within(TOLERANCE["fp32"])}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(2, 2, 1), (1, 2, 2)], ids=str)
def test_mup_with_the_spectral_scale(mesh, case):
    errors = errors_of(case(mesh, "gpt mup", 3, params={"scale": "spectral"}))
    assert errors.within(TOLERANCE["fp32"]), errors


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("schedule", STAGES)
def test_every_schedule(schedule, case):
    changed = {"pipeline_schedule": schedule, "pipeline_stages_per_rank": STAGES[schedule]}
    errors = errors_of(case((2, 2, 1), "gpt", 1, **changed))
    assert errors.within(TOLERANCE["fp32"]), errors
