"""What the head holds where its logits are many: those of some tokens, and its cost says so."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from parallel3d import models
from parallel3d.model import transformer_cost
from parallel3d.model.recompute import NONE
from parallel3d.model.spec import Shape
from parallel3d.model.transformer_cost import LOGITS_AT_ONCE, chunk_tokens, num_chunks
from parallel3d.tensor.loss import vocab_parallel_loss
from parallel3d.tensor.weight_gradients import accumulate_in_place
from parallel3d.verify.local_ranks import run_locally
from tests.contexts import layer_context
from tests.counting import Counting
from tests.models.cost_cases import MESHES, SHAPE, SIZES, Case
from tests.models.costs import measure_cases
from tests.models.families import WRITTEN, small
from tests.models.test_layer_cost_of_torch import products, traffic, wrong

pytestmark = pytest.mark.gloo

# Llama-3 8B's
TOKENS = 8192
HIDDEN = 4096
VOCAB = 128256


def alone():
    """A group of this process: layers ask it for its size and rank, and nothing else."""
    return dist.ProcessGroup(0, 1)


def run_head(dtype, weight, counting):
    """Most bytes beyond the weight, its gradient and the input; bytes that are kept for backward.

    The input's gradient counts.
    """
    x = torch.empty(1, TOKENS, HIDDEN, dtype=dtype, device="meta", requires_grad=True)
    labels = torch.empty(1, TOKENS, dtype=torch.int64, device="meta")
    before = counting.bytes
    is_first = weight.grad is None
    counting.start()
    loss = vocab_parallel_loss(x, weight, labels, vocab_size=VOCAB, context=layer_context(alone()))
    kept = counting.bytes - before
    forward = counting.peak - before
    counting.start()
    loss.mean().backward()
    backward = counting.peak - before
    if is_first:
        backward -= weight.grad.nbytes
    return max(forward, backward), kept


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_memory_of_the_head_of_llama_3_8b_at_8192_tokens(dtype):
    """Of 8,192 tokens it took 11.9 GB, and kept 3.5, with all logits at once."""
    with Counting(meta=True) as counting:
        weight = nn.Parameter(torch.empty(VOCAB, HIDDEN, dtype=dtype, device="meta"))
        weight.grad_dtype = torch.float32
        most, kept = run_head(dtype, weight, counting)
        # A later microbatch's gradient is added to it where it stands, as the engine has it.
        with accumulate_in_place():
            again, _ = run_head(dtype, weight, counting)
    print(f"{dtype}: {most / 1e9:.2f} GB at most, {again / 1e9:.2f} later, {kept / 1e9:.4f} kept")
    assert max(most, again) < 1.5e9 and kept < 1e6
    assert weight.grad.dtype == torch.float32


def test_logits_in_one_part_hold_more(monkeypatch):
    monkeypatch.setattr(transformer_cost, "LOGITS_AT_ONCE", TOKENS * VOCAB)
    with Counting(meta=True) as counting:
        weight = nn.Parameter(torch.empty(VOCAB, HIDDEN, dtype=torch.bfloat16, device="meta"))
        most, kept = run_head(torch.bfloat16, weight, counting)
    assert most > 6e9 and kept > 2e9


def test_parts_are_few_and_about_equal():
    assert num_chunks(8192, 16032) == 1  # on 8 tensor-parallel ranks
    assert (num_chunks(TOKENS, VOCAB), chunk_tokens(TOKENS, VOCAB)) == (8, 1024)
    assert num_chunks(1, LOGITS_AT_ONCE * 3) == 3 and chunk_tokens(1, LOGITS_AT_ONCE * 3) == 1


def heads(meshes, families):
    for family in families:
        layer = models.layers(small(family, **SIZES))[-1]
        yield from (Case(layer, *mesh, NONE, "last") for mesh in meshes)


def measured_in_parts(rank, at_once, *cases):
    transformer_cost.LOGITS_AT_ONCE = at_once
    return measure_cases(rank, list(heads(*cases)))


@pytest.mark.parametrize(
    ("meshes", "families"),
    [
        pytest.param([(2, True)], ["gpt"], id="one"),
        pytest.param(MESHES, WRITTEN, id="all", marks=pytest.mark.slow),
    ],
)
def test_head_in_parts_needs_the_predicted_memory(monkeypatch, meshes, families):
    """Against torch, as all layers are, but for what operators move, and products one by one."""
    at_once = SHAPE.tokens * SIZES["vocab_size"] // 8
    (rows,) = run_locally(measured_in_parts, 1, at_once, meshes, families, timeout=300)
    monkeypatch.setattr(transformer_cost, "LOGITS_AT_ONCE", at_once)
    transformer_cost.known_cost.cache_clear()
    try:
        for case, did in rows:
            assert case.cost().recomputed.matmuls == case.cost().forward.matmuls
            assert wrong(case, case.cost(), did) <= {traffic, products}, case
    finally:
        monkeypatch.undo()
        transformer_cost.known_cost.cache_clear()


def test_more_tokens_need_no_more_memory_for_logits():
    head = models.layers(small("llama", **SIZES | {"vocab_size": VOCAB}))[-1]
    few, many = (head.cost(Shape(1, seq)) for seq in (2048, 2**17))
    assert max(few.working.copies, many.working.copies) <= LOGITS_AT_ONCE
