"""Costs of a transformer's layers on one tensor-parallel rank, as data (no torch).

A family gives a `BlockCost`, an `EmbeddingCost` and head_cost's `HeadCost` as its layers' `cost`.
They count what parallel3d/tensor/ does and what autograd keeps of it, dropout of probability 0 left
out. In the formulas `whole` is batch x seq x hidden elements (the sbh of arXiv:2205.05198), and
`part` what of it lies on one rank between the layers: a tp-th under sequence parallelism.
"""

from dataclasses import dataclass
from functools import lru_cache

from parallel3d.model.spec import (
    Attention,
    Collective,
    Kept,
    LayerCost,
    MatMul,
    Recompute,
    Shape,
    Work,
)

_FP32, _INT64 = 4, 8  # bytes of a norm's statistic or a logsumexp, of a row number


@dataclass(frozen=True)
class BlockCost:
    """The cost of a pre-norm block: attention, then an MLP, each added to the residual stream."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_size: int
    gated: bool = False  # the MLP has three matrices (SwiGLU, arXiv:2002.05202), not two
    relu: bool = False  # the MLP's function is a ReLU, whose backward needs its result alone
    fused_qkv: bool = False  # one product gives queries, keys and values
    statistics: int = 2  # numbers a token that a norm keeps: 2 for LayerNorm, 1 for RMSNorm
    composite_norm: bool = False  # torch has no fused kernel of the norm on a CPU
    biases: bool = False  # of every product
    qkv_bias: bool = False
    rotary: int = 0  # features of each head that rotate
    qk_norm: bool = False
    dropout: bool = False  # of what is added to the residual stream
    attention_dropout: bool = False
    parallel: bool = False  # the MLP reads the block's input, too (GPT-NeoX, arXiv:2204.06745)

    def __call__(
        self,
        shape: Shape,
        tp: int = 1,
        sequence_parallel: bool = False,
        recompute: Recompute = "none",
    ) -> LayerCost:
        """The cost of one microbatch."""
        return _block(self, shape, tp, sequence_parallel and tp > 1, recompute)


@dataclass(frozen=True)
class EmbeddingCost:
    """The cost of a look-up in a vocabulary-parallel table, with or without learned positions."""

    hidden: int
    positions: bool = False
    dropout: bool = False

    def __call__(
        self,
        shape: Shape,
        tp: int = 1,
        sequence_parallel: bool = False,
        recompute: Recompute = "none",
    ) -> LayerCost:
        """The cost of one microbatch; nothing of it is computed again."""
        return _embedding(self, shape, tp, sequence_parallel and tp > 1)


@lru_cache(maxsize=4096)
def _block(
    c: BlockCost, shape: Shape, tp: int, sequence_parallel: bool, recompute: Recompute
) -> LayerCost:
    whole = shape.tokens * c.hidden
    part = whole // tp if sequence_parallel else whole
    inner = shape.tokens * _share(c.inner, tp)
    forward = _block_forward(c, shape, tp, sequence_parallel, whole, part)
    kept, attention = _block_kept(c, shape, tp, part)
    # Beyond what was kept there are at most: at the product that ends the MLP the gradients of its
    # result and its input; after SwiGLU's product those of both factors; those on both sides of a
    # ReLU, which has its result until then; at a gather the whole besides its part; and behind the
    # first product of the MLP both its whole input and the whole gradient of it.
    grads = part * (2 if c.dropout else 1)
    forward_sum = part if c.parallel else 0  # what is kept by none before the MLP's result
    if sequence_parallel:
        moments = [part + whole + inner, max(grads, forward_sum) + whole + part]
        moments.append(2 * part + 2 * whole - (2 if c.gated else 0 if c.relu else 1) * inner)
    else:
        moments = [grads + inner, forward_sum + part]
    if c.gated or c.relu:
        moments.append(part + 2 * inner)
    peak = Kept(max(moments), -part if c.dropout else 0)  # a mask is gone by then
    saved, working, recomputed = kept + attention, peak, Work()
    if recompute == "selective":
        scores = Kept(scores=attention.scores, dropped_scores=attention.dropped_scores)
        saved, working, recomputed = kept, peak + scores, Work((), forward.attention)
    elif recompute == "full":
        # torch stops once all that was kept is there again: before the last collective, unless a
        # dropout's mask comes after it.
        ran = forward.collectives if c.dropout else forward.collectives[:-1]
        recomputed = Work(forward.matmuls, forward.attention, forward.traffic, ran)
        # It holds what a forward does, and the gradient of the result besides.
        end = forward_sum + 2 * part
        if c.dropout:  # it runs to the end
            end += part + (whole if sequence_parallel else 0)
        elif sequence_parallel:
            # The gradient has been gathered, and the last product of all is made once more.
            end += 2 * whole - part
        peak = max(Kept(end), peak, key=lambda kept: kept.elements)
        saved, working = Kept(part), kept + attention + peak - Kept(part)
    return LayerCost(
        # A key/value head on several tp ranks counts once.
        sum(m.flops for m in _matmuls(c, shape, 1)) + _attention(c, shape, 1).flops,
        forward,
        recomputed,
        _columns_and_rows_backward(whole, tp, sequence_parallel) * 2,
        saved,
        working,
        Kept(2 * shape.seq * c.rotary),
    )


def _block_kept(c: BlockCost, shape: Shape, tp: int, part: int) -> tuple[Kept, Kept]:
    """Memory kept without recomputation: outside the attention's scores, and of these."""
    tokens, heads = shape.tokens, _share(c.heads, tp)
    queries, keys = tokens * heads * c.head_size, tokens * _share(c.kv_heads, tp) * c.head_size
    inner = tokens * _share(c.inner, tp)
    # The block's input, its norm, their sum with the attention's result, and its norm; query, key,
    # value and what the attention gives; what enters the activation function and what leaves it
    # (SwiGLU: both factors' products, the function of the one, their product; ReLU: the latter).
    elements = (3 if c.parallel else 4) * part + 2 * queries + 2 * keys
    elements += (4 if c.gated else 1 if c.relu else 2) * inner
    if c.fused_qkv and c.rotary:  # value keeps what it is a part of, besides turned query and key
        elements += queries + keys
    normed, statistics = 2 * part, 2 * c.statistics * (part // c.hidden)
    if c.qk_norm:  # their inputs; what they give is turned at once
        elements += queries + keys
        normed, statistics = normed + queries + keys, statistics + (queries + keys) // c.head_size
    masks = 2 * part if c.dropout else 0
    unfused = normed if c.composite_norm else 0
    scores = shape.batch * heads * shape.seq**2
    attention = Kept(
        other=_FP32 * heads * tokens,
        scores=scores,
        dropped_scores=scores if c.attention_dropout else 0,
    )
    return Kept(elements, _FP32 * statistics + masks, unfused=unfused), attention


def _block_forward(
    c: BlockCost, shape: Shape, tp: int, sequence_parallel: bool, whole: int, part: int
) -> Work:
    heads = shape.tokens * c.head_size * (_share(c.heads, tp) + _share(c.kv_heads, tp))
    inner = shape.tokens * _share(c.inner, tp)
    # Reads and writes of two norms and two residual sums, then of the MLP's function (and product).
    traffic = 2 * 2 * part + 2 * 3 * part + (5 if c.gated else 2) * inner
    if c.dropout:
        traffic += 2 * 2 * part
    if c.biases:
        traffic += 2 * 2 * part + 2 * inner
    if c.biases or c.qkv_bias:
        traffic += 2 * (heads + shape.tokens * c.head_size * _share(c.kv_heads, tp))
    if c.rotary:  # x cos + turned x sin, in five operators; then together with what does not turn
        traffic += 11 * heads * c.rotary // c.head_size + (c.rotary < c.head_size) * 2 * heads
    if c.qk_norm:
        traffic += 2 * heads
    collectives: tuple[Collective, ...] = ()
    if sequence_parallel:
        collectives = (Collective("all_gather", whole), Collective("reduce_scatter", whole)) * 2
    elif tp > 1:
        collectives = (Collective("all_reduce", whole),) * 2
    return Work(_matmuls(c, shape, tp), _attention(c, shape, tp), traffic, collectives)


def _matmuls(c: BlockCost, shape: Shape, tp: int) -> tuple[MatMul, ...]:
    m, hidden, inner = shape.tokens, c.hidden, _share(c.inner, tp)
    queries, keys = _share(c.heads, tp) * c.head_size, _share(c.kv_heads, tp) * c.head_size
    qkv = (queries + 2 * keys,) if c.fused_qkv else (queries, keys, keys)
    return (
        *(MatMul(m, hidden, n) for n in qkv),
        MatMul(m, queries, hidden),
        MatMul(m, hidden, (2 if c.gated else 1) * inner),
        MatMul(m, inner, hidden),
    )


def _attention(c: BlockCost, shape: Shape, tp: int) -> Attention:
    heads, kv_heads = _share(c.heads, tp), _share(c.kv_heads, tp)
    return Attention(shape.batch, heads, kv_heads, shape.seq, c.head_size)


@lru_cache(maxsize=4096)
def _embedding(c: EmbeddingCost, shape: Shape, tp: int, sequence_parallel: bool) -> LayerCost:
    whole = shape.tokens * c.hidden
    part = whole // tp if sequence_parallel else whole
    traffic = 4 * whole
    traffic += (3 * part if c.positions else 0) + (2 * part if c.dropout else 0)
    # For each token its row, and whether another rank holds it; the rows of the positions.
    other = (_INT64 + 1) * shape.tokens + (_INT64 * shape.seq if c.positions else 0)
    forward: tuple[Collective, ...] = ()
    if sequence_parallel:
        forward = (Collective("reduce_scatter", whole),)
    elif tp > 1:
        forward = (Collective("all_reduce", whole),)
    # A forward's sum with the positions, or a backward's gradients before and behind its dropout.
    besides = part if sequence_parallel or c.dropout else 0
    besides = max(besides, part // shape.batch if c.positions else 0)
    return LayerCost(
        0,
        Work((), None, traffic, forward),
        backward_collectives=(Collective("all_gather", whole),) if sequence_parallel else (),
        saved=Kept(0, other + (part if c.dropout else 0)),
        working=Kept(2 * whole + besides, -part if c.dropout else 0),
    )


def _columns_and_rows_backward(
    whole: int, tp: int, sequence_parallel: bool
) -> tuple[Collective, ...]:
    """Collectives in the backward of a column-parallel product, and of a row-parallel behind it."""
    if not sequence_parallel:
        return (Collective("all_reduce", whole),) if tp > 1 else ()
    gather, scatter = Collective("all_gather", whole), Collective("reduce_scatter", whole)
    return gather, scatter, gather


def _share(number: int, parts: int) -> int:
    """The largest part of `number` cut into parts that differ by one at most."""
    return -(-number // parts)
