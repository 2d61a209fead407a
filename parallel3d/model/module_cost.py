"""The costs of a block's modules on one tensor-parallel rank, as data (floor 0, no torch)."""

from dataclasses import dataclass, replace
from math import gcd
from typing import NamedTuple

from parallel3d.model.recompute import NONE, Recompute
from parallel3d.model.spec import (
    Attention,
    Collective,
    KeptMemory,
    LayerCost,
    MatMul,
    Work,
    flops_of,
)

BLOCK = 128  # queries that share the mask of a window, without a kernel that has windows
SINK_SIZE = 8  # features that a sink adds to a head; fewer would misalign fused kernels
_FP32 = 4  # bytes of a statistic, a logsumexp or a score
_INT64 = 8  # bytes of a row number


class Stream(NamedTuple):
    """The activations that a layer's modules read and add to, on one tensor-parallel rank.

    - `sequence_parallel`: True if the ranks cut the sequence between modules; only with tp > 1.
    - `dropout`: True if a dropout follows each module, before the sum.
    """

    batch: int
    seq: int
    hidden: int
    tp: int = 1
    sequence_parallel: bool = False
    dropout: bool = False

    @property
    def tokens(self) -> int:
        """Number of tokens in the microbatch."""
        return self.batch * self.seq

    @property
    def full(self) -> int:
        """Elements of [batch, seq, hidden], the sbh of arXiv:2205.05198."""
        return self.tokens * self.hidden

    @property
    def part(self) -> int:
        """Elements of one rank between modules: a tp-th of `full` under sequence parallelism."""
        return self.full // self.tp if self.sequence_parallel else self.full

    @property
    def gradients(self) -> int:
        """Elements of the gradients when a module's backward starts.

        The stream's gradient is also that of the module's output, unless a dropout is between them.
        """
        return self.part * (2 if self.dropout else 1)

    @property
    def gather(self) -> tuple[Collective, ...]:
        """The collective in front of a column-parallel product; the backward repeats it.

        It is that of the backward through a row-parallel product, too.
        """
        return (Collective("all_gather", self.full),) if self.sequence_parallel else ()

    @property
    def reduce(self) -> tuple[Collective, ...]:
        """The collective behind a row-parallel product.

        It is that of the backward through a column-parallel product, too.
        """
        if self.sequence_parallel:
            return (Collective("reduce_scatter", self.full),)
        return (Collective("all_reduce", self.full),) if self.tp > 1 else ()

    def share(self, number: int) -> int:
        """Return the largest part of `number` when the ranks' parts differ by at most one."""
        return -(-number // self.tp)


@dataclass(frozen=True)
class NormCost:
    """The cost of a norm; the defaults are LayerNorm's."""

    statistics: int = 2
    """Numbers per vector that the norm keeps for its backward: 2 for LayerNorm, 1 for RMSNorm."""
    composite: bool = False
    """torch has no fused CPU kernel for the norm."""

    def __call__(self, stream: Stream, recompute: Recompute = NONE) -> LayerCost:
        """Return the cost of the norm of a module's input.

        The norm reads its input and writes its output, and both are kept: the input for its own
        backward, the output for the module's. "layernorm" recomputes the output, when less is left
        of what later parts saved.
        """
        kept = KeptMemory(stream.part)
        again = Work()
        work = Work(traffic=2 * stream.part)
        if "layernorm" in recompute.parts:
            again = work
        else:
            kept += self.kept(stream.part, stream.hidden)
        return LayerCost(0, work, again, saved=kept)

    def kept(self, elements: int, size: int) -> KeptMemory:
        """Return the memory of one tensor and the statistics of its vectors of `size` elements."""
        statistics = self.statistics * (elements // size)
        return KeptMemory(elements, _FP32 * statistics, unfused=elements if self.composite else 0)


LAYER_NORM = NormCost()
RMS_NORM = NormCost(statistics=1, composite=True)


@dataclass(frozen=True)
class MlpCost:
    """The cost of a product to the inner width, an activation, and a product back."""

    inner: int
    """Inner width of all tp ranks."""
    gated: bool = False
    """The first product has two factors (SwiGLU, arXiv:2002.05202): three matrices, not two."""
    relu: bool = False
    """The activation is a ReLU, whose backward needs only its output."""
    bias: bool = False
    """Both products have a bias."""

    @property
    def _factors(self) -> int:
        return 2 if self.gated else 1

    def __call__(self, stream: Stream, recompute: Recompute) -> LayerCost:
        """Return the cost of one microbatch.

        "mlp_act" recomputes the activation function from the first product's output, "mlp" that
        product, too. Either stops before the last product.
        """
        inner = stream.tokens * stream.share(self.inner)
        parts = recompute.parts
        kept = self._num_kept(recompute) * inner
        # The activation, and the product of the factors.
        traffic = activation = (5 if self.gated else 2) * inner
        if self.bias:
            traffic += 2 * self._factors * inner + 2 * stream.part
        recomputed = Work()
        left = kept
        if "mlp" in parts:
            left = inner if recompute.weights_wait else 0
            recomputed = Work(self._matmuls(stream)[:1], None, traffic, stream.gather)
        elif "mlp_act" in parts:
            left = self._factors * inner
            recomputed = Work(traffic=activation)
        return LayerCost(
            flops_of(self._matmuls(stream._replace(tp=1))),
            Work(self._matmuls(stream), None, traffic, stream.gather + stream.reduce),
            recomputed,
            backward_collectives=stream.gather + stream.reduce + stream.gather,
            saved=KeptMemory(left),
            working=KeptMemory(kept - left + self._peak(stream, inner, kept, recompute)),
        )

    def _num_kept(self, recompute: Recompute) -> int:
        """Return how many tensors of the inner width the activation needs in its backward."""
        if self.gated:
            return 4  # both factors, the activated one, and their product
        needs_input = not self.relu
        if "mlp_act" in recompute.parts and "mlp" not in recompute.parts:
            needs_input = True  # a ReLU's output is recomputed from it
        return 2 if needs_input else 1  # the activation's output, and its input

    def _peak(self, stream: Stream, inner: int, kept: int, recompute: Recompute) -> int:
        """Return the elements of the backward's fullest moment beyond the kept ones."""
        full = stream.full
        part = stream.part
        gradients = stream.gradients
        at_last_product = gradients + inner  # the gradients of its output and of its input
        at_activation = 0
        if self.gated or self.relu:
            # SwiGLU: the gradients of both factors, after their product. A ReLU holds its output
            # until then: the gradients on both sides.
            at_activation = part + 2 * inner
        if not stream.sequence_parallel:
            return max(at_last_product, at_activation)
        at_gather = gradients + full + part  # the full gradient beside its part
        at_last_product = part + full + inner  # after it, without that part
        # The first product's full input and the full gradient of it; of the kept elements only
        # the gradients of the factors have replaced their own.
        after_first_product = 2 * part + 2 * full + self._factors * inner - kept
        if "layernorm" in recompute.parts and "mlp" not in recompute.parts:
            after_first_product += part  # the input is there again
        return max(at_last_product, at_activation, at_gather, after_first_product)

    def _matmuls(self, stream: Stream) -> tuple[MatMul, ...]:
        m = stream.tokens
        hidden = stream.hidden
        inner = stream.share(self.inner)
        return MatMul(m, hidden, self._factors * inner), MatMul(m, inner, hidden)


@dataclass(frozen=True)
class AttentionCost:
    """The cost of query, key and value, the attention, and the output projection."""

    heads: int
    """Query heads of all tp ranks."""
    kv_heads: int
    """Key/value heads of all tp ranks."""
    head_size: int
    """Features per head."""
    fused_qkv: bool = False
    """One product computes queries, keys and values."""
    bias: bool = False
    """Every product has a bias."""
    qkv_bias: bool = False
    """Query, key and value have a bias."""
    output_bias: bool = False
    """The output projection has a bias."""
    qk_norm: NormCost | None = None
    """The norm over each head of query and key, before the rotation."""
    rotary: int = 0
    """Features of each head that are rotated (rotary positions)."""
    dropout: bool = False
    """Dropout on the attention weights."""
    window: int | None = None
    """Tokens that a query sees, itself included; None: all before it."""

    def __call__(self, stream: Stream, recompute: Recompute) -> LayerCost:
        """Return the cost of one microbatch; "core_attn" is what is inside the attention.

        It has no moment of its own: what later modules saved is free in its backward, and is more.
        """
        # Elements of this rank's queries, and of its keys or its values.
        query = stream.tokens * self.head_size * stream.share(self.heads)
        key = stream.tokens * self.head_size * stream.share(self.kv_heads)
        kept = self._kept(query, key)
        attention = self._attention(stream)
        batch, heads, _, seq, _, _ = attention
        num_scores = batch * heads * seq * min(seq, attention.keys + BLOCK)
        scores = KeptMemory(scores=num_scores, dropped_scores=num_scores if self.dropout else 0)
        inside = replace(scores, other=_FP32 * batch * heads * seq)  # the logsumexp
        is_selective = "core_attn" in recompute.parts
        # A key/value head on several tp ranks counts once.
        one = stream._replace(tp=1)
        flops = flops_of(self._matmuls(one)) + self._attention(one).flops
        return LayerCost(
            flops,
            Work(
                self._matmuls(stream),
                attention,
                self._traffic(stream, query, key),
                stream.gather + stream.reduce,
            ),
            recomputed=Work((), attention) if is_selective else Work(),
            backward_collectives=stream.gather + stream.reduce + stream.gather,
            saved=kept if is_selective else kept + inside,
            working=scores if is_selective else KeptMemory(),
            resident=KeptMemory(2 * stream.seq * self.rotary),  # tables of cosines and sines
        )

    def _kept(self, query: int, key: int) -> KeptMemory:
        """Return the memory kept outside the attention."""
        kept = KeptMemory(query + key + key + query)  # query, key, value and the attention's output
        if self.qk_norm is not None:  # the norms' inputs; their outputs are rotated at once
            kept += self.qk_norm.kept(query + key, self.head_size)
        return kept

    def _traffic(self, stream: Stream, query: int, key: int) -> int:
        traffic = 0
        rotated = query + key
        if self.bias or self.qkv_bias:
            traffic += 2 * (query + key + key)
        if self.qk_norm is not None:
            traffic += 2 * rotated
        if self.rotary:
            # x cos + rotated x sin, in five operators; then a cat with the other features.
            traffic += 11 * rotated * self.rotary // self.head_size
            traffic += 2 * rotated if self.rotary < self.head_size else 0
        if self.bias or self.output_bias:
            traffic += 2 * stream.part
        return traffic

    def _matmuls(self, stream: Stream) -> tuple[MatMul, ...]:
        m = stream.tokens
        hidden = stream.hidden
        query = stream.share(self.heads) * self.head_size
        key = stream.share(self.kv_heads) * self.head_size
        widths = [query + key + key] if self.fused_qkv else [query, key, key]
        inputs = [MatMul(m, hidden, width) for width in widths]
        return (*inputs, MatMul(m, query, hidden))

    def _attention(self, stream: Stream) -> Attention:
        heads = stream.share(self.heads)
        kv_heads = stream.share(self.kv_heads)
        return Attention(stream.batch, heads, kv_heads, stream.seq, self.head_size, self.window)


@dataclass(frozen=True)
class ExpertsCost:
    """The cost of a router, the experts of each token, and a shared one; loads are even."""

    experts: int
    """Experts of the layer."""
    chosen: int
    """Experts of each token."""
    inner: int
    """Inner width of an expert, of all tp ranks."""
    normalised: bool = False
    """A token's weights are divided by their sum."""
    shared: int = 0
    """Inner width of the shared expert, or 0."""

    def __call__(self, stream: Stream, recompute: Recompute) -> LayerCost:
        """Return the cost of one microbatch; "selective" recomputes nothing."""
        tokens = stream.tokens
        full = stream.full
        rows = tokens * self.chosen
        scores = tokens * self.experts
        sent = rows * stream.hidden  # elements of the tokens, sorted by expert
        inner = rows * stream.share(self.inner)
        shared = tokens * stream.share(self.shared)
        # Under sequence parallelism all tokens, not this rank's.
        # Both factors, the activated one and their product, then times the weights.
        kept = sent + 5 * inner + 4 * shared + full - stream.part
        other = _FP32 * (scores + rows + self.experts) + _INT64 * 3 * rows
        if self.normalised:  # the weights before the division, and their sums
            other += _FP32 * (rows + tokens)
        traffic = 7 * inner + 3 * sent + 2 * full + 5 * scores
        if self.shared:
            traffic += 5 * shared + 3 * full
        # The gradients of both factors; the experts' outputs beside their sum.
        at_activation = 2 * inner + rows
        at_sum = sent + full + scores + self.experts + rows
        if stream.sequence_parallel:
            at_activation += stream.part
            at_sum += stream.part
        else:
            at_activation += 2 * full
        return LayerCost(
            flops_of(self._matmuls(stream._replace(tp=1))),
            Work(self._matmuls(stream), None, traffic, stream.gather + stream.reduce),
            backward_collectives=stream.gather + stream.reduce,
            saved=KeptMemory(kept, other),
            working=KeptMemory(max(at_activation, at_sum)),
        )

    def _matmuls(self, stream: Stream) -> tuple[MatMul, ...]:
        tokens = stream.tokens
        hidden = stream.hidden
        inner = stream.share(self.inner)
        shared = stream.share(self.shared)
        rows = tokens * self.chosen
        groups = gcd(rows, self.experts)  # all experts, if their loads can be equal
        products = [
            MatMul(tokens, hidden, self.experts),
            MatMul(rows // groups, hidden, 2 * inner, groups),
            MatMul(rows // groups, inner, hidden, groups),
        ]
        if shared:
            products += [MatMul(tokens, hidden, 2 * shared), MatMul(tokens, shared, hidden)]
        return tuple(products)
