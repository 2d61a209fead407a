"""Each setting of `zero_optimization` and `parallel3d.pipeline` in a run of the real command.

Engine and parity tests build the parts without the launcher, so what only a launch does (the
self-test, the choice of "auto") would never meet these settings. `python launch/train.py` must
train with each of them, to the losses of one process.
"""

import json
import typing

import pytest
from pydantic import BaseModel

from parallel3d.config.deepspeed import ZeroConfig
from parallel3d.config.parallel3d_block import PipelineConfig
from parallel3d.schedule import schedules
from tests.launch.launching import PYTHON, Place, torchrun

pytestmark = pytest.mark.drill

ZERO = "zero_optimization"
PIPE = "parallel3d.pipeline"
MESH = "parallel3d.mesh"
OPTIMIZER = f"{ZERO}.offload_optimizer"
PARAM = f"{ZERO}.offload_param"
NVME = "NVME"  # stands for a folder of the test's own
RUNS = {
    "zero0": {
        f"{ZERO}.stage": 0, f"{MESH}.pp": 2, f"{PIPE}.schedule": "gpipe",
        f"{PIPE}.gradient_reduction": "auto", f"{PIPE}.activation_checkpointing": "none",
    },
    "zero1": {
        f"{ZERO}.stage": 1, f"{MESH}.pp": 2, f"{MESH}.tp": 2, f"{PIPE}.schedule": "one_f_one_b",
        f"{PIPE}.activation_checkpointing": "selective",
        f"{PIPE}.offload_activations": "none",
        f"{PIPE}.gradient_reduction": "per_step", f"{ZERO}.overlap_comm": True,
        f"{ZERO}.reduce_bucket_size": 100_000, f"{ZERO}.allgather_bucket_size": 100_000,
        f"{OPTIMIZER}.device": "none",
    },
    "zero2": {
        f"{ZERO}.stage": 2, f"{PIPE}.gradient_reduction": "per_microbatch",
        f"{ZERO}.use_multi_rank_bucket_allreduce": False,
        f"{ZERO}.contiguous_gradients": False,
        f"{OPTIMIZER}.device": "cpu", f"{OPTIMIZER}.pin_memory": False,
    },
    "zero3 by hooks": {
        f"{ZERO}.stage": 3, f"{PIPE}.weights": "per_microbatch",
        f"{ZERO}.sub_group_size": 10_000, f"{ZERO}.stage3_prefetch_bucket_size": 1000,
        f"{ZERO}.stage3_param_persistence_threshold": 500,
        f"{ZERO}.stage3_max_live_parameters": 1000, f"{ZERO}.stage3_max_reuse_distance": 1000,
        f"{PARAM}.device": "cpu", f"{PARAM}.pin_memory": False,
    },
    "zero3": {
        f"{ZERO}.stage": 3, f"{PIPE}.weights": "auto", f"{PARAM}.device": "none",
    },
    "zero3 per pass": {
        f"{ZERO}.stage": 3, f"{MESH}.pp": 2, f"{PIPE}.weights": "per_pass",
        f"{PIPE}.schedule": "breadth_first", f"{PIPE}.stages_per_rank": 2,
        f"{PIPE}.activation_checkpointing": "full:1", f"{PIPE}.offload_activations": "cpu",
    },
    "zero3 per step": {
        f"{ZERO}.stage": 3, f"{MESH}.pp": 2, f"{PIPE}.weights": "per_step",
        f"{PIPE}.schedule": "zb_v", f"{PIPE}.stages_per_rank": 2,
    },
    "nvme": {
        f"{ZERO}.stage": 3, f"{OPTIMIZER}.device": "nvme", f"{OPTIMIZER}.nvme_path": NVME,
        f"{OPTIMIZER}.buffer_count": 12, f"{OPTIMIZER}.pipeline_read": True,
        f"{OPTIMIZER}.pipeline_write": True, f"{PARAM}.device": "nvme",
        f"{PARAM}.nvme_path": NVME, f"{PARAM}.buffer_count": 6, f"{PARAM}.buffer_size": 200_000,
        f"{PARAM}.max_in_cpu": 0,
    },
    "interleaved": {
        f"{ZERO}.stage": 1, f"{MESH}.pp": 2, f"{PIPE}.schedule": "interleaved",
        f"{PIPE}.stages_per_rank": 2,
    },
    "v_shape": {
        f"{ZERO}.stage": 2, f"{MESH}.pp": 2, f"{PIPE}.schedule": "v_shape",
        f"{PIPE}.stages_per_rank": 2,
    },
    "zero_bubble": {f"{ZERO}.stage": 3, f"{MESH}.pp": 2, f"{PIPE}.schedule": "zero_bubble"},
}  # fmt: skip


def settings_of(section, path):
    """Every setting of a section, and the choices of those that are one of a few."""
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from settings_of(field.annotation, f"{path}.{name}")
        else:
            is_choice = typing.get_origin(field.annotation) is typing.Literal
            yield f"{path}.{name}", typing.get_args(field.annotation) if is_choice else ()


def test_every_setting_is_covered_by_a_run():
    used = {}
    for settings in RUNS.values():
        for path, value in settings.items():
            used.setdefault(path, set()).add(value)
    sections = [*settings_of(ZeroConfig, ZERO), *settings_of(PipelineConfig, PIPE)]
    for path, choices in sections:
        assert path in used, path
        assert used[path] >= set(choices), path
    assert used[f"{PIPE}.schedule"] == set(schedules.names())


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return Place(tmp_path_factory.mktemp("settings"))


@pytest.fixture(scope="module")
def alone(place):
    done = place.run(PYTHON, "--parallel3d.run.name", "alone", *batch_of(1))
    assert done.returncode == 0, done.stderr
    return place.lines("alone")


def batch_of(dp):
    return "--train_micro_batch_size_per_gpu", 8 // dp


@pytest.mark.slow
@pytest.mark.usefixtures("cpu_adam", "async_io")
@pytest.mark.parametrize("name", RUNS)
def test_run_with_the_settings_equals_one_process(place, alone, name):
    settings = RUNS[name]
    pp = settings.get(f"{MESH}.pp", 1)
    tp = settings.get(f"{MESH}.tp", 1)
    dp = 2 if pp == tp == 1 else 1
    folder = place.root / "nvme"
    folder.mkdir(exist_ok=True)
    values = {k: str(folder) if v == NVME else v for k, v in settings.items()}
    words = [word for k, v in values.items() for word in (f"--{k}", json.dumps(v))]
    run = name.replace(" ", "-")
    done = place.run(torchrun(pp * tp * dp), *words, *batch_of(dp), "--parallel3d.run.name", run)
    assert done.returncode == 0, done.stderr[-3000:]
    for one, other in zip(alone, place.lines(run), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-4)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)
