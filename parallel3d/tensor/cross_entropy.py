"""The passes of a cross-entropy over one tensor-parallel rank's logits, [tokens, vocab / tp].

Compiled, they read the logits in the training dtype, otherwise in fp32. No pass allocates another
tensor of the logits' size.
"""

import torch
from torch import Tensor

from parallel3d.tensor.compiled import Pointwise


def sum_rows(
    logits: Tensor, here: Tensor, top: Tensor, picked: Tensor, total: Tensor, compiled: bool
) -> None:
    """Write statistics of each row of the logits, [tokens] each.

    - `top`: the maximum.
    - `picked`: the label's logit minus the maximum.
    - `total`: the sum of exp(logit - maximum).

    `here` [tokens] is the label's column, any valid one if this rank does not have it. The logits
    are overwritten: afterwards only `gradient_of` may use them.
    """
    if compiled:
        for out, values in zip((top, picked, total), _rows.compiled(logits, here), strict=True):
            out.copy_(values)
        return
    torch.amax(logits, -1, out=top)
    logits.sub_(top.unsqueeze(-1))
    picked.copy_(logits.gather(-1, here.unsqueeze(-1)).squeeze(-1))
    torch.sum(logits.exp_(), -1, out=total)


def gradient_of(
    logits: Tensor,
    top: Tensor,
    factor: Tensor | None,
    here: Tensor,
    outside: Tensor,
    dtype: torch.dtype,
    compiled: bool,
) -> Tensor:
    """Return the gradient by the logits, p - 1 at the label and p elsewhere, in their memory.

    - `factor` [tokens]: `sum_rows` has overwritten the logits, and has returned `top`; exponentials
      times `factor` are probabilities.
    - None: the logits are unchanged, and `top` is their logsumexp.

    1 is subtracted before rounding to `dtype`: in bf16 any p above 0.998 rounds to 1.
    """
    if compiled:
        _put_gradient.compiled(logits, top, factor, here, outside)
        return logits
    if factor is None:
        probabilities = logits.sub_(top.unsqueeze(-1)).exp_()
    else:
        probabilities = logits.mul_(factor.unsqueeze(-1))
    hit = (~outside).to(probabilities.dtype).unsqueeze(-1)
    return probabilities.scatter_add_(-1, here.unsqueeze(-1), -hit).to(dtype)


@Pointwise
def _rows(logits: Tensor, here: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = logits.float()
    top = logits.amax(-1)
    lower = logits - top.unsqueeze(-1)
    picked = lower.gather(-1, here.unsqueeze(-1)).squeeze(-1)
    return top, picked, lower.exp().sum(-1)


@Pointwise
def _put_gradient(
    logits: Tensor, top: Tensor, factor: Tensor | None, here: Tensor, outside: Tensor
) -> None:
    """Overwrite the logits with their gradient."""
    probabilities = (logits.float() - top.unsqueeze(-1)).exp()
    if factor is not None:
        probabilities = probabilities * factor.unsqueeze(-1)
    columns = torch.arange(logits.shape[-1], device=logits.device)
    label = (columns == here.unsqueeze(-1)) & ~outside.unsqueeze(-1)  # no scatter: one pass
    logits.copy_(probabilities - label.to(probabilities.dtype))
