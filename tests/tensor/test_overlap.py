"""Collectives of a backward under its products: the same bits, in another order, in less time."""

import time
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from torch.utils._pytree import tree_leaves

from parallel3d.mesh.mesh import Mesh
from parallel3d.tensor import product
from parallel3d.tensor.collectives import (
    all_gather_sequence,
    reduce_from_group,
    reduce_scatter_sequence,
)
from parallel3d.tensor.linear import ColumnParallelLinear, GroupedColumnLinear
from parallel3d.tensor.weight_gradients import defer_weight_gradients
from parallel3d.verify.local_ranks import run_locally
from tests.contexts import layer_context
from tests.counting import Calls
from tests.strict.group import StrictGroup
from tests.strict.operation import Handle
from tests.strict.running import run_strictly

pytestmark = pytest.mark.gloo

BATCH = 2
SEQ = 8
SIZE = 6
HEAD = 4
SECONDS = 0.15  # duration of each product and each collective
KINDS = ("all_reduce", "all_gather", "reduce_scatter")
DELAYS = ",".join(f"{kind}={SECONDS}" for kind in KINDS)


@contextmanager
def order():
    """Names of what is issued and waited for, in order; products take their time."""
    names = []

    def noting(owner, name, say):
        call = getattr(owner, name)

        def noted(*args):
            names.append(say(*args))
            return call(*args)

        return patch.object(owner, name, noted)

    def product_takes_time(*args):
        time.sleep(SECONDS)
        return "product"

    with (
        noting(StrictGroup, "_all", lambda group, kind, *rest: kind),
        noting(Handle, "wait", lambda *args: "wait"),
        noting(product, "_input_gradient", product_takes_time),
        noting(product, "_weight_gradient", product_takes_time),
    ):
        yield names


def layers(group, split, overlap=True):
    context = layer_context(group, sequence_parallel=split, overlap=overlap)
    torch.manual_seed(group.rank())
    made = [
        ColumnParallelLinear(SIZE, 2 * SIZE, context=context),
        GroupedColumnLinear(SIZE, {"q": 2, "k": 1}, HEAD, context=context),
    ]
    for layer in made:
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter)
    return made


def passed(layer, split, deferred=False):
    """A forward and a backward, and the W of held-back gradients; all gradients."""
    layer.zero_grad(set_to_none=True)
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(BATCH, SEQ // (2 if split else 1), SIZE, generator=generator).requires_grad_()
    y = layer(x)
    loss = sum(part.square().sum() for part in (y if isinstance(y, tuple) else [y]))
    if deferred:
        with defer_weight_gradients() as products:
            loss.backward()
        products.make()
    else:
        loss.backward()
    return [x.grad, *(p.grad for p in layer.parameters())]


def bits(rank):
    """Gradients of each layer, with and without; the same where they are held back."""
    group = Mesh(tp=2).tensor.group
    results = []
    for split in (False, True):
        for off, on in zip(layers(group, split, False), layers(group, split), strict=True):
            gradients = [passed(off, split), passed(on, split), passed(on, split, deferred=True)]
            results.append(gradients)
    return results


def test_to_the_bit():
    for of_rank in run_locally(bits, 2, timeout=60):
        for off, on, deferred in of_rank:
            assert all(map(torch.equal, off, on))
            assert all(map(torch.equal, off, deferred))


def order_and_time(rank):
    """Of the backward of one layer, without and with: what was issued, and the seconds."""
    mesh = Mesh(tp=2)
    timed = []
    for split in (False, True):
        for on in (False, True):
            layer, _ = layers(mesh.tensor.group, split, on)
            x = torch.randn(BATCH, SEQ // (2 if split else 1), SIZE, requires_grad=True)
            y = layer(x).sum()
            mesh.barrier()
            with order() as names:
                start = time.perf_counter()
                y.backward()
                timed.append((names, time.perf_counter() - start))
    return timed


def test_collective_overlaps_with_an_independent_product():
    for replicated, overlapped, split, both in run_strictly(order_and_time, 2, text=DELAYS):
        names, seconds = zip(replicated, overlapped, split, both, strict=True)
        assert names == (
            ["product", "all_reduce", "wait", "product"],
            ["product", "all_reduce", "product", "wait"],
            ["product", "reduce_scatter", "wait", "all_gather", "wait", "product"],
            ["all_gather", "product", "reduce_scatter", "wait", "product", "wait"],
        )
        # 3, 2, 4 and 2 times SECONDS, and what a busy machine adds.
        assert seconds[0] - seconds[1] > SECONDS / 2
        assert seconds[2] - seconds[3] > SECONDS


def results(rank):
    """What collectives of several samples give, and whether they work on just that memory."""
    group = Mesh(tp=2).tensor.group
    x = torch.arange(2.0 * 3 * 4 * 5).view(2, 3, 4, 5) * (rank + 1)  # [..., seq / tp, size]
    with Calls() as calls:
        whole = all_gather_sequence(x, group)
        mine = reduce_scatter_sequence(whole, group)
        total = reduce_from_group(x, layer_context(group))
    moved = tree_leaves([args for func, args in calls.calls if func.namespace == "c10d"])
    places, moved_places = (
        {t.untyped_storage().data_ptr() for t in tensors if isinstance(t, torch.Tensor)}
        for tensors in ((x, whole, mine), moved)
    )
    return whole, mine, total, total.data_ptr() == x.data_ptr() and moved_places == places


def test_overlap_copies_no_layout():
    x = torch.arange(2.0 * 3 * 4 * 5).view(2, 3, 4, 5)
    want = torch.cat([x, 2 * x], dim=-2)
    for rank, (whole, mine, total, in_place) in enumerate(run_locally(results, 2, timeout=60)):
        assert torch.equal(whole, want)
        assert torch.equal(mine, 2 * want.chunk(2, -2)[rank])
        assert torch.equal(total, 3 * x)
        assert in_place
