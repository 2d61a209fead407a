"""Torch's compiler stays unloaded where nothing is compiled, and marks what it must if it comes."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.gloo

STEP = """
import inspect
import sys
import torch
from parallel3d.mesh import compiler, compute

compute.use(tf32=False, deterministic=False)
compiler.leave_unloaded()
weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.AdamW([weight], foreach=False)
weight.sum().backward()
with torch.no_grad():
    inspect.unwrap(torch.optim.AdamW.step)(optimizer)
optimizer.zero_grad()

@torch.compiler.disable(reason="ours")
def apart(x):
    return x + 1

assert apart(1) == 2
print("torch._dynamo" in sys.modules)

from torch._dynamo.utils import counters  # from here on all is as it was

def whole(x):
    return apart(x * 2) * 3

torch.compile(whole, backend="eager")(weight)
optimizer.zero_grad()
print("(reason: ours)" in "".join(counters["graph_break"]))
print(getattr(inspect.unwrap(torch.optim.Optimizer.zero_grad), "__dynamo_disable").__module__)
"""


def test_a_process_that_compiles_nothing_does_not_load_the_compiler():
    """It was a fifth of what such a process does before its first step."""
    command = [sys.executable, "-c", STEP]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded, broke, of = done.stdout.split()[-3:]
    assert (loaded, broke) == ("False", "True") and of.startswith("torch._dynamo")
