"""Costs of a transformer's layers on one tensor-parallel rank, as data (no torch).

A family uses `BlockCost`, `EmbeddingCost` and head_cost's `HeadCost` as its layers' `cost`. They
count the operations of parallel3d/tensor/ and the tensors that autograd keeps; dropout counts only
if its probability is above 0. In the formulas `full` is batch x seq x hidden elements (the sbh of
arXiv:2205.05198). `part` is the share of one rank between layers: a tp-th under sequence
parallelism.
"""

from dataclasses import dataclass
from functools import lru_cache

from parallel3d.model.spec import (
    Attention,
    Collective,
    KeptMemory,
    LayerCost,
    MatMul,
    Recompute,
    Shape,
    Work,
)

_FP32, _INT64 = 4, 8  # bytes: of a norm's statistic or a logsumexp; of a row number


@dataclass(frozen=True)
class BlockCost:
    """The cost of a pre-norm block: attention, then an MLP, each added to the residual stream."""

    hidden: int
    """Width of the residual stream."""
    inner: int
    """Inner width of the MLP."""
    heads: int
    """Query heads of all tp ranks."""
    kv_heads: int
    """Key/value heads of all tp ranks."""
    head_size: int
    """Features per head."""
    gated: bool = False
    """The MLP has three matrices (SwiGLU, arXiv:2002.05202), not two."""
    relu: bool = False
    """The MLP's activation is a ReLU, whose backward needs only its output."""
    fused_qkv: bool = False
    """One product computes queries, keys and values."""
    statistics: int = 2
    """Numbers per token that a norm keeps for its backward: 2 for LayerNorm, 1 for RMSNorm."""
    composite_norm: bool = False
    """torch has no fused CPU kernel for the norm."""
    biases: bool = False
    """Every product has a bias."""
    qkv_bias: bool = False
    """Query, key and value have a bias."""
    rotary: int = 0
    """Features of each head that are rotated (rotary positions)."""
    qk_norm: bool = False
    """Query and key are normalised per head, before the rotation."""
    dropout: bool = False
    """Dropout on the outputs of attention and MLP."""
    attention_dropout: bool = False
    """Dropout on the attention weights."""
    parallel: bool = False
    """The MLP reads the block's input, beside the attention (GPT-NeoX, arXiv:2204.06745)."""

    def __call__(
        self,
        shape: Shape,
        tp: int = 1,
        sequence_parallel: bool = False,
        recompute: Recompute = "none",
    ) -> LayerCost:
        """Return the cost of one microbatch."""
        return _block(self, shape, tp, sequence_parallel and tp > 1, recompute)


@dataclass(frozen=True)
class EmbeddingCost:
    """The cost of a look-up in a vocabulary-parallel table."""

    hidden: int
    """Width of the residual stream."""
    positions: bool = False
    """There is a table of learned positions."""
    dropout: bool = False
    """Dropout on the sum of the vectors."""

    def __call__(
        self,
        shape: Shape,
        tp: int = 1,
        sequence_parallel: bool = False,
        recompute: Recompute = "none",
    ) -> LayerCost:
        """Return the cost of one microbatch; `recompute` has no effect on the embedding."""
        return _embedding(self, shape, tp, sequence_parallel and tp > 1)


@lru_cache(maxsize=4096)
def _block(
    c: BlockCost, shape: Shape, tp: int, sequence_parallel: bool, recompute: Recompute
) -> LayerCost:
    full = shape.tokens * c.hidden
    part = full // tp if sequence_parallel else full
    inner = shape.tokens * _share(c.inner, tp)
    forward = _block_forward(c, shape, tp, sequence_parallel, full, part)
    outside, attention = _block_kept(c, shape, tp, part)
    # The backward's peak beyond the kept tensors is the largest of these moments:
    # - at the MLP's last product: the gradients of its output and its input;
    # - after SwiGLU's product: the gradients of both factors;
    # - at a ReLU, which holds its output until then: the gradients on both sides;
    # - at a gather: the full tensor beside its part;
    # - after the MLP's first product: its full input and the full gradient of it.
    grads = part * (2 if c.dropout else 1)
    forward_sum = part if c.parallel else 0  # not counted as kept before the MLP's output
    if sequence_parallel:
        moments = [part + full + inner, max(grads, forward_sum) + full + part]
        moments.append(2 * part + 2 * full - (2 if c.gated else 0 if c.relu else 1) * inner)
    else:
        moments = [grads + inner, forward_sum + part]
    if c.gated or c.relu:
        moments.append(part + 2 * inner)
    peak = KeptMemory(max(moments), -part if c.dropout else 0)  # a dropout mask is freed by then
    saved, working, recomputed = outside + attention, peak, Work()
    if recompute == "selective":
        scores = KeptMemory(scores=attention.scores, dropped_scores=attention.dropped_scores)
        saved, working, recomputed = outside, peak + scores, Work((), forward.attention)
    elif recompute == "full":
        # torch stops recomputing once all saved tensors exist again: before the last collective,
        # unless a dropout mask comes after it.
        ran = forward.collectives if c.dropout else forward.collectives[:-1]
        recomputed = Work(forward.matmuls, forward.attention, forward.traffic, ran)
        # The recomputation holds what a forward holds, and the gradient of the output.
        end = forward_sum + 2 * part
        if c.dropout:  # the recomputation runs to the end
            end += part + (full if sequence_parallel else 0)
        elif sequence_parallel:
            # The gradient has been gathered, and the last product is computed again.
            end += 2 * full - part
        peak = max(KeptMemory(end), peak, key=lambda memory: memory.elements)
        saved, working = KeptMemory(part), outside + attention + peak - KeptMemory(part)
    return LayerCost(
        # A key/value head on several tp ranks counts once.
        sum(m.flops for m in _matmuls(c, shape, 1)) + _attention(c, shape, 1).flops,
        forward,
        recomputed,
        _columns_and_rows_backward(full, tp, sequence_parallel) * 2,
        saved,
        working,
        KeptMemory(2 * shape.seq * c.rotary),
    )


