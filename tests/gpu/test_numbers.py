"""The numbers on devices: those of plain transformers, on every mesh, schedule and precision."""

import pytest
import torch

from parallel3d.config import RunConfig
from parallel3d.schedule import schedules
from parallel3d.verify.measure import TOLERANCE
from parallel3d.verify.shrink import shrink
from tests.gpu import here
from tests.verify.configs import MODELS, config_of
from tests.verify.measuring import measure, reference_on_batches

pytestmark = pytest.mark.gpu

MESHES = [(1, 1, 1), (1, 2, 1), (2, 1, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2)]
STAGES = {
    name: stages
    for name in schedules.names()
    for stages in (2, 1)
    if schedules.why_not(name, 4, 8, stages) is None
}


def errors_of(mesh, folder, overlap=None, update=False, **settings):
    """The largest differences of a config on a mesh from one process on a CPU."""
    pp, dp, tp = mesh
    here.enough(pp * dp * tp)
    raw = config_of(**settings)
    raw["parallel3d"]["train"]["overlap_update"] = update
    if overlap is not None:
        raw["zero_optimization"]["overlap_comm"] = overlap
    config = shrink(RunConfig.from_dict(raw), (mesh, (1, 1, 4)), str(folder))[mesh]
    return measure(config, reference_on_batches(config, folder))


def test_products_are_not_tf32():
    assert not torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_mesh_and_model(mesh, model, tmp_path):
    errors = errors_of(mesh, tmp_path, model=model, sequence_parallel=True)
    assert errors.within(here.TOLERANCE), errors


@pytest.mark.parametrize("overlap_update", [False, True])
@pytest.mark.parametrize("offload", ["cpu", "cpu+cpu"])
@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 2, 1)], ids=str)
def test_offload(mesh, offload, overlap_update, tmp_path):
    errors = errors_of(mesh, tmp_path, offload=offload, update=overlap_update)
    assert errors.within(here.TOLERANCE), errors


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("schedule", STAGES)
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_every_schedule_and_zero_stage(pp, schedule, zero, tmp_path):
    """Sends and receives of every schedule, between two and four devices."""
    settings = {"schedule": schedule, "stages_per_rank": STAGES[schedule], "zero": zero}
    errors = errors_of((pp, 1, 1), tmp_path, microbatches=8, **settings)
    assert errors.within(here.TOLERANCE), errors


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("reduction", ["per_step", "per_microbatch"])
@pytest.mark.parametrize("mesh", [(1, 2, 1), (2, 2, 1)], ids=str)
def test_reductions_that_overlap(mesh, reduction, overlap, zero, tmp_path):
    """Gradients that are reduced on streams of their own, behind the backward pass."""
    errors = errors_of(mesh, tmp_path, overlap, reduction=reduction, zero=zero)
    assert errors.within(here.TOLERANCE), errors


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("isolate", [False, True])
def test_checkpointing_and_masks(checkpointing, isolate, tmp_path):
    errors = errors_of((1, 1, 1), tmp_path, checkpointing=checkpointing, isolate=isolate)
    assert errors.within(here.TOLERANCE), errors


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("model", ["gpt", "llama"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_half_precision(mesh, precision, model, tmp_path):
    errors = errors_of(mesh, tmp_path, precision=precision, model=model)
    assert errors.within(TOLERANCE[precision]), errors
