"""What layers cost: the closed forms of arXiv:2205.05198, linearity in the batch, the modes."""

from dataclasses import replace
from time import perf_counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.model.module_cost import BLOCK
from parallel3d.model.recompute import FULL, NONE, SELECTIVE
from parallel3d.model.spec import Attention, KeptMemory, LayerCost, Shape
from parallel3d.models import layers
from parallel3d.models.gpt.spec import Config as Gpt
from parallel3d.models.llama.spec import Config as Llama

pytestmark = pytest.mark.pure

SEQ = 2048
HIDDEN = 4096
HEADS = 32
GPT = Gpt(
    family="gpt",
    hidden_size=HIDDEN,
    num_hidden_layers=1,
    num_attention_heads=HEADS,
    vocab_size=50257,
    max_position_embeddings=SEQ,
    resid_pdrop=0.1,
    attn_pdrop=0.1,
)
LLAMA = Llama(
    family="llama",
    hidden_size=HIDDEN,
    num_hidden_layers=1,
    num_attention_heads=HEADS,
    num_key_value_heads=8,
    vocab_size=128256,
    intermediate_size=14336,
)
MODES = [(1, False), (2, False), (8, False), (2, True), (8, True)]


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize(("tp", "sequence_parallel"), MODES)
def test_gpt_block_saves_the_bytes_of_table_2(tp, sequence_parallel, batch):
    """Bytes, in 2-byte elements; the paper leaves out statistics, four numbers a token here."""
    sbh = batch * SEQ * HIDDEN
    scores = 5 * batch * HEADS * SEQ**2 / tp
    whole, split = (34 / tp, 0) if sequence_parallel else (10, 24 / tp)
    block = layers(GPT)[1]
    for recompute, expected in {
        NONE: sbh * (whole + split) + scores,
        SELECTIVE: sbh * (whole + split),
        FULL: 2 * sbh / (tp if sequence_parallel else 1),
    }.items():
        kept = block.cost(Shape(batch, SEQ), tp, sequence_parallel, recompute).saved
        assert kept.bytes(2, classic=True) == pytest.approx(expected, rel=2e-3), recompute


@pytest.mark.parametrize("recompute", [NONE, SELECTIVE, FULL], ids=str)
@pytest.mark.parametrize(("tp", "sequence_parallel"), MODES)
@pytest.mark.parametrize("config", [GPT, LLAMA], ids=["gpt", "llama"])
def test_every_cost_is_linear_in_the_batch(config, tp, sequence_parallel, recompute):
    *others, head = layers(config)  # whose logits come in parts where they are many
    heads = replace(head, cost=replace(head.cost, in_parts=False))

    def costs(batch):
        shape = Shape(batch, SEQ)
        return [c.cost(shape, tp, sequence_parallel, recompute) for c in (*others, heads)]

    for layer, one, three in zip(layers(config), costs(1), costs(3), strict=True):
        positions = 8 * SEQ if layer.name == "embedding" and config is GPT else 0
        assert three.forward_flops == 3 * one.forward_flops
        for more, less in ((three.forward, one.forward), (three.recomputed, one.recomputed)):
            assert more.traffic == 3 * less.traffic
            assert sum(m.flops for m in more.matmuls) == 3 * sum(m.flops for m in less.matmuls)
            assert [c.elements for c in more.collectives] == [
                3 * c.elements for c in less.collectives
            ]
        for element_bytes in (2, 4):
            saved = three.saved.bytes(element_bytes, classic=True) - positions
            assert saved == 3 * (one.saved.bytes(element_bytes, classic=True) - positions)


@given(st.sampled_from([1, 2, 4, 8]), st.booleans(), st.integers(1, 4), st.sampled_from([2, 4]))
def test_recomputation_saves_less_and_works_with_no_less(tp, split, batch, element_bytes):
    """What full recomputation drops comes back while its layer runs backward, and no more."""
    for config in (GPT, LLAMA):
        block = layers(config)[1]
        shape = Shape(batch, SEQ)
        modes = (NONE, SELECTIVE, FULL)
        none, selective, full = (block.cost(shape, tp, split, mode) for mode in modes)
        saved = [cost.saved.bytes(element_bytes, True) for cost in (none, selective, full)]
        assert saved[0] > saved[1] > saved[2] > 0
        peaks = [(c.saved + c.working).bytes(element_bytes, True) for c in (none, full)]
        assert peaks[0] <= peaks[1] < 1.4 * peaks[0]
        assert none.forward == selective.forward == full.forward
        assert not none.recomputed.matmuls and full.recomputed.matmuls == full.forward.matmuls


@pytest.mark.parametrize("window", [1, 100, SEQ - 1, SEQ, 10 * SEQ, None])
def test_window_costs_only_its_keys(window):
    """Pairs of a query and a key counted one by one; scores, in a program that keeps them."""
    attention = Attention(1, HEADS, 8, SEQ, 128, window)
    pairs = sum(min(position + 1, window or SEQ) for position in range(SEQ))
    assert attention.flops * (1 - attention.hidden) == pytest.approx(4 * HEADS * 128 * pairs)
    block = layers(LLAMA.model_copy(update={"sliding_window": window}))[1]
    cost = block.cost(Shape(1, SEQ))
    whole = layers(LLAMA)[1].cost(Shape(1, SEQ))
    seen = min(window or SEQ, SEQ)
    assert cost.saved.scores == HEADS * SEQ * min(seen + BLOCK, SEQ)
    assert replace(cost.saved, scores=0) == replace(whole.saved, scores=0)
    saving = 4 * HEADS * SEQ * (SEQ - seen) * 128
    assert whole.forward_flops - cost.forward_flops == saving


def test_more_ranks_than_key_value_heads_hold_one_each():
    products = layers(LLAMA)[1].cost(Shape(1, SEQ), 16).forward.matmuls
    assert [p.n for p in products[:3]] == [2 * 128, 128, 128]
    assert layers(LLAMA)[1].cost(Shape(1, SEQ), 16).forward.attention.kv_heads == 1


def test_bytes_of_saved_tensors():
    kept = KeptMemory(100, other=7, scores=50, dropped_scores=20, copies=10, unfused=3)
    assert kept.bytes(2) == 200 + 7 + 40
    assert kept.bytes(4) == 400 + 7
    assert kept.bytes(2, classic=True) == 247 + 100 + 60
    assert kept.bytes(2, fused_norms=False) == 247 + 3 * 6
    assert kept.bytes(4, fused_norms=False) == 407 + 3 * 4
    assert kept + kept - kept == kept


def test_cost_is_computed_quickly():
    """The planner's search asks tens of thousands of times."""
    block = layers(LLAMA)[1]
    shape = Shape(1, SEQ)
    assert isinstance(block.cost(shape, 8, True, FULL), LayerCost)
    start = perf_counter()
    for _ in range(1000):
        block.cost(shape, 8, True, FULL)
    assert (perf_counter() - start) / 1000 < 50e-6
