"""The cost of causal self-attention on one tensor-parallel rank (floor 0, no torch)."""

from dataclasses import dataclass

from parallel3d.model.norm_cost import NormCost
from parallel3d.model.recompute import parts_of
from parallel3d.model.spec import Attention, KeptMemory, LayerCost, MatMul, Recompute, Work
from parallel3d.model.stream import Stream

BLOCK = 128  # queries that share the mask of a window, without a kernel that has windows
SINK_SIZE = 8  # features that a sink adds to a head; fewer would misalign fused kernels
_FP32 = 4  # bytes of a logsumexp


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
    sinks: bool = False
    """Each head has a sink (`tensor/documents.py`)."""

    def __call__(self, stream: Stream, recompute: Recompute) -> LayerCost:
        """Return the cost of one microbatch; "core_attn" is what is inside the attention.

        It has no moment of its own: what later modules saved is free in its backward, and is more.
        """
        query, key = self._elements(stream)
        kept = self._kept(query, key)
        attention = self._attention(stream)
        batch, heads, _, seq, size, _ = attention
        num_scores = batch * heads * seq * min(seq, attention.keys + BLOCK)
        scores = KeptMemory(scores=num_scores, dropped_scores=num_scores if self.dropout else 0)
        inside = scores + KeptMemory(other=_FP32 * batch * heads * seq)  # the logsumexp
        if self.sinks:  # wider copies of query, key, value and output; the output is cut out again
            copies = 2 * (query + key) * seq * size // (stream.shape.seq * self.head_size)
            inside += KeptMemory(copies - query - key - key)
        copied = 2 * (query + key + key + query) if self.sinks else 0
        is_selective = "core_attn" in parts_of(recompute)
        # A key/value head on several tp ranks counts once.
        one = stream._replace(tp=1)
        flops = sum(m.flops for m in self._matmuls(one)) + self._attention(one).flops
        return LayerCost(
            flops,
            Work(
                self._matmuls(stream),
                attention,
                self._traffic(stream, query, key) + copied,
                stream.gather + stream.reduce,
            ),
            recomputed=Work((), attention, copied) if is_selective else Work(),
            backward_collectives=stream.gather + stream.reduce + stream.gather,
            saved=kept if is_selective else kept + inside,
            working=scores if is_selective else KeptMemory(),
            resident=KeptMemory(2 * stream.shape.seq * self.rotary),  # tables of cosines and sines
        )

    def _elements(self, stream: Stream) -> tuple[int, int]:
        """Return the elements of this rank's queries, and of its keys or its values."""
        each = stream.shape.tokens * self.head_size
        return each * stream.share(self.heads), each * stream.share(self.kv_heads)

    def _kept(self, query: int, key: int) -> KeptMemory:
        """Return the memory kept outside the attention."""
        kept = KeptMemory(query + key + key + query)  # query, key, value and the attention's output
        if self.fused_qkv and self.rotary:
            # Value keeps the fused tensor alive, beside rotated query and key.
            kept += KeptMemory(query + key)
        if self.qk_norm is not None:  # the norms' inputs; their outputs are rotated at once
            kept += self.qk_norm.kept(query + key, self.head_size)
        return kept

    def _traffic(self, stream: Stream, query: int, key: int) -> int:
        traffic, rotated = 0, query + key
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
        m, hidden = stream.shape.tokens, stream.hidden
        query = stream.share(self.heads) * self.head_size
        key = stream.share(self.kv_heads) * self.head_size
        widths = (query + key + key,) if self.fused_qkv else (query, key, key)
        return *(MatMul(m, hidden, width) for width in widths), MatMul(m, query, hidden)

    def _attention(self, stream: Stream) -> Attention:
        heads, kv_heads = stream.share(self.heads), stream.share(self.kv_heads)
        batch, sink = stream.shape.batch, int(self.sinks)  # one token more, of a wider head
        seq, size = stream.shape.seq + sink, self.head_size + SINK_SIZE * sink
        return Attention(batch, heads, kv_heads, seq, size, self.window and self.window + sink)
