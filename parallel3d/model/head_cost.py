"""The cost of a transformer's last layer on one tensor-parallel rank (floor 0, no torch).

In the formulas `full` is batch x seq x hidden elements. `part` is the share of one rank before the
layer: a tp-th under sequence parallelism.
"""

from dataclasses import dataclass
from functools import lru_cache

from parallel3d.model.spec import Collective, KeptMemory, LayerCost, MatMul, Recompute, Shape, Work

_FP32, _INT64 = 4, 8  # bytes: of a statistic or a logsumexp; of a row number

LOGITS_AT_ONCE = 2**27
"""Elements; limits a rank to 0.5 GB of fp32 logits at a time, however long the batch."""


def num_chunks(tokens: int, vocab: int) -> int:
    """Return the number of parts that the head computes `tokens` in, on a rank with `vocab` rows.

    With one part, the logits' data for the backward is saved; with several it is recomputed.
    """
    return max(1, -(-tokens * vocab // LOGITS_AT_ONCE))


def chunk_tokens(tokens: int, vocab: int) -> int:
    """Return the tokens per part of the head; the last part may have fewer."""
    return -(-tokens // num_chunks(tokens, vocab))


@dataclass(frozen=True)
class HeadCost:
    """The cost of the final norm, the logits and vocabulary-parallel cross-entropy in fp32."""

    hidden: int
    vocab: int
    statistics: int = 2
    composite_norm: bool = False
    in_parts: bool = True  # compute large logits for some tokens at a time

    def __call__(
        self,
        shape: Shape,
        tp: int = 1,
        sequence_parallel: bool = False,
        recompute: Recompute = "none",
    ) -> LayerCost:
        """Return the cost of one microbatch; `recompute` has no effect on the head."""
        return _head(self, shape, tp, sequence_parallel and tp > 1)


@lru_cache(maxsize=4096)
def _head(c: HeadCost, shape: Shape, tp: int, sequence_parallel: bool) -> LayerCost:
    vocab, split = -(-c.vocab // tp), int(sequence_parallel)
    full, logits = shape.tokens * c.hidden, shape.tokens * vocab
    part = full // tp if sequence_parallel else full
    product = MatMul(shape.tokens, c.hidden, vocab)
    loss = (Collective("all_reduce", shape.tokens), Collective("all_reduce", 2 * shape.tokens))
    gather: tuple[Collective, ...] = ()
    backward: tuple[Collective, ...] = (Collective("all_reduce", full),) if tp > 1 else ()
    if sequence_parallel:
        gather = (Collective("all_gather", full),)
        backward = (Collective("reduce_scatter", full), *gather)
    # The input and the norm's output.
    saved = KeptMemory(
        2 * part, _FP32 * c.statistics * (part // c.hidden), unfused=part if c.composite_norm else 0
    )
    if c.in_parts and num_chunks(shape.tokens, vocab) > 1:
        # Per token: the logsumexp, the row of its label, and two flags: whether another rank holds
        # the row, and whether the token counts.
        saved += KeptMemory(0, (_FP32 + _INT64 + 2) * shape.tokens)
        # A part's logits, also in fp32; the input and its gradient, in full and of this part.
        tokens = chunk_tokens(shape.tokens, vocab)
        besides = (1 + split) * full + 2 * tokens * c.hidden
        working = KeptMemory(tokens * vocab + besides, copies=tokens * vocab)
        recomputed = Work((product,), None, 4 * logits)
    else:
        saved += KeptMemory(logits)  # the gradient of the logits
        # The larger of: the logits in fp32; the input's gradient and the input times the loss's
        # gradient.
        behind = (2 + split) * full
        working, recomputed = KeptMemory(behind, copies=max(0, logits - behind // 2)), Work()
    return LayerCost(
        shape.tokens * 2 * c.hidden * c.vocab,
        # Traffic of the logits, in elements of the training type: forward and backward together
        # move 12 (fp32) or 21 (bf16), about three times this, as the backward counts twice.
        Work((product,), None, 2 * part + 9 * logits // 2, (*gather, *(loss if tp > 1 else ()))),
        recomputed,
        backward_collectives=backward,
        saved=saved,
        working=working,
    )
