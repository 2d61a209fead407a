"""Sequence-parallel layers, and query/key/value of grouped heads, against plain PyTorch.

The gradients of what no rank cuts are parts of the whole, and summed here as the engine does it.
"""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from parallel3d.mesh.mesh import Mesh
from parallel3d.tensor import product as product_module
from parallel3d.tensor.collectives import Pending, sequence_part
from parallel3d.tensor.cut import cut_of
from parallel3d.tensor.linear import ColumnParallelLinear, GroupedColumnLinear, RowParallelLinear
from parallel3d.tensor.norm import LayerNorm, RMSNorm
from parallel3d.tensor.vocab import VocabParallelEmbedding
from parallel3d.verify.local_ranks import RankFailed, run_locally
from tests.cases import Case, Trainer

pytestmark = pytest.mark.gloo

BATCH, SEQ, NARROW, WIDE, HEAD = 3, 8, 6, 20, 5


def tensors(*shapes):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


def part(whole, cut):
    return whole if cut.dim is None else whole.narrow(cut.dim, cut.start, cut.stop - cut.start)


class Check:
    """One layer and its twin on whole tensors; gradients of both for one output gradient."""

    def __init__(self, layer, weights, group):
        self.layer, self.group = layer.double(), group
        self.weights = {name: w.clone().requires_grad_() for name, w in weights.items()}
        for name, parameter in layer.named_parameters():
            parameter.data.copy_(part(weights[name], cut_of(parameter)))

    def gradients(self, output, whole, of, grad, summed=True):
        """Compare output and gradients; `of` gives this rank's part of a whole output."""
        torch.testing.assert_close(output, of(whole))
        output.backward(of(grad))
        whole.backward(grad)
        for name, parameter in self.layer.named_parameters():
            found = parameter.grad.clone()
            if summed and cut_of(parameter).dim is None:
                dist.all_reduce(found, group=self.group)
            torch.testing.assert_close(found, part(self.weights[name].grad, cut_of(parameter)))


def column(group):
    x, w, b = tensors((BATCH, SEQ, NARROW), (WIDE, NARROW), (WIDE,))
    layer = ColumnParallelLinear(NARROW, WIDE, group, sequence_parallel=True)
    check = Check(layer, {"weight": w, "bias": b}, group)
    mine = sequence_part(x, group, 1).clone().requires_grad_()
    whole_x = x.requires_grad_()
    whole = F.linear(whole_x, check.weights["weight"], check.weights["bias"])
    (grad,) = tensors(whole.shape)
    cut = cut_of(layer.weight)
    check.gradients(layer(mine), whole, lambda y: y[..., cut.start : cut.stop], grad)
    torch.testing.assert_close(mine.grad, sequence_part(whole_x.grad, group, 1))


def row(group):
    x, w, b = tensors((BATCH, SEQ, WIDE), (NARROW, WIDE), (NARROW,))
    layer = RowParallelLinear(WIDE, NARROW, group, sequence_parallel=True)
    check = Check(layer, {"weight": w, "bias": b}, group)
    cut = cut_of(layer.weight)
    mine = x[..., cut.start : cut.stop].clone().requires_grad_()
    whole_x = x.requires_grad_()
    whole = F.linear(whole_x, check.weights["weight"], check.weights["bias"])
    (grad,) = tensors(whole.shape)
    check.gradients(layer(mine), whole, lambda y: sequence_part(y, group, 1), grad)
    torch.testing.assert_close(mine.grad, whole_x.grad[..., cut.start : cut.stop])


def embedding(group):
    (w,) = tensors((WIDE, NARROW))
    tokens = torch.arange(BATCH * SEQ).view(BATCH, SEQ) % WIDE
    layer = VocabParallelEmbedding(WIDE, NARROW, group, sequence_parallel=True)
    check = Check(layer, {"weight": w}, group)
    whole = F.embedding(tokens, check.weights["weight"])
    (grad,) = tensors(whole.shape)
    check.gradients(layer(tokens), whole, lambda y: sequence_part(y, group, 1), grad)


