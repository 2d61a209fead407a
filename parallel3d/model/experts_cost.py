"""The cost of routed experts on one tensor-parallel rank (floor 0, no torch)."""

from dataclasses import dataclass
from math import gcd

from parallel3d.model.spec import KeptMemory, LayerCost, MatMul, Recompute, Work
from parallel3d.model.stream import Stream

_FP32, _INT64 = 4, 8  # bytes of a score and of a row number


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
        tokens, full = stream.shape.tokens, stream.full
        rows, scores = tokens * self.chosen, tokens * self.experts
        sent = rows * stream.hidden  # elements of the tokens, sorted by expert
        inner, shared = (w * n for w, n in zip(self._widths(stream), (rows, tokens), strict=True))
        # Under sequence parallelism all tokens, not this rank's.
        # Both factors, the activated one and their product, then times the weights.
        kept = sent + 5 * inner + 4 * shared + full - stream.part
        other = _FP32 * (scores + rows + self.experts) + _INT64 * 3 * rows
        if self.normalised:  # what was divided, and by what
            other += _FP32 * (rows + tokens)
        traffic = 7 * inner + 3 * sent + 2 * full + 5 * scores
        if self.shared:
            traffic += 5 * shared + 3 * full
        part = stream.part if stream.sequence_parallel else 0
        # The gradients of both factors; the experts' outputs beside their sum.
        at_activation = 2 * inner + rows + (part or 2 * full)
        at_sum = sent + full + part + scores + self.experts + rows
        return LayerCost(
            sum(m.flops for m in self._matmuls(stream._replace(tp=1))),
            Work(self._matmuls(stream), None, traffic, stream.gather + stream.reduce),
            backward_collectives=stream.gather + stream.reduce,
            saved=KeptMemory(kept, other),
            working=KeptMemory(max(at_activation, at_sum)),
        )

    def _widths(self, stream: Stream) -> tuple[int, int]:
        """Return this rank's inner width of an expert, and of the shared one."""
        return stream.share(self.inner), stream.share(self.shared)

    def _matmuls(self, stream: Stream) -> tuple[MatMul, ...]:
        tokens, hidden, (inner, shared) = stream.shape.tokens, stream.hidden, self._widths(stream)
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
