"""Costs of a transformer's layers on one tensor-parallel rank, as data (no torch).

A family uses `EmbeddingCost`, `BlockCost` and `HeadCost` as its layers' `cost`. They
count the operations of parallel3d/tensor/ and the tensors that autograd keeps; dropout counts only
if its probability is above 0.
"""

from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

from parallel3d.model.module_cost import LAYER_NORM, ExpertsCost, MlpCost, NormCost, Stream
from parallel3d.model.recompute import FULL, NONE, Recompute
from parallel3d.model.spec import (
    Collective,
    KeptMemory,
    LayerCost,
    MatMul,
    Shape,
    Work,
    fullest,
    in_order,
)

_FP32 = 4  # bytes of a logsumexp
_INT64 = 8  # bytes of a row number

LOGITS_AT_ONCE = 2**27
"""Elements; limits a rank to 0.5 GB of fp32 logits at a time, however long the batch."""


class ModuleCost(Protocol):
    """A function from the stream to the cost of a module that adds to it (attention, MLP).

    `working` counts the gradients of stream and output, too (`Stream.gradients`). Under "full"
    recomputation the block asks for "none", and runs again as a whole.
    """

    def __call__(self, stream: Stream, recompute: Recompute) -> LayerCost:
        """Return the cost of one microbatch, with the parts in `recompute` recomputed."""


@dataclass(frozen=True)
class _CostOfLayer:
    """A layer's cost, as a function of the stream through it."""

    hidden: int
    """Width of the residual stream."""

    def __call__(
        self,
        shape: Shape,
        tp: int = 1,
        sequence_parallel: bool = False,
        recompute: Recompute = NONE,
    ) -> LayerCost:
        """Return the cost of one microbatch; `recompute` has an effect on blocks only."""
        split = sequence_parallel and tp > 1
        return known_cost(self, Stream(shape.batch, shape.seq, self.hidden, tp, split), recompute)

    @abstractmethod
    def of(self, stream: Stream, recompute: Recompute) -> LayerCost:
        """Return the cost of one microbatch on its stream."""


@lru_cache(maxsize=2**14)
def known_cost(cost: _CostOfLayer, stream: Stream, recompute: Recompute) -> LayerCost:
    """Return `cost.of`, which a search of plans asks for many times."""
    return cost.of(stream, recompute)


@dataclass(frozen=True)
class BlockCost(_CostOfLayer):
    """The cost of a block: the sum over its modules, each with norm and residual sum."""

    norm: NormCost
    """The norm before each module."""
    modules: tuple[ModuleCost, ...]
    """The modules, first to last."""
    dropout: bool = False
    """Dropout on the outputs of the modules."""

    def of(self, stream: Stream, recompute: Recompute) -> LayerCost:
        """Return the cost of one microbatch on its stream."""
        stream = stream._replace(dropout=self.dropout)
        if recompute == FULL:
            return self._run_again(stream, known_cost(self, stream, NONE))
        parts: list[LayerCost] = []
        for module in self.modules:
            # An MLP that runs again keeps its input, the norm's output; so do experts.
            keeps = isinstance(module, MlpCost) and "mlp" in recompute.parts
            keeps = keeps or isinstance(module, ExpertsCost)
            norm = self.norm(stream, NONE if keeps else recompute)
            parts += [norm, module(stream, recompute)]
            activated = 0
            if isinstance(module, MlpCost) and "mlp_act" in recompute.parts:
                activated = stream.tokens * stream.share(module.inner)
            frees_norm = "layernorm" in recompute.parts and not keeps
            parts.append(_residual_sum(stream, frees_norm, activated))
        return in_order(parts)

    def _run_again(self, stream: Stream, cost: LayerCost) -> LayerCost:
        """Return the cost of keeping the input alone, from the `cost` without recomputation.

        torch stops once all saved tensors exist again: before the last collective, unless a dropout
        follows it.
        """
        full = stream.full
        part = stream.part
        # The recomputation's end: its last sum, and the gradient of the output.
        end = 2 * part
        collectives = cost.forward.collectives
        if stream.dropout:  # it runs to the end
            end += part + (full if stream.sequence_parallel else 0)
        else:
            collectives = collectives[:-1]
            if stream.sequence_parallel:
                # The gradient has been gathered, and the last product is computed again.
                end += 2 * full - part
        own = KeptMemory(part)
        return replace(
            cost,
            recomputed=replace(cost.forward, collectives=collectives),
            saved=own,
            working=cost.saved + fullest(KeptMemory(end), cost.working) - own,
        )