def norms(group):
    for layer, twin in (
        (LayerNorm(NARROW, group, 1e-5), lambda x, w: F.layer_norm(x, (NARROW,), *w.values())),
        (RMSNorm(NARROW, group, 1e-5), lambda x, w: rms_norm(x, w["weight"])),
    ):
        x, w, b = tensors((BATCH, SEQ, NARROW), (NARROW,), (NARROW,))
        names = [name for name, _ in layer.named_parameters()]
        check = Check(layer, dict(zip(names, (w, b), strict=False)), group)
        mine = sequence_part(x, group, 1).clone()
        whole = twin(x, check.weights)
        (grad,) = tensors(whole.shape)
        check.gradients(layer(mine), whole, lambda y: sequence_part(y, group, 1), grad)


def rms_norm(x, w):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * w


def grouped(group, sequence_parallel):
    """Eight query heads, two key heads: on four ranks two of them share each."""
    heads = {"q": 8, "k": 2}
    shapes = [(BATCH, SEQ, NARROW)]
    shapes += [s for n in heads.values() for s in ((n * HEAD, NARROW), (n * HEAD,))]
    x, *whole_weights = tensors(*shapes)
    names = [f"{name}_{kind}" for name in heads for kind in ("weight", "bias")]
    layer = GroupedColumnLinear(
        NARROW, heads, HEAD, group, bias=True, sequence_parallel=sequence_parallel
    )
    check = Check(layer, dict(zip(names, whole_weights, strict=True)), group)
    take = (lambda t: sequence_part(t, group, 1)) if sequence_parallel else (lambda t: t)
    mine = take(x).clone().requires_grad_()
    whole_x = x.requires_grad_()
    q, k = (
        F.linear(whole_x, check.weights[f"{n}_weight"], check.weights[f"{n}_bias"]).unflatten(
            -1, (-1, HEAD)
        )
        for n in heads
    )  # [batch, seq, heads, HEAD]
    # What attention does with them: every query head meets its key head.
    whole = (q * k.repeat_interleave(4, dim=2)).sum(-1)  # [batch, seq, heads]
    mine_q, mine_k = layer(mine)
    y = (mine_q * mine_k.repeat_interleave(mine_q.shape[2] // mine_k.shape[2], dim=2)).sum(-1)
    (grad,) = tensors(whole.shape)
    width = 8 // group.size()
    check.gradients(y, whole, lambda t: t.narrow(2, group.rank() * width, width), grad)
    torch.testing.assert_close(mine.grad, take(whole_x.grad))


CHECKS = {
    "column": column,
    "row": row,
    "embedding": embedding,
    "norms": norms,
    "grouped": lambda group: grouped(group, False),
    "grouped, sequence parallel": lambda group: grouped(group, True),
}


def on_rank(rank, names, fault=None):
    if fault:
        FAULTS[fault]()
    for mesh in ((1, 4, 1), (1, 2, 2), (1, 1, 4)):
        grid = Mesh(*mesh)
        for name in names:
            try:
                CHECKS[name](grid.group("tp"))
            except AssertionError as error:
                raise AssertionError(f"{name}, tp {mesh[2]}: {error}") from None
        grid.barrier()


def test_layers_equal_their_twins():
    run_locally(on_rank, 4, list(CHECKS), timeout=60)


def gather_nothing_in_backward():
    gather = product_module.all_gather_sequence
    product_module.start_all_gather = lambda x, group: Pending(torch.zeros_like(gather(x, group)))


def use_the_first_head():
    GroupedColumnLinear._rows = lambda self, n: None if n >= self.group.size() else (0, HEAD)


FAULTS = {
    "column": gather_nothing_in_backward,
    "grouped": use_the_first_head,
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_seen(name):
    with pytest.raises(RankFailed, match="not close"):
        run_locally(on_rank, 4, [name], name, timeout=60)


class Operators(TorchDispatchMode):
    """The names of the collectives that run meanwhile."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.names.add(func._schema.name.partition("::")[2])
        return func(*args, **(kwargs or {}))


def collectives_on_rank(rank, case):
    trainer = Trainer(case)
    with Operators() as operators:
        trainer.run()
    trainer.close()
    return operators.names


def test_no_group_of_a_cpu_is_asked_for_a_coalesced_collective():
    """Gloo's two threads corrupt the heap with them (benchmarks/upstream/gloo_coalesced.py)."""
    case = Case(mesh=(1, 2, 2), sequence_parallel=True, batch=16, steps=1)
    for names in run_locally(collectives_on_rank, case.world_size, case):
        assert {"_allgather_base_", "_reduce_scatter_base_"} <= names
        assert not [name for name in names if "coalesced" in name]
