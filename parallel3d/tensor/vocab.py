"""A vocabulary that is cut over a tensor-parallel group: its embedding, output and loss.

A vocabulary that the group does not divide is cut into parts that differ by one row: there is no
padding, so none can win, move the loss or be saved.
"""

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from parallel3d.tensor.collectives import reduce_from_group
from parallel3d.tensor.context import LayerContext
from parallel3d.tensor.cut import cut_of, cut_parameter
from parallel3d.tensor.loss import local_ids, vocab_parallel_loss
from parallel3d.tensor.product import column_linear

IGNORED = -100
"""The label of a token that does not count, as torch's cross-entropy has it."""


class VocabParallelEmbedding(nn.Module):
    """Token ids [...] -> vectors [..., size], with the rows of the table cut over the group."""

    def __init__(
        self, vocab_size: int, size: int, group: dist.ProcessGroup, sequence_parallel: bool = False
    ) -> None:
        super().__init__()
        self.group, self.sequence_parallel = group, sequence_parallel
        self.weight = cut_parameter((vocab_size, size), 0, group)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [..., seq] (int64), the same on each rank of the group -> [..., seq, size], too.

        Under sequence parallelism this rank's part of it, [..., seq / tp, size].
        """
        cut = cut_of(self.weight)
        local, outside = local_ids(tokens, cut.start, cut.stop)
        vectors = F.embedding(local, self.weight).masked_fill(outside.unsqueeze(-1), 0.0)
        return reduce_from_group(vectors, self.group, self.sequence_parallel)

    def extra_repr(self) -> str:
        return f"{cut_of(self.weight).global_shape}, vocabulary / {self.group.size()}"


class VocabParallelOutput(nn.Module):
    """Vectors [..., size] and labels -> loss, with the weight's rows cut like an embedding's."""

    def __init__(self, vocab_size: int, size: int, context: LayerContext) -> None:
        super().__init__()
        self.vocab_size, self.group = vocab_size, context.group
        self.sequence_parallel = context.sequence_parallel
        self.weight = cut_parameter((vocab_size, size), 0, context.group)

    def forward(self, x: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        """x [batch, seq, size], or its part of the sequence; labels [batch, seq] -> nats, [].

        The mean over all tokens; with `weights` [batch, seq] the sum of the losses times these. A
        label IGNORED has no loss. In evaluation the loss of each token, [batch, seq]: it is counted
        by document.
        """
        losses = vocab_parallel_loss(
            x,
            self.weight,
            labels,
            vocab_size=self.vocab_size,
            group=self.group,
            sequence_parallel=self.sequence_parallel,
        ).masked_fill(labels == IGNORED, 0.0)
        if not self.training:
            return losses
        return losses.mean() if weights is None else (losses * weights).sum()

    def logits(self, x: Tensor) -> Tensor:
        """x [..., size], or its part of the sequence -> this rank's logits [..., vocab / tp]."""
        return column_linear(x, [self.weight], self.group, self.sequence_parallel)[0]

    def extra_repr(self) -> str:
        return f"{cut_of(self.weight).global_shape}, vocabulary / {self.group.size()}"
