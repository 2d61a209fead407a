"""Weight gradients that are made after the backward pass are those that it would have made."""

from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.checkpoint import checkpoint

from parallel3d.mesh.mesh import Mesh
from parallel3d.model import transformer_cost
from parallel3d.tensor import loss as loss_module
from parallel3d.tensor import weight_gradients
from parallel3d.tensor.linear import (
    ColumnParallelLinear,
    GroupedColumnLinear,
    RowParallelLinear,
    linear,
)
from parallel3d.tensor.loss import vocab_parallel_loss
from parallel3d.tensor.product import linear_of_rows
from parallel3d.tensor.weight_gradients import accumulate_in_place, defer_weight_gradients
from parallel3d.verify.local_ranks import run_locally
from tests.contexts import layer_context

pytestmark = pytest.mark.gloo

SIZE = 8


class Block(nn.Module):
    """One of each linear layer, with a weight that is no linear layer's."""

    def __init__(self, group, sequence_parallel):
        super().__init__()
        context = layer_context(group, sequence_parallel=sequence_parallel)
        self.scale = nn.Parameter(torch.ones(SIZE))
        self.up = ColumnParallelLinear(SIZE, 2 * SIZE, context=context)
        self.down = RowParallelLinear(2 * SIZE, SIZE, context=context)
        self.heads = GroupedColumnLinear(SIZE, {"q": 2, "k": 1}, 4, context=context, bias=True)

    def forward(self, x):
        """x [batch, seq, size] or its part of the sequence -> [batch, seq, features]."""
        x = self.down(torch.tanh(self.up(x * self.scale)))
        return torch.cat([y.flatten(-2) for y in self.heads(x)], dim=-1)


def gradients(rank, size, sequence_parallel, recompute, dtype):
    """Gradients after two microbatches: made in the backward, and held back; the input's, too."""
    group = Mesh(tp=size).tensor.group
    torch.manual_seed(rank)
    block = Block(group, sequence_parallel).to(dtype)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
        parameter.grad_dtype = torch.float32
    xs = [torch.randn(2, 4, SIZE, dtype=dtype) for _ in range(2)]
    results = []
    for deferred in (False, True):
        block.zero_grad(set_to_none=True)
        inputs = []
        waiting = []
        early = []
        for x in xs:
            x = x.clone().requires_grad_()
            y = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
            with defer_weight_gradients() as products:
                if deferred:
                    y.float().square().sum().backward()
            if not deferred:
                y.float().square().sum().backward()
            early.append({n for n, p in block.named_parameters() if p.grad is None})
            inputs.append(x.grad)
            waiting.append(products)
        for products in waiting:
            products.make()
        results.append((inputs, {n: p.grad for n, p in block.named_parameters()}, early))
    return results


@pytest.mark.parametrize(
    ("size", "sequence_parallel", "recompute", "dtype"),
    [(1, False, False, torch.float32), (2, True, True, torch.bfloat16)],
    ids=str,
)
def test_to_the_bit(size, sequence_parallel, recompute, dtype):
    ranks = run_locally(gradients, size, size, sequence_parallel, recompute, dtype)
    for (inputs, at_once, _), (their_inputs, later, early) in ranks:
        assert all(torch.equal(a, b) for a, b in zip(inputs, their_inputs, strict=True))
        assert at_once.keys() == later.keys()
        for name, gradient in at_once.items():
            assert gradient.dtype == later[name].dtype == torch.float32
            assert torch.equal(gradient, later[name]), name
        # Before they are made the linear layers' weights have none, and all others do.
        weights = {name for name in at_once if name.endswith("weight")}
        assert early == [weights, weights]


class Sums(TorchDispatchMode):
    """Counts additions to gradients in fp32, which take a pass over memory."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        is_sum = function is torch.ops.aten.add_.Tensor and args[0].dtype == torch.float32
        self.count += is_sum and args[0].dim() > 1
        return function(*args, **(kwargs or {}))


def sum_of_device(total, a, b):
    """Stand in for a device's product of half precision that is added to a sum in fp32."""
    product = a.float() @ b.float()
    if total is None:
        return product
    with _disable_current_modes():
        return total.add_(product)


