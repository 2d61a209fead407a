"""A run that compiles nothing does not load torch's compiler: a fifth of the start of its ranks."""

import subprocess
import sys

import pytest
import torch

from parallel3d.engine.quirks import compiler

pytestmark = pytest.mark.gloo

SELF_TEST = """
import sys, torch
from contextlib import nullcontext
from parallel3d.engine import EngineSettings
from parallel3d.engine.quirks import compiler
from parallel3d.engine.selftest import self_test
from parallel3d.mesh import compute
from parallel3d.mesh.mesh import Mesh
if {taken_away}:
    compiler.call_directly = lambda: None
    compiler.unloaded = nullcontext
    compiler.backward = lambda output, grad: output.backward(grad)
compute.use(tf32=False, deterministic=False)
mesh = Mesh()
self_test(EngineSettings(micro_batch_size=1, zero_stage=3, offload_optimizer="cpu"), mesh)
print([name for name in ("torch._dynamo", "sympy") if name in sys.modules])
mesh.close()
"""


@pytest.mark.usefixtures("cpu_adam")
@pytest.mark.parametrize(
    ("taken_away", "loaded"),
    [(False, "[]"), pytest.param(True, "['torch._dynamo', 'sympy']", marks=pytest.mark.slow)],
)
def test_an_engine_is_built_and_trained_without_the_compiler(taken_away, loaded):
    """In a process of its own: those of the tests may have loaded it."""
    program = SELF_TEST.format(taken_away=taken_away)
    told = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert told.returncode == 0, told.stderr
    assert told.stdout.splitlines()[-1] == loaded


def test_a_backward_from_a_gradient_is_torchs():
    x = torch.randn(3, 5, requires_grad=True)
    grad = torch.randn(3, 5)
    heard = []
    for backward in (torch.Tensor.backward, compiler.backward):
        x.grad, output = None, x.sin()
        output.register_hook(heard.append)
        backward(output, grad)
        heard.append(x.grad)
    assert all(torch.equal(a, b) for a, b in zip(heard[:2], heard[2:], strict=True))
    with pytest.raises(RuntimeError, match=r"\(5,\) for \(3, 5\)"):
        compiler.backward(x.sin(), grad[0])


def test_what_is_exempt_from_compiling_is_so_again_afterwards():
    before = torch.compiler.disable
    with compiler.unloaded():
        changed = torch.compiler.disable
        assert (changed is before) == compiler.is_loaded()
    assert torch.compiler.disable is before