@dataclass(frozen=True)
class EmbeddingCost(_CostOfLayer):
    """The cost of a look-up in a vocabulary-parallel table."""

    positions: bool = False
    """There is a table of learned positions."""
    dropout: bool = False
    """Dropout on the sum of the vectors."""

    def of(self, stream: Stream, recompute: Recompute) -> LayerCost:
        """Return the cost of one microbatch on its stream."""
        full = stream.full
        part = stream.part
        traffic = 4 * full
        # Per token its row and whether another rank holds it; per position its row.
        other = (_INT64 + 1) * stream.tokens
        if self.positions:
            traffic += 3 * part
            other += _INT64 * stream.seq
        if self.dropout:
            traffic += 2 * part
        # The forward's sum with the positions, or the backward's gradients around the dropout.
        besides = part if stream.sequence_parallel or self.dropout else 0
        besides = max(besides, part // stream.batch if self.positions else 0)
        return LayerCost(
            0,
            Work((), None, traffic, stream.reduce),
            backward_collectives=stream.gather,
            saved=KeptMemory(0, other + (part if self.dropout else 0)),
            working=KeptMemory(2 * full + besides, -part if self.dropout else 0),
        )


def _residual_sum(stream: Stream, frees_norm: bool, activated: int) -> LayerCost:
    """Return the cost of dropout(output) + stream: a one-byte mask is kept of the dropout.

    - `frees_norm`: the module's input is recomputed, and freed when the module is done.
    - `activated`: elements of an activation that is recomputed, alive until the last product is
      done.
    """
    part = stream.part
    dropout = stream.dropout
    traffic = 3 * part + (2 * part if dropout else 0)
    working = 0
    if frees_norm:
        working = max(stream.gradients, 2 * part + activated)
    return LayerCost(
        0,
        Work(traffic=traffic),
        saved=KeptMemory(other=part if dropout else 0),
        working=KeptMemory(working),
    )


def num_chunks(tokens: int, vocab: int) -> int:
    """Return the number of parts that the head computes `tokens` in, on a rank with `vocab` rows.

    With one part, the logits' data for the backward is saved; with several it is recomputed.
    """
    return max(1, -(-tokens * vocab // LOGITS_AT_ONCE))


def chunk_tokens(tokens: int, vocab: int) -> int:
    """Return the tokens per part of the head; the last part may have fewer."""
    return -(-tokens // num_chunks(tokens, vocab))


@dataclass(frozen=True)
class HeadCost(_CostOfLayer):
    """The cost of the final norm, the logits and vocabulary-parallel cross-entropy in fp32."""

    vocab: int
    """Rows of the output projection, of all tp ranks."""
    norm: NormCost = LAYER_NORM
    """The norm before the output projection."""
    in_parts: bool = True
    """Large logits are computed for some tokens at a time."""

    def of(self, stream: Stream, recompute: Recompute) -> LayerCost:
        """Return the cost of one microbatch on its stream."""
        return self.norm(stream) + self._loss(stream)

    def _loss(self, stream: Stream) -> LayerCost:
        tokens = stream.tokens
        full = stream.full
        vocab = stream.share(self.vocab)
        split = int(stream.sequence_parallel)
        logits = tokens * vocab
        product = MatMul(tokens, self.hidden, vocab)
        if self.in_parts and num_chunks(tokens, vocab) > 1:
            # Per token: the logsumexp, the row of its label, and two flags: whether another rank
            # holds the row, and whether the token counts.
            saved = KeptMemory(0, (_FP32 + _INT64 + 2) * tokens)
            # A part's logits, also in fp32; the input and its gradient, in full and of this part.
            at_once = chunk_tokens(tokens, vocab)
            besides = (1 + split) * full + 2 * at_once * self.hidden
            working = KeptMemory(at_once * vocab + besides, copies=at_once * vocab)
            recomputed = Work((product,), None, 4 * logits)
        else:
            saved = KeptMemory(logits)  # the gradient of the logits
            # The larger of: the logits in fp32; the input's gradient and the input times the
            # loss's gradient.
            behind = (2 + split) * full
            working = KeptMemory(behind, copies=max(0, logits - behind // 2))
            recomputed = Work()
        collectives = stream.gather
        if stream.tp > 1:
            collectives += (Collective("all_reduce", tokens), Collective("all_reduce", 2 * tokens))
        # Traffic of the logits, in elements of the training type: forward and backward together
        # move 12 (fp32) or 21 (bf16), about three times this, as the backward counts twice.
        traffic = 9 * logits // 2
        return LayerCost(
            tokens * 2 * self.hidden * self.vocab,
            Work((product,), None, traffic, collectives),
            recomputed,
            backward_collectives=stream.reduce + stream.gather,
            saved=saved,
            working=working,
        )
