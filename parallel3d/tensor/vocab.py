"""Embedding, output projection and loss with the vocabulary cut over a tensor-parallel group.

If the group's size does not divide the vocabulary, parts differ by one row. There is no padding
that could be predicted, change the loss or be saved.
"""

import torch.nn.functional as F
from torch import Tensor

from parallel3d.tensor.collectives import reduce_from_group
from parallel3d.tensor.context import LayerContext
from parallel3d.tensor.cross_entropy import capped
from parallel3d.tensor.cut import CutModule, cut_of, cut_parameter
from parallel3d.tensor.loss import local_ids, vocab_parallel_loss
from parallel3d.tensor.product import column_linear

IGNORED = -100
"""The label of a token that does not count, as in torch's cross-entropy."""


class VocabParallelEmbedding(CutModule):
    """Token ids [...] -> vectors [..., size], with the rows of the table cut over the group."""

    def __init__(self, vocab_size: int, size: int, *, context: LayerContext) -> None:
        super().__init__()
        self.context = context
        self.weight = cut_parameter((vocab_size, size), tensor=(0, context.group))

    def forward(self, tokens: Tensor) -> Tensor:
        """Embed tokens [..., seq] (int64), replicated over the group -> [..., seq, size].

        Under sequence parallelism return this rank's part, [..., seq / tp, size].
        """
        local, outside = local_ids(tokens, *cut_of(self.weight).bounds[0])
        vectors = F.embedding(local, self.weight).masked_fill(outside.unsqueeze(-1), 0.0)
        return reduce_from_group(vectors, self.context)


class VocabParallelOutput(CutModule):
    """Vectors [..., size] and labels -> loss, with the weight's rows cut like an embedding's.

    - `bias`: each word has one, cut like the rows.
    - `softcap`: c, if the logits become c tanh(logits / c).
    """

    def __init__(
        self,
        vocab_size: int,
        size: int,
        *,
        context: LayerContext,
        bias: bool = False,
        softcap: float | None = None,
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.context = context
        self.softcap = softcap
        cut = (0, context.group)
        self.weight = cut_parameter((vocab_size, size), tensor=cut)
        self.bias = cut_parameter((vocab_size,), tensor=cut) if bias else None

    def forward(self, x: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the mean loss [] in nats, or in evaluation each token's loss [batch, seq].

        - `x`: [batch, seq, size], or this rank's part of the sequence.
        - `labels`: [batch, seq]; a label IGNORED has a loss of 0.
        - `weights` [batch, seq]: return the sum of the losses times these instead of the mean.
        """
        losses = vocab_parallel_loss(
            x,
            self.weight,
            labels,
            vocab_size=self.vocab_size,
            context=self.context,
            bias=self.bias,
            softcap=self.softcap,
        ).masked_fill(labels == IGNORED, 0.0)
        if not self.training:
            return losses
        return losses.mean() if weights is None else (losses * weights).sum()

    def logits(self, x: Tensor) -> Tensor:
        """x [..., size], or its part of the sequence -> this rank's logits [..., vocab / tp]."""
        (logits,) = column_linear(x, [self.weight], self.context)
        if self.bias is not None:
            logits.add_(self.bias)
        return capped(logits, self.softcap)