def summed_on_rank(rank, in_product, chunk):
    """Gradients of three microbatches in bf16, in the order of the layers, and counted sums."""
    group = Mesh(tp=2).tensor.group
    context = layer_context(group, sequence_parallel=True)
    torch.manual_seed(0)
    block = Block(group, sequence_parallel=True).bfloat16()
    head = nn.Parameter(torch.randn(25, SIZE))
    for parameter in (*block.parameters(), head):
        nn.init.normal_(parameter, std=0.5)
        parameter.data = parameter.data.bfloat16()
        parameter.grad_dtype = torch.float32
    xs = torch.randn(3, 2, 4, SIZE).bfloat16()
    labels = torch.randint(50, (2, 8))
    sums = Sums()
    with (
        accumulate_in_place(),
        patch.object(weight_gradients, "_has_sums", lambda *_: in_product),
        patch.object(weight_gradients, "sum_in_fp32", sum_of_device),
        patch.object(loss_module, "sum_in_fp32", sum_of_device),
        patch.object(loss_module, "chunk_tokens", lambda *_: chunk),
    ):
        for x in xs:
            y = block(x)
            loss = vocab_parallel_loss(y[:, :4], head, labels, vocab_size=50, context=context)
            with sums:
                loss.sum().backward()
    return [p.grad for p in (*block.parameters(), head)], sums.count


@pytest.mark.parametrize("chunk", [16, 3])
def test_devices_add_products_to_fp32_sums_without_a_pass(chunk):
    """Seven sums a layer and microbatch, 14 bytes a parameter, and none of them rounded."""
    apart = run_locally(summed_on_rank, 2, False, chunk)
    within = run_locally(summed_on_rank, 2, True, chunk)
    for (rounded, sums), (exact, none) in zip(apart, within, strict=True):
        assert sums >= 2 * 4 and none == 0
        for ours, theirs in zip(exact, rounded, strict=True):
            assert ours.dtype == torch.float32 and ours.shape == theirs.shape
            assert (ours - theirs).norm() <= 0.01 * theirs.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_added_in_place_bit_for_bit(dtype):
    """Of a linear layer and of a head in parts; autograd's own sums, without its copies."""
    weight, head = (nn.Parameter(torch.randn(n, SIZE).to(dtype)) for n in (SIZE, 50))
    xs = torch.randn(3, 4, SIZE).to(dtype)
    labels = torch.randint(50, (4,))
    alone = layer_context(torch.distributed.ProcessGroup(0, 1))
    gradients = []
    for in_place in (False, True):
        for parameter in (weight, head):
            parameter.grad = None
            parameter.grad_dtype = torch.float32
        for x in xs:
            hidden = linear(x, weight)
            loss = vocab_parallel_loss(hidden, head, labels, vocab_size=50, context=alone).mean()
            before = weight.grad
            with accumulate_in_place() if in_place else nullcontext():
                loss.backward()
            assert before is None or weight.grad is before
        gradients.append((weight.grad, head.grad))
    for plain, added in zip(*gradients, strict=True):
        assert plain.dtype == added.dtype == torch.float32
        assert torch.equal(plain, added)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradient_of_a_head_in_parts_is_added_in_place(dtype, monkeypatch):
    monkeypatch.setattr(transformer_cost, "LOGITS_AT_ONCE", 100)
    head = nn.Parameter(torch.randn(50, SIZE).to(dtype))
    x = torch.randn(4, SIZE).to(dtype)
    head.grad_dtype = torch.float32
    labels = torch.randint(50, (4,))
    alone = layer_context(torch.distributed.ProcessGroup(0, 1))
    for _ in range(2):
        once = head.grad.clone() if head.grad is not None else None
        with accumulate_in_place():
            vocab_parallel_loss(x, head, labels, vocab_size=50, context=alone).mean().backward()
    torch.testing.assert_close(head.grad, 2 * once, rtol=1e-6, atol=1e-7)


def test_released_parameter_gets_its_whole_gradient():
    """As ZeRO-3 leaves it between a stage's last input gradient and its weights' gradients."""
    layer = nn.Parameter(torch.randn(3, SIZE))
    x = torch.randn(5, SIZE, requires_grad=True)
    whole = layer.data
    with defer_weight_gradients() as products:
        linear(x, layer).sum().backward()
    layer.data = torch.empty(0)
    products.make()
    assert layer.shape == (0,)
    assert torch.allclose(layer.grad, torch.ones(5, 3).t() @ x.detach())
    layer.data = whole


def test_gradient_of_some_rows_needs_no_gathered_weight():
    """ZeRO-3 releases the weight between a backward and its deferred products."""
    weight = torch.nn.Parameter(torch.randn(6, 4))
    x = torch.randn(3, 4)
    expected = torch.zeros(6, 4)
    expected[2:4] = x.sum(0)
    with defer_weight_gradients() as products:
        linear_of_rows(x, weight, slice(2, 4)).sum().backward()
    full = weight.data
    weight.data = torch.empty(0)
    deferred = products._products[0][1]()
    weight.data = full
    torch.testing.assert_close(deferred, expected)
