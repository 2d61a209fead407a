"""The cost of a transformer's last layer on one tensor-parallel rank (floor 0, no torch)."""

from dataclasses import dataclass
from functools import lru_cache

from parallel3d.model.norm_cost import LAYER_NORM, NormCost
from parallel3d.model.spec import Collective, KeptMemory, LayerCost, MatMul, Recompute, Shape, Work
from parallel3d.model.stream import Stream

_FP32, _INT64 = 4, 8  # bytes: of a logsumexp; of a row number

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
    """Width of the residual stream."""
    vocab: int
    """Rows of the output projection, of all tp ranks."""
    norm: NormCost = LAYER_NORM
    """The norm before the output projection."""
    in_parts: bool = True
    """Large logits are computed for some tokens at a time."""

    def __call__(
        self,
        shape: Shape,
        tp: int = 1,
        sequence_parallel: bool = False,
        recompute: Recompute = "none",
    ) -> LayerCost:
        """Return the cost of one microbatch; `recompute` has no effect on the head."""
        return _head(self, Stream(shape, self.hidden, tp, sequence_parallel and tp > 1))


@lru_cache(maxsize=4096)
def _head(c: HeadCost, stream: Stream) -> LayerCost:
    return c.norm(stream) + _loss(c, stream)


def _loss(c: HeadCost, stream: Stream) -> LayerCost:
    tokens, full, vocab = stream.shape.tokens, stream.full, stream.share(c.vocab)
    split, logits = int(stream.sequence_parallel), tokens * vocab
    product = MatMul(tokens, c.hidden, vocab)
    loss = (Collective("all_reduce", tokens), Collective("all_reduce", 2 * tokens))
    if c.in_parts and num_chunks(tokens, vocab) > 1:
        # Per token: the logsumexp, the row of its label, and two flags: whether another rank holds
        # the row, and whether the token counts.
        saved = KeptMemory(0, (_FP32 + _INT64 + 2) * tokens)
        # A part's logits, also in fp32; the input and its gradient, in full and of this part.
        at_once = chunk_tokens(tokens, vocab)
        besides = (1 + split) * full + 2 * at_once * c.hidden
        working = KeptMemory(at_once * vocab + besides, copies=at_once * vocab)
        recomputed = Work((product,), None, 4 * logits)
    else:
        saved = KeptMemory(logits)  # the gradient of the logits
        # The larger of: the logits in fp32; the input's gradient and the input times the loss's
        # gradient.
        behind = (2 + split) * full
        working, recomputed = KeptMemory(behind, copies=max(0, logits - behind // 2)), Work()
    return LayerCost(
        tokens * 2 * c.hidden * c.vocab,
        # Traffic of the logits, in elements of the training type: forward and backward together
        # move 12 (fp32) or 21 (bf16), about three times this, as the backward counts twice.
        Work((product,), None, 9 * logits // 2, (*stream.gather, *(loss if stream.tp > 1 else ()))),
        recomputed,
        backward_collectives=stream.reduce + stream.gather,
        saved=saved,
        working=working,
    )
