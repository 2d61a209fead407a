"""What DeepSpeed does while it starts and builds, and that each remedy is needed."""

from importlib import import_module
from unittest.mock import patch

import pytest
import torch

from parallel3d.engine import construction
from parallel3d.engine.quirks import core
from parallel3d.mesh.mesh import Mesh
from parallel3d.pipeline import stages
from parallel3d.verify.local_ranks import run_locally
from tests.cases import Case, Trainer, unpatched
from tests.config.test_config import error_of
from tests.engine.settings import settings_of

pytestmark = pytest.mark.gloo


def default_decays(rank):
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    core.read_cpu_info_from_proc()
    weight = torch.nn.Parameter(torch.ones(1))
    optimizers = (torch.optim.AdamW, DeepSpeedCPUAdam)
    return [make([weight]).defaults["weight_decay"] for make in optimizers]


def test_default_weight_decay_depends_on_the_optimizer():
    [[torch_decay, deepspeed_decay]] = run_locally(default_decays, 1)
    assert torch_decay != deepspeed_decay


def accepted_by_deepspeed(rank):
    from deepspeed.runtime.config import DeepSpeedConfig

    Mesh()
    batch = {"train_batch_size": 1}
    misspelt = DeepSpeedConfig(batch | {"zero_optimisation": {"stage": 3}})
    auto = DeepSpeedConfig(batch | {"bf16": {"enabled": "auto"}})
    return misspelt.zero_optimization_stage, auto.bfloat16_config.enabled


def test_deepspeed_accepts_settings_that_our_schema_refuses():
    [[stage, bf16]] = run_locally(accepted_by_deepspeed, 1)
    assert stage == 0  # asked for 3
    assert bf16 is not True
    assert "zero_optimization" in error_of(zero_optimisation={"stage": 3})
    assert "bf16.enabled" in error_of(**{"bf16.enabled": "maybe"})


def compiled_at_start(rank, skip):
    """Return the operators that an engine's start builds, and if DeepSpeed's Muon is compiled."""
    built = []

    def build():
        built.append("shm")

    def nothing():
        pass

    import_module("deepspeed.comm.torch").build_shm_op = build
    if not skip:
        core.skip_shared_memory_operator = nothing
        core.leave_muon_uncompiled = nothing
    Trainer(Case(steps=1, batch=4, model={"num_hidden_layers": 1}))
    muon = import_module("deepspeed.runtime.zero.muon.original_muon")
    return built, hasattr(muon.muon_update, "_torchdynamo_orig_callable")


def test_shared_memory_operator_and_muon_are_not_compiled():
    assert run_locally(compiled_at_start, 1, True) == [([], False)]


@unpatched
def test_shared_memory_operator_and_muon_are_compiled_without_the_remedies():
    assert run_locally(compiled_at_start, 1, False) == [(["shm"], True)]


def built_whole(rank, cut_at_once):
    def plain_building(settings, mesh):
        return construction.plain_building(settings.dtype, mesh.device)

    if not cut_at_once:
        stages.building = plain_building
    made = stages.build_layer
    seen = []

    def make(layer, context):
        seen.append(made(layer, context))
        return seen[-1]

    stages.build_layer = make
    fill = stages.fill
    alive = []

    def look(*args):
        weights = [p for m in seen for p in m.parameters()]
        alive.append(sum(p.data.numel() + _shard_numel(p) for p in weights))
        fill(*args)

    stages.fill = look
    trainer = Trainer(Case(mesh=(1, 2, 1), tied=False, steps=1, batch=8))
    return max(alive) / sum(h.parameter.ds_numel for h in trainer.engine.held)


def _shard_numel(parameter):
    # What is released keeps a placeholder of one element.
    return parameter.ds_tensor.numel() - 1 if hasattr(parameter, "ds_tensor") else 0


@unpatched
def test_stage_exists_whole_during_building_without_zero_init():
    with_init, _ = run_locally(built_whole, 2, True)
    without, _ = run_locally(built_whole, 2, False)
    assert with_init == pytest.approx(0.5, rel=0.02)
    assert without == 1


def dtype_made(rank, dtype):
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    def without_fp16(*_):
        return False  # some CPUs have it

    get_accelerator().is_fp16_supported = without_fp16
    settings = settings_of()
    mesh = Mesh()
    with construction.building(settings, mesh):
        pass  # starts DeepSpeed
    config = settings.deepspeed_config(1)
    accelerator = type(deepspeed.get_accelerator())
    with (
        patch.object(accelerator, "is_fp16_supported", without_fp16),
        deepspeed.zero.Init(config_dict_or_path=config, dtype=dtype),
    ):
        return str(torch.nn.Linear(2, 2).weight.dtype)


def test_explicit_fp32_makes_bf16_parameters_without_fp16_support():
    assert run_locally(dtype_made, 1, None) == ["torch.float32"]
    assert run_locally(dtype_made, 1, torch.float32) == ["torch.bfloat16"]
