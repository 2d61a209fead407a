"""How many operators a block takes, forward and backward: one by one, and compiled in part."""

from pkgutil import resolve_name

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from parallel3d import models
from parallel3d.mesh.mesh import Mesh
from parallel3d.tensor import compiled
from parallel3d.tensor.context import LayerContext
from parallel3d.tensor.random_key import RandomKey
from parallel3d.verify.local_ranks import run_locally

pytestmark = pytest.mark.gloo

SMALL = {
    "family": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 16,
}

VIEWS = {
    "_unsafe_view",
    "alias",
    "detach",
    "expand",
    "select",
    "slice",
    "split",
    "split_with_sizes",
    "t",
    "transpose",
    "unsqueeze",
    "view",
    "unbind",
}


class Operators(TorchDispatchMode):
    """Counts what runs, but for what gives another view of the same memory."""

    def __init__(self):
        super().__init__()
        self.count = 0

    @classmethod
    def ignore_compile_internals(cls):
        return True  # compiled code stays compiled under this mode

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function._schema.name.partition("::")[2] not in VIEWS
        return function(*args, **(kwargs or {}))


class Kernels:
    """Compiles graphs, each of as many kernels as `compile_graph` says; counts those that run."""

    def __init__(self, compile_graph):
        self._compile_graph = compile_graph
        self.count = 0
        self.calls = 0

    def __call__(self, graph, inputs, **options):
        run, kernels = self._compile_graph(graph, inputs, **options)

        def counted(given):
            self.count += kernels
            self.calls += 1
            with _disable_current_modes():
                return run(given)

        counted._boxed_call = True
        return counted


def as_it_is(graph, inputs, **options):
    """One kernel a graph: not what is made of it, but what could be at best."""
    return lambda given: graph(*given), 1


def by_inductor(graph, inputs, **options):
    from torch._inductor import metrics
    from torch._inductor.compile_fx import compile_fx_inner

    before = metrics.generated_kernel_count
    run = compile_fx_inner(graph, inputs, **options)
    return run, metrics.generated_kernel_count - before


def count_on_rank(rank, inductor):
    """Operators of a block, and under "pointwise" those outside of graphs, calls and kernels."""
    torch._inductor.config.compile_threads = 1
    mesh = Mesh()
    layer = models.layers(models.config_class("llama")(**SMALL))[1]
    kernels = Kernels(by_inductor if inductor else as_it_is)
    compiled.BACKEND = inductor_of(kernels) if inductor else traced_for(kernels)
    plain, pointwise = (
        resolve_name(layer.build)(
            layer.config,
            layer.name,
            LayerContext(mesh.tensor.group, RandomKey(0), pointwise=pointwise),
        )
        for pointwise in (False, True)
    )
    for parameter in (*plain.parameters(), *pointwise.parameters()):
        torch.nn.init.normal_(parameter, std=0.02)
    x = torch.randn(2, 16, SMALL["hidden_size"], requires_grad=True)
    gradient = torch.randn_like(x)

    def operators(block):
        x.grad = None
        block.zero_grad()
        with Operators() as operators_run:
            block(x).backward(gradient)
        return operators_run.count

    operators(plain)  # which makes the rotary tables
    before = operators(plain)
    operators(pointwise)  # which compiles
    kernels.count = kernels.calls = 0
    counts = before, operators(pointwise), kernels.calls, kernels.count
    mesh.close()
    return counts


def traced_for(kernels):
    from torch._dynamo.backends.common import aot_autograd

    return aot_autograd(fw_compiler=kernels, bw_compiler=kernels)


def inductor_of(kernels):
    from torch._inductor.compile_fx import compile_fx

    return lambda graph, inputs: compile_fx(graph, inputs, inner_compile=kernels)


@pytest.mark.slow  # that graphs are made and used: test_compiled.py
def test_most_operators_of_a_block_are_between_products():
    """Two norms, rotary positions and SwiGLU: 66 operators in 8 graphs, as inductor is given."""
    ((before, outside, calls, _),) = run_locally(count_on_rank, 1, False, timeout=60)
    assert (before, outside, calls) == (90, 24, 8)


@pytest.mark.slow
def test_inductor_removes_a_third_of_the_operators():
    ((before, outside, calls, kernels),) = run_locally(count_on_rank, 1, True, timeout=230)
    print(f"{before} operators; {outside} and {kernels} kernels of {calls} graphs")
    assert calls == 8 and 0 < kernels <= 2 / 3 * before - outside
