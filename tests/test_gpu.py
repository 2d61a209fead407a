"""What only a GPU can show: the same numbers on CUDA and NCCL as by plain transformers."""

import pytest
import torch

from parallel3d.config import RunConfig
from parallel3d.verify.measure import TOLERANCE, measure
from parallel3d.verify.reference import train_reference
from parallel3d.verify.shrink import shrink
from tests.verify.configs import MODELS, config_of

COUNT = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(COUNT == 0, reason="no GPU here")]
MESHES = [(1, 1, 1), (1, 2, 1), (2, 1, 1), (1, 1, 2), (2, 2, 2)]


@pytest.fixture(autouse=True)
def without_tf32():
    assert not torch.backends.cuda.matmul.allow_tf32


def errors_of(mesh, folder, **settings):
    pp, dp, tp = mesh
    if pp * dp * tp > COUNT:
        pytest.skip(f"needs {pp * dp * tp} GPUs, this machine has {COUNT}")
    config = RunConfig.from_dict(config_of(**settings))
    small = shrink(config, (mesh, (1, 1, 4)), str(folder))[mesh]
    return measure(small, train_reference(small, folder))


@pytest.mark.parametrize("offload", ["none", "cpu", "cpu+cpu"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_parity_on_gpus(mesh, model, offload, tmp_path):
    errors = errors_of(mesh, tmp_path, model=model, offload=offload, sequence_parallel=True)
    assert errors.within(1e-4), errors  # CUDA's matrix products round differently


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_stages_and_checkpointing_on_a_gpu(zero, checkpointing, tmp_path):
    errors = errors_of((1, 1, 1), tmp_path, zero=zero, checkpointing=checkpointing, isolate=True)
    assert errors.within(1e-4), errors


@pytest.mark.parametrize("schedule", ["interleaved", "v_shape"])
def test_several_stages_on_a_gpu(schedule, tmp_path):
    errors = errors_of((1, 1, 1), tmp_path, schedule=schedule, stages_per_rank=2)
    assert errors.within(1e-4), errors


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_half_precision_on_a_gpu(precision, model, tmp_path):
    errors = errors_of((1, 1, 1), tmp_path, precision=precision, model=model)
    assert errors.within(TOLERANCE[precision]), errors
