"""What a device is set to, as far as a machine without one can tell."""

import os
import re
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parallel3d.mesh.device import device_variables, set_allocator, set_numerics
from parallel3d.verify.local_ranks import run_locally
from tests.cases import Case, Trainer
from tests.models.families import WRITTEN

pytestmark = pytest.mark.gloo


@pytest.fixture
def settings_restored():
    before = torch.get_float32_matmul_precision(), os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    yield
    set_numerics(tf32=before[0] != "highest", deterministic=False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    if before[1]:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = before[1]


def test_tf32_and_determinism_are_off_by_default(settings_restored):
    set_numerics(tf32=False, deterministic=False)
    assert not torch.backends.cuda.matmul.allow_tf32
    assert not torch.are_deterministic_algorithms_enabled()
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"  # torch takes it: the user's own stays
    set_numerics(tf32=True, deterministic=True)
    assert torch.backends.cuda.matmul.allow_tf32
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":0:0"
    set_numerics(tf32=False, deterministic=True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert not torch.backends.cuda.matmul.allow_tf32


def test_allocator_settings_of_the_user_are_kept():
    with patch.dict(os.environ, clear=True):
        set_allocator()
        assert device_variables() == ["PYTORCH_ALLOC_CONF=expandable_segments:True"]
    users = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128", "NCCL_DEBUG": "INFO", "HOME": "/"}
    with patch.dict(os.environ, users, clear=True):
        set_allocator()
        assert device_variables() == [
            "NCCL_DEBUG=INFO",
            "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128",
        ]


def refused_when_deterministic():
    """The operators that torch's own documentation says to raise on CUDA, without underscores."""
    text = torch.use_deterministic_algorithms.__doc__.partition("operations will throw a\n")[2]
    text = text.partition("In addition")[0]
    names = {name.split(".")[-1].lower() for name in re.findall(r"`(torch\.\S+?)`", text)}
    return {name.replace("_", "") for name in names} - {"runtimeerror"}


class OnFloats(TorchDispatchMode):
    """The names of all operators that make floats, as `refused_when_deterministic` writes them."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if any(t.is_floating_point() for t in tree_leaves(made) if isinstance(t, torch.Tensor)):
            self.names.add(func.name().partition("::")[2].partition(".")[0].lower())
        return made


def deterministic_step(rank, case):
    """The operators on floats of a training step with determinism on."""
    set_numerics(tf32=False, deterministic=True)
    trainer = Trainer(case)
    with OnFloats() as ran:
        trainer.run()
    trainer.close()
    return ran.names


@pytest.mark.parametrize("family", WRITTEN)
def test_no_operator_of_a_step_is_refused_when_deterministic(family):
    """What a CPU runs, CUDA must not refuse in the middle of a run."""
    refused = refused_when_deterministic()
    assert {"nllloss", "cumsum", "bincount"} <= refused
    model = {"family": family, "num_key_value_heads": 2} if family == "llama" else {}
    case = Case(model=model, zero_stage=1, steps=1, checkpointing="selective", mesh=(1, 1, 1))
    (ran,) = run_locally(deterministic_step, 1, case)
    assert len(ran) > 30
    refused_kernels = {
        name for name in ran if any(name.replace("_", "").startswith(r) for r in refused)
    }
    assert not refused_kernels
