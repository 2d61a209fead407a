"""What DeepSpeed does while it starts and builds, and that each remedy is needed."""

import inspect
from importlib import import_module
from unittest.mock import patch

import pytest
import torch

from parallel3d.engine import EngineSettings, construction
from parallel3d.engine.quirks import core
from parallel3d.mesh.mesh import Mesh
from parallel3d.pipeline import stages
from parallel3d.verify.local_ranks import run_locally
from tests.cases import Case, Trainer, unpatched
from tests.config.test_config import error_of

pytestmark = pytest.mark.gloo


def default_decays(rank):
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    core.read_cpu_info_from_proc()
    weight = torch.nn.Parameter(torch.ones(1))
    return [
        make([weight]).defaults["weight_decay"] for make in (torch.optim.AdamW, DeepSpeedCPUAdam)
    ]


def test_the_default_weight_decay_depends_on_the_optimizer():
    [[torch_decay, deepspeed_decay]] = run_locally(default_decays, 1)
    assert torch_decay != deepspeed_decay
    assert "weight_decay" in inspect.getsource(core.param_groups)


def what_deepspeed_accepts(rank):
    from deepspeed.runtime.config import DeepSpeedConfig

    Mesh()
    batch = {"train_batch_size": 1}
    misspelt = DeepSpeedConfig(batch | {"zero_optimisation": {"stage": 3}})
    auto = DeepSpeedConfig(batch | {"bf16": {"enabled": "auto"}})
    return misspelt.zero_optimization_stage, auto.bfloat16_config.enabled


def test_deepspeed_accepts_what_our_schema_refuses_or_resolves():
    [[stage, bf16]] = run_locally(what_deepspeed_accepts, 1)
    assert stage == 0  # asked for 3
    assert bf16 is not True
    assert "zero_optimization" in error_of(zero_optimisation={"stage": 3})
    assert "bf16.enabled" in error_of(**{"bf16.enabled": "maybe"})


def operators_built(rank, skip):
    built = []
    deepspeed_comm = import_module("deepspeed.comm.torch")
    deepspeed_comm.build_shm_op = lambda: built.append("shm")
    if not skip:
        core.skip_shared_memory_operator = lambda: None
    Trainer(Case(steps=1, batch=4))
    return built


def test_without_the_skip_the_shared_memory_operator_is_compiled():
    assert run_locally(operators_built, 1, True) == [[]]
    assert run_locally(operators_built, 1, False) == [["shm"]]


def built_whole(rank, cut_at_once):
    if not cut_at_once:
        stages.building = lambda settings, mesh: construction.plain_building(
            settings.dtype, mesh.device
        )
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
def test_without_zero_init_a_stage_exists_whole_while_it_is_built():
    with_init, _ = run_locally(built_whole, 2, True)
    without, _ = run_locally(built_whole, 2, False)
    assert with_init == pytest.approx(0.5, rel=0.02)
    assert without == 1


def dtype_made(rank, dtype):
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: False  # some CPUs have it
    settings = EngineSettings(micro_batch_size=1)
    mesh = Mesh()
    with construction.building(settings, mesh):
        pass  # starts DeepSpeed
    config = settings.deepspeed_config(1)
    accelerator = type(deepspeed.get_accelerator())  # some CPUs have fp16
    with (
        patch.object(accelerator, "is_fp16_supported", lambda self: False),
        deepspeed.zero.Init(config_dict_or_path=config, dtype=dtype),
    ):
        return str(torch.nn.Linear(2, 2).weight.dtype)


def test_an_explicit_fp32_makes_bf16_parameters_where_there_is_no_fp16():
    assert run_locally(dtype_made, 1, None) == ["torch.float32"]
    assert run_locally(dtype_made, 1, torch.float32) == ["torch.bfloat16"]
