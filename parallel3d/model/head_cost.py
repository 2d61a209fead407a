"""The cost of a transformer's last layer on one tensor-parallel rank (floor 0, no torch).

In the formulas `whole` is batch x seq x hidden elements, and `part` what of it lies on one rank
before the layer: a tp-th under sequence parallelism.
"""

from dataclasses import dataclass
from functools import lru_cache

from parallel3d.model.spec import Collective, Kept, LayerCost, MatMul, Recompute, Shape, Work

_FP32, _INT64 = 4, 8  # bytes of a statistic or a logsumexp, of a row number

LOGITS_AT_ONCE = 2**27
"""Elements: however long a batch, a rank has 0.5 GB of logits in fp32 at a time."""


def num_chunks(tokens: int, vocab: int) -> int:
    """Number of parts that the head computes `tokens` in, on a rank with `vocab` rows.

    In one, what backward needs of the logits is kept; in several it is computed again.
    """
    return max(1, -(-tokens * vocab // LOGITS_AT_ONCE))


def chunk_tokens(tokens: int, vocab: int) -> int:
    """Tokens of each part that the head computes in; the last part may have fewer."""
    return -(-tokens // num_chunks(tokens, vocab))


@dataclass(frozen=True)
class HeadCost:
    """The cost of the final norm, the logits and vocabulary-parallel cross-entropy in fp32."""

    hidden: int
    vocab: int
    statistics: int = 2
    composite_norm: bool = False
    in_parts: bool = True  # where there are many logits, those of some tokens at a time

    def __call__(
        self,
        shape: Shape,
        tp: int = 1,
        sequence_parallel: bool = False,
        recompute: Recompute = "none",
    ) -> LayerCost:
        """The cost of one microbatch; nothing of it is computed again."""
        return _head(self, shape, tp, sequence_parallel and tp > 1)


@lru_cache(maxsize=4096)
def _head(c: HeadCost, shape: Shape, tp: int, sequence_parallel: bool) -> LayerCost:
    vocab, split = -(-c.vocab // tp), int(sequence_parallel)
    whole, logits = shape.tokens * c.hidden, shape.tokens * vocab
    part = whole // tp if sequence_parallel else whole
    product = MatMul(shape.tokens, c.hidden, vocab)
    loss = (Collective("all_reduce", shape.tokens), Collective("all_reduce", 2 * shape.tokens))
    gather: tuple[Collective, ...] = ()
    backward: tuple[Collective, ...] = (Collective("all_reduce", whole),) if tp > 1 else ()
    if sequence_parallel:
        gather = (Collective("all_gather", whole),)
        backward = (Collective("reduce_scatter", whole), *gather)
    # The input and its norm.
    saved = Kept(
        2 * part, _FP32 * c.statistics * (part // c.hidden), unfused=part if c.composite_norm else 0
    )
    if c.in_parts and num_chunks(shape.tokens, vocab) > 1:
        # For each token the logsumexp, the row of its label, whether another rank holds it, and
        # whether it counts.
        saved += Kept(0, (_FP32 + _INT64 + 2) * shape.tokens)
        # A part's logits, in fp32 too; the input and its gradient, and this part of both.
        tokens = chunk_tokens(shape.tokens, vocab)
        besides = (1 + split) * whole + 2 * tokens * c.hidden
        working = Kept(tokens * vocab + besides, copies=tokens * vocab)
        recomputed = Work((product,), None, 4 * logits)
    else:
        saved += Kept(logits)  # their gradient
        # Either the logits in fp32, or the input's gradient and the input times that of the loss.
        behind = (2 + split) * whole
        working, recomputed = Kept(behind, copies=max(0, logits - behind // 2)), Work()
    return LayerCost(
        shape.tokens * 2 * c.hidden * c.vocab,
        # The logits, in elements of the training type: all passes of forward and backward are
        # 12 (fp32) or 21 (bf16), and about three times this, as the backward counts twice.
        Work((product,), None, 2 * part + 9 * logits // 2, (*gather, *(loss if tp > 1 else ()))),
        recomputed,
        backward_collectives=backward,
        saved=saved,
        working=working,
    )
