"""Embedding and cross-entropy over a vocabulary that is cut over a tensor-parallel group.

A vocabulary that the group does not divide is cut into parts that differ by one row: there is no
padding, so none can win, move the loss or be saved.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from parallel3d.tensor.collectives import all_reduce, reduce_from_group
from parallel3d.tensor.cut import cut_of, cut_parameter, even_split


def _local(tokens: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Token ids counted from `start`, and a mask of those outside [start, stop) (their id is 0)."""
    outside = (tokens < start) | (tokens >= stop)
    return (tokens - start).masked_fill(outside, 0), outside


class VocabParallelEmbedding(nn.Module):
    """Token ids [...] -> vectors [..., size], with the rows of the table cut over the group."""

    def __init__(
        self,
        vocab_size: int,
        size: int,
        group: dist.ProcessGroup,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.group, self.sequence_parallel = group, sequence_parallel
        self.weight = cut_parameter((vocab_size, size), 0, group)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [..., seq] (int64), the same on each rank of the group -> [..., seq, size], too.

        Under sequence parallelism this rank's part of it, [..., seq / tp, size].
        """
        cut = cut_of(self.weight)
        local, outside = _local(tokens, cut.start, cut.stop)
        vectors = F.embedding(local, self.weight).masked_fill(outside.unsqueeze(-1), 0.0)
        return reduce_from_group(vectors, self.group, self.sequence_parallel)

    def extra_repr(self) -> str:
        return f"{cut_of(self.weight).global_shape}, vocabulary / {self.group.size()}"


class _CrossEntropy(torch.autograd.Function):
    """-log softmax at the label from this rank's slice of the logits, computed in fp32.

    Three all-reduces of one number a token (the maximum, the label's logit, the sum of the
    exponentials); the whole row of logits exists on no rank.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, start: int, group: dist.ProcessGroup
    ) -> Tensor:
        """logits [..., vocab / tp], whose first column is token `start`; labels [...] -> [...]."""
        top = all_reduce(logits.amax(-1).float(), group, dist.ReduceOp.MAX)
        shifted = logits.float() - top.unsqueeze(-1)
        local, outside = _local(labels, start, start + logits.shape[-1])
        picked = shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(outside, 0.0)
        probabilities = shifted.exp_()
        sums = torch.stack((probabilities.sum(-1), picked))
        total, picked = all_reduce(sums, group)
        # The gradient, p - 1 at the label and p elsewhere. It is taken before it is rounded: in
        # bf16 any p above 0.998 is 1, and what a confident label still teaches would be lost.
        gradient = probabilities.div_(total.unsqueeze(-1))
        hit = (~outside).to(gradient.dtype).unsqueeze(-1)
        gradient.scatter_add_(-1, local.unsqueeze(-1), -hit)
        ctx.save_for_backward(gradient.to(logits.dtype))
        return total.log() - picked

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        scaled = torch.mul(gradient, grad.unsqueeze(-1), out=torch.empty_like(gradient))
        return scaled, None, None, None


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, vocab_size: int, group: dist.ProcessGroup
) -> Tensor:
    """The cross-entropy in nats of each token, in fp32.

    `logits` [..., vocab / tp] is this rank's slice of a vocabulary of `vocab_size`; `labels` [...]
    are global token ids. Gives [...], the same on each rank of the group.
    """
    start, stop = even_split(vocab_size, group.size(), group.rank())
    assert logits.shape[-1] == stop - start, (logits.shape, start, stop)
    result: Tensor = _CrossEntropy.apply(logits, labels, start, group)
    return result
