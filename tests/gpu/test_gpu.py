"""What only a GPU can show: the same numbers on CUDA and NCCL as by plain PyTorch."""

import pytest
import torch

from tests.gloo.parity import Case, measure, train_on_rank
from tests.ranks import run_ranks

COUNT = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(COUNT == 0, reason="no GPU here")]
MESHES = [(1, 1, 1), (1, 2, 1), (2, 1, 1), (1, 1, 2), (2, 2, 2)]


@pytest.fixture(autouse=True)
def without_tf32():
    assert not torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_parity_on_gpus(mesh, offload):
    case = Case(mesh=mesh, offload=offload)
    if case.world_size > COUNT:
        pytest.skip(f"needs {case.world_size} GPUs, this machine has {COUNT}")
    errors = measure(case)
    assert errors.within(1e-4), errors  # CUDA's matrix products round differently


def test_bf16_follows_fp32_on_a_gpu():
    curves = {}
    for precision in ("fp32", "bf16"):
        run = Case(precision=precision, steps=50, microbatches=2)
        curves[precision], _, _ = run_ranks(train_on_rank, 1, run)[0]
    assert all(abs(b - f) / f < 0.02 for b, f in zip(curves["bf16"], curves["fp32"], strict=True))
