"""Grouped products of experts' tokens, and their order, against loops over experts."""

from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch import nn

from parallel3d.mesh.mesh import Mesh
from parallel3d.mesh.traffic import Traffic
from parallel3d.tensor import experts as experts_module
from parallel3d.tensor.cut import cut_of
from parallel3d.tensor.experts import Experts, grouped_linear, grouped_product
from parallel3d.verify.local_ranks import run_locally
from tests.contexts import layer_context
from tests.models.test_layer_memory import release

pytestmark = pytest.mark.gloo

COUNTS = [3, 0, 5, 0]  # two experts have no token
ENDS = torch.tensor(COUNTS).cumsum(0).to(torch.int32)


@pytest.fixture
def group():
    made = Mesh()
    yield made.tensor.group
    made.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [8, 16, 6])
def test_grouped_products_equal_those_of_a_loop(width, dtype):
    """Also of widths that torch's kernel refuses; an expert without tokens has gradients of 0."""
    torch.manual_seed(0)
    x = torch.randn(8, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(4, 2, width, width, dtype=dtype, requires_grad=True)
    y = grouped_linear(x, weight, ENDS)
    gradient = torch.randn_like(y)
    y.backward(gradient)
    rows = x.detach().split(COUNTS)
    pairs = zip(rows, weight.detach().flatten(1, 2), strict=True)
    torch.testing.assert_close(y, torch.cat([own @ w.T for own, w in pairs]), rtol=0, atol=0)
    each = zip(gradient.split(COUNTS), rows, weight.detach().flatten(1, 2), strict=True)
    for number, (grad, own, w) in enumerate(each):
        start = sum(COUNTS[:number])
        torch.testing.assert_close(x.grad[start : start + len(own)], grad @ w)
        torch.testing.assert_close(weight.grad[number].flatten(0, 1), grad.T @ own)
    assert weight.grad[1].count_nonzero() == weight.grad[3].count_nonzero() == 0


def test_kernel_is_used_if_strides_are_aligned(monkeypatch):
    used = []
    monkeypatch.setattr(
        experts_module.F, "grouped_mm", lambda a, b, offs: used.append(1) or torch.empty(0)
    )
    grouped_product(torch.randn(8, 16), torch.randn(4, 16, 8), ENDS)
    assert used == [1]
    grouped_product(torch.randn(8, 6), torch.randn(4, 6, 8), ENDS)
    assert used == [1]


def test_kernel_gets_aligned_addresses():
    """At ZeRO-0 to 2 a weight lies in a flat group behind parameters of any size."""
    kernel = experts_module.F.grouped_mm
    flat = torch.randn(1 + 4 * 16 * 8)
    weight = flat[1:].view(4, 16, 8)  # 4 bytes behind an aligned address
    rows = torch.randn(8 * 16 + 1)[1:].view(8, 16)

    def aligned(a, b, offs):
        assert a.data_ptr() % 16 == b.data_ptr() % 16 == 0
        return kernel(a, b, offs=offs)

    with patch.object(experts_module.F, "grouped_mm", aligned):
        y = grouped_product(rows, weight, ENDS)
    assert torch.equal(y, grouped_product(rows.clone(), weight.clone(), ENDS))


def run(experts, x, chosen, weights):
    counts = torch.bincount(chosen.flatten(), minlength=len(experts.down)).float()
    return experts(x, chosen, weights, counts)


@pytest.mark.parametrize("capacity", [None, 1.0])
def test_tokens_return_to_their_places(group, capacity):
    """By finite differences, and token by token; the last tokens beyond a capacity skip it."""
    torch.manual_seed(1)
    experts = Experts(4, 4, 6, context=layer_context(group), capacity=capacity).double()
    for p in experts.parameters():
        nn.init.normal_(p)
    x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    chosen = torch.tensor([[0, 1], [0, 2], [1, 0], [0, 2], [2, 0], [0, 1]])
    weights = torch.rand(6, 2, dtype=torch.float64, requires_grad=True)
    y = run(experts, x, chosen, weights)
    expected = torch.zeros_like(y)
    seen = [0] * 4
    for token, row in enumerate(chosen.tolist()):
        for place, number in enumerate(row):
            seen[number] += 1
            if capacity is None or seen[number] <= 3:  # a quarter of the 12 rows
                gate, up = experts.gate_up[number] @ x[token]
                inner = nn.functional.silu(gate) * up
                expected[token] += weights[token, place] * (experts.down[number] @ inner)
    torch.testing.assert_close(y, expected)
    assert torch.autograd.gradcheck(lambda x, w: run(experts, x, chosen, w), (x, weights))


OWNERS = 4
EXPERTS = 8
SIZE = 8
INNER = 12
# Each rank's tokens and their two experts: one rank has no token, and nobody asks the last owner.
CHOSEN = [
    [[0, 5], [1, 2], [5, 0]],
    [[2, 3]],
    torch.zeros(0, 2).tolist(),
    [[4, 1], [4, 5]],
]


def divided(rank, weights, tokens, gradients):
    """Output, gradients and bytes sent of one rank, which owns two of the experts."""
    mesh = Mesh(dp=OWNERS, ep=OWNERS)
    context = layer_context(mesh.tensor.group, expert_group=mesh.experts.group)
    experts = Experts(EXPERTS, SIZE, INNER, context=context)
    for parameter, whole in zip(experts.parameters(), weights, strict=True):
        parameter.data = cut_of(parameter).part_of(whole).clone()
    x = tokens[rank].requires_grad_()
    chosen = torch.tensor(CHOSEN[rank], dtype=torch.long).view(-1, 2)
    shares = torch.full(chosen.shape, 0.5).requires_grad_()
    counts = torch.bincount(chosen.flatten(), minlength=EXPERTS).float()
    order = []
    with Traffic(mesh, ["all_to_all"]) as traffic:
        y = experts(x, chosen, shares, counts, meanwhile=lambda: order.append(1))
        y.backward(gradients[rank])
    (calls,) = traffic.calls
    own = [p.grad for p in experts.parameters()]
    return y.detach(), x.grad, shares.grad, own, order, calls.bytes


def test_divided_experts_equal_those_of_one_rank(group):
    torch.manual_seed(2)
    whole = Experts(EXPERTS, SIZE, INNER, context=layer_context(group))
    for p in whole.parameters():
        nn.init.normal_(p)
    tokens = [torch.randn(len(own), SIZE) for own in CHOSEN]
    gradients = [torch.randn(len(own), SIZE) for own in CHOSEN]
    x = torch.cat(tokens).requires_grad_()
    chosen = torch.cat([torch.tensor(own, dtype=torch.long).view(-1, 2) for own in CHOSEN])
    shares = torch.full(chosen.shape, 0.5, requires_grad=True)
    y = run(whole, x, chosen, shares)
    y.backward(torch.cat(gradients))
    weights = [p.detach() for p in whole.parameters()]
    ranks = run_locally(divided, OWNERS, weights, tokens, gradients)
    close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)
    for index, expected in enumerate((y.detach(), x.grad, shares.grad)):
        close(torch.cat([rank[index] for rank in ranks]), expected)
    for number, p in enumerate(whole.parameters()):
        close(torch.cat([rank[3][number] for rank in ranks]), p.grad)
    assert all(rank[4] == [1] for rank in ranks)
    # Rows of fp32 there and back, and their gradients; besides, each rank sends its counts.
    sent = 4 * chosen.numel() * SIZE * 4 + OWNERS * EXPERTS * 8
    assert sum(rank[5] for rank in ranks) >= sent


def test_released_weights_are_freed(group):
    experts = Experts(4, 4, 8, context=layer_context(group))
    for p in experts.parameters():
        nn.init.normal_(p)
    x = torch.randn(6, 4, requires_grad=True)
    chosen = torch.randint(4, (6, 2))
    y = run(experts, x, chosen, torch.rand(6, 2))
    values, alive = release(experts)
    assert alive == 0
    for p, value in values.items():
        p.data = value
    y.sum().backward()
    assert x.grad is not None
