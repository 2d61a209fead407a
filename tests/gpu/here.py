"""What the tests for GPUs have to run on: several, one that all ranks share, or none.

With one GPU the ranks compute on it together and talk through the host, over the backend that keeps
NCCL's rules (`strict`); with several they talk by NCCL. With none, what needs no kernel of a GPU
runs on the CPU, so that the tests themselves are tried before a GPU is paid for.
"""

import os

import pytest
import torch

from tests.strict.running import STRICT

COUNT = torch.cuda.device_count()
SHARED = COUNT == 1
RANKS = 4 if COUNT < 2 else COUNT
"""The most ranks that can be asked for."""

if SHARED:
    os.environ["PARALLEL3D_BACKEND"] = STRICT  # the ranks inherit it

TRIES = bool(os.environ.get("PARALLEL3D_TRY_ON_CPU"))
"""True if the tests about kernels are to run on a CPU, too, as far as it has them."""
needs_gpu = pytest.mark.skipif(
    COUNT == 0 and not TRIES, reason="no GPU here, and this is about its kernels"
)
DEVICE = torch.device("cuda" if COUNT else "cpu")
TOLERANCE = 1e-4 if COUNT else 1e-5  # CUDA's fp32 products round differently than a CPU's


def enough(ranks):
    """Skip where there are fewer devices than that."""
    if ranks > RANKS:
        pytest.skip(f"needs {ranks} GPUs, this machine has {COUNT}")


REPORT = []
"""Lines for the end of the test session: what was measured, to be kept in docs/gpu.md."""


def report(label, value):
    """Keep a figure for the table at the end."""
    REPORT.append((label, value))
