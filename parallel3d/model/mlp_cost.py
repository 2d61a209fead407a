"""The cost of an MLP on one tensor-parallel rank (floor 0, no torch)."""

from dataclasses import dataclass

from parallel3d.model.recompute import WAITS, parts_of
from parallel3d.model.spec import KeptMemory, LayerCost, MatMul, Recompute, Work
from parallel3d.model.stream import Stream


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
        inner = stream.shape.tokens * stream.share(self.inner)
        # Input and output of the activation; SwiGLU: both factors, the activated one, their
        # product; ReLU: its output.
        kept = (4 if self.gated else 1 if self.relu else 2) * inner
        # The activation, and the product of the factors.
        traffic = activation = (5 if self.gated else 2) * inner
        if self.bias:
            traffic += 2 * self._factors * inner + 2 * stream.part
        parts, recomputed, left = parts_of(recompute), Work(), kept
        if "mlp" in parts:
            left = inner if WAITS in parts else 0
            recomputed = Work(self._matmuls(stream)[:1], None, traffic, stream.gather)
        elif "mlp_act" in parts:
            left = self._factors * inner
            recomputed = Work(traffic=activation)
        return LayerCost(
            sum(m.flops for m in self._matmuls(stream._replace(tp=1))),
            Work(self._matmuls(stream), None, traffic, stream.gather + stream.reduce),
            recomputed,
            backward_collectives=stream.gather + stream.reduce + stream.gather,
            saved=KeptMemory(left),
            working=KeptMemory(kept - left + self._peak(stream, inner, kept)),
        )

    def _peak(self, stream: Stream, inner: int, kept: int) -> int:
        """Return the elements of the backward's fullest moment beyond the kept ones."""
        full, part, gradients = stream.full, stream.part, stream.gradients
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
        return max(at_last_product, at_activation, at_gather, after_first_product)

    def _matmuls(self, stream: Stream) -> tuple[MatMul, ...]:
        m, hidden, inner = stream.shape.tokens, stream.hidden, stream.share(self.inner)
        return MatMul(m, hidden, self._factors * inner), MatMul(m, inner, hidden)
