"""The passes of a cross-entropy over its logits, [tokens, vocab / tp] of one tensor-parallel rank.

Compiled they read the logits as the product gave them, else in fp32; nothing of their size is made.
"""

import torch
from torch import Tensor

from parallel3d.tensor.compiled import compiles_pointwise, pointwise


def ready(logits: Tensor) -> Tensor:
    """Make a fresh product's logits what the functions below take: in fp32, or as they are."""
    return logits if compiles_pointwise() else logits.float()


def sum_rows(logits: Tensor, here: Tensor, top: Tensor, picked: Tensor, total: Tensor) -> None:
    """Write into [tokens] each the maximum, the label's logit and the sum of the exponentials.

    The last two are of logits less the maximum. `here` [tokens]: the row of a label, any if this
    rank has none. The logits are spent: only `gradient_of_spent` may take them.
    """
    if compiles_pointwise():
        for place, found in zip((top, picked, total), _rows(logits, here), strict=True):
            place.copy_(found)
        return
    torch.amax(logits, -1, out=top)
    logits.sub_(top.unsqueeze(-1))
    picked.copy_(logits.gather(-1, here.unsqueeze(-1)).squeeze(-1))
    torch.sum(logits.exp_(), -1, out=total)


def gradient_of_spent(
    logits: Tensor, top: Tensor, factor: Tensor, here: Tensor, outside: Tensor, dtype: torch.dtype
) -> Tensor:
    """The gradient of the logits that `sum_rows` took, p - 1 at the label and p elsewhere.

    `top` is what it found; `factor` [tokens] makes probabilities of exponentials. It is taken
    before it is rounded to `dtype`: in bf16 any p above 0.998 is 1.
    """
    if compiles_pointwise():
        _put_gradient(logits, top, factor, here, outside)
        return logits
    return _less_one_at(logits.mul_(factor.unsqueeze(-1)), here, outside).to(dtype)


def gradient_of(
    logits: Tensor, normaliser: Tensor, here: Tensor, outside: Tensor, dtype: torch.dtype
) -> Tensor:
    """The gradient by logits that are as `ready` made them, by their logsumexp, [tokens]."""
    if compiles_pointwise():
        _put_gradient(logits, normaliser, None, here, outside)
        return logits
    probabilities = logits.sub_(normaliser.unsqueeze(-1)).exp_()
    return _less_one_at(probabilities, here, outside).to(dtype)


def _less_one_at(probabilities: Tensor, here: Tensor, outside: Tensor) -> Tensor:
    """The gradient of the logits in the place of the probabilities."""
    hit = (~outside).to(probabilities.dtype).unsqueeze(-1)
    return probabilities.scatter_add_(-1, here.unsqueeze(-1), -hit)


@pointwise
def _rows(logits: Tensor, here: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = logits.float()
    top = logits.amax(-1)
    lower = logits - top.unsqueeze(-1)
    picked = lower.gather(-1, here.unsqueeze(-1)).squeeze(-1)
    return top, picked, lower.exp().sum(-1)


@pointwise
def _put_gradient(
    logits: Tensor, top: Tensor, factor: Tensor | None, here: Tensor, outside: Tensor
) -> None:
    """Write the gradient in the place of the logits."""
    probabilities = (logits.float() - top.unsqueeze(-1)).exp()
    if factor is not None:
        probabilities = probabilities * factor.unsqueeze(-1)
    columns = torch.arange(logits.shape[-1], device=logits.device)
    label = (columns == here.unsqueeze(-1)) & ~outside.unsqueeze(-1)  # no scatter: one pass
    logits.copy_(probabilities - label.to(probabilities.dtype))