def _block_kept(c: BlockCost, shape: Shape, tp: int, part: int) -> tuple[KeptMemory, KeptMemory]:
    """Return the memory kept without recomputation: outside attention's scores, and of these."""
    tokens, heads = shape.tokens, _share(c.heads, tp)
    queries, keys = tokens * heads * c.head_size, tokens * _share(c.kv_heads, tp) * c.head_size
    inner = tokens * _share(c.inner, tp)
    # - the block's input and its norm; the sum after the attention and its norm;
    # - query, key, value and the attention's output;
    # - input and output of the activation (SwiGLU: both factors, the activated one, their product;
    #   ReLU: only its output).
    elements = (3 if c.parallel else 4) * part + 2 * queries + 2 * keys
    elements += (4 if c.gated else 1 if c.relu else 2) * inner
    if c.fused_qkv and c.rotary:  # value keeps the fused tensor alive, beside rotated query and key
        elements += queries + keys
    normed, statistics = 2 * part, 2 * c.statistics * (part // c.hidden)
    if c.qk_norm:  # the norms' inputs; their outputs are rotated at once
        elements += queries + keys
        normed, statistics = normed + queries + keys, statistics + (queries + keys) // c.head_size
    masks = 2 * part if c.dropout else 0
    unfused = normed if c.composite_norm else 0
    scores = shape.batch * heads * shape.seq**2
    attention = KeptMemory(
        other=_FP32 * heads * tokens,
        scores=scores,
        dropped_scores=scores if c.attention_dropout else 0,
    )
    return KeptMemory(elements, _FP32 * statistics + masks, unfused=unfused), attention


def _block_forward(
    c: BlockCost, shape: Shape, tp: int, sequence_parallel: bool, full: int, part: int
) -> Work:
    heads = shape.tokens * c.head_size * (_share(c.heads, tp) + _share(c.kv_heads, tp))
    inner = shape.tokens * _share(c.inner, tp)
    # Reads and writes of two norms, two residual sums, and the MLP's activation (and product).
    traffic = 2 * 2 * part + 2 * 3 * part + (5 if c.gated else 2) * inner
    if c.dropout:
        traffic += 2 * 2 * part
    if c.biases:
        traffic += 2 * 2 * part + 2 * inner
    if c.biases or c.qkv_bias:
        traffic += 2 * (heads + shape.tokens * c.head_size * _share(c.kv_heads, tp))
    if c.rotary:  # x cos + rotated x sin, in five operators; then a cat with the other features
        traffic += 11 * heads * c.rotary // c.head_size + (c.rotary < c.head_size) * 2 * heads
    if c.qk_norm:
        traffic += 2 * heads
    collectives: tuple[Collective, ...] = ()
    if sequence_parallel:
        collectives = (Collective("all_gather", full), Collective("reduce_scatter", full)) * 2
    elif tp > 1:
        collectives = (Collective("all_reduce", full),) * 2
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
    full = shape.tokens * c.hidden
    part = full // tp if sequence_parallel else full
    traffic = 4 * full
    traffic += (3 * part if c.positions else 0) + (2 * part if c.dropout else 0)
    # Per token its row and whether another rank holds it; per position its row.
    other = (_INT64 + 1) * shape.tokens + (_INT64 * shape.seq if c.positions else 0)
    forward: tuple[Collective, ...] = ()
    if sequence_parallel:
        forward = (Collective("reduce_scatter", full),)
    elif tp > 1:
        forward = (Collective("all_reduce", full),)
    # The forward's sum with the positions, or the backward's gradients around the dropout.
    besides = part if sequence_parallel or c.dropout else 0
    besides = max(besides, part // shape.batch if c.positions else 0)
    return LayerCost(
        0,
        Work((), None, traffic, forward),
        backward_collectives=(Collective("all_gather", full),) if sequence_parallel else (),
        saved=KeptMemory(0, other + (part if c.dropout else 0)),
        working=KeptMemory(2 * full + besides, -part if c.dropout else 0),
    )


def _columns_and_rows_backward(
    full: int, tp: int, sequence_parallel: bool
) -> tuple[Collective, ...]:
    """Return the collectives of the backward through a column- and a row-parallel product."""
    if not sequence_parallel:
        return (Collective("all_reduce", full),) if tp > 1 else ()
    gather, scatter = Collective("all_gather", full), Collective("reduce_scatter", full)
    return gather, scatter, gather


def _share(number: int, parts: int) -> int:
    """Return the largest part of `number` when cut into parts that differ by at most one."""
    return -(-number // parts)
