"""The passes of a cross-entropy over one tensor-parallel rank's logits, [tokens, vocab / tp].

Compiled, they read the logits in the training dtype, otherwise in fp32. No pass allocates another
tensor of the logits' size, except where logits are capped and passes are not compiled.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from parallel3d.tensor.compiled import Pointwise


class Passes(NamedTuple):
    """How the passes over logits are computed.

    - `compiled`: each is one kernel.
    - `softcap`: c, if the cross-entropy is that of the capped logits c tanh(logits / c).
    """

    compiled: bool = False
    softcap: float | None = None


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Return softcap * tanh(logits / softcap), or the logits themselves if it is None."""
    return logits if softcap is None else softcap * (logits / softcap).tanh()


def sum_rows(
    logits: Tensor, here: Tensor, top: Tensor, picked: Tensor, total: Tensor, passes: Passes
) -> None:
    """Write statistics of each row of the logits, [tokens] each.

    - `top`: the maximum.
    - `picked`: the label's logit minus the maximum.
    - `total`: the sum of exp(logit - maximum).

    `here` [tokens] is the label's column, any valid one if this rank does not have it. The logits
    are overwritten: afterwards only `gradient_of` may use them.
    """
    if passes.compiled:
        rows = _rows.compiled(logits, here, passes.softcap)
        for out, values in zip((top, picked, total), rows, strict=True):
            out.copy_(values)
        return
    logits = capped(logits, passes.softcap)
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
    passes: Passes,
) -> Tensor:
    """Return the gradient by the logits, p - 1 at the label and p elsewhere, in their memory.

    The slope of a cap multiplies it.

    - `factor` [tokens]: `sum_rows` has overwritten the logits, and has returned `top`; exponentials
      times `factor` are probabilities.
    - None: the logits are unchanged, and `top` is their logsumexp.

    1 is subtracted before rounding to `dtype`: in bf16 any p above 0.998 rounds to 1.
    """
    softcap = passes.softcap
    if passes.compiled:
        _put_gradient.compiled(logits, top, factor, here, outside, softcap)
        return logits
    slope = None
    if softcap is not None:  # `sum_rows` has overwritten a copy
        logits = capped(logits, softcap)
        slope = slope_of_cap(logits, softcap)
        logits = logits.sub_(top.unsqueeze(-1)).exp_()
    elif factor is None:
        logits = logits.sub_(top.unsqueeze(-1)).exp_()
    probabilities = logits if factor is None else logits.mul_(factor.unsqueeze(-1))
    hit = (~outside).to(probabilities.dtype).unsqueeze(-1)
    gradient = probabilities.scatter_add_(-1, here.unsqueeze(-1), -hit)
    return (gradient if slope is None else gradient.mul_(slope)).to(dtype)


def slope_of_cap(capped_logits: Tensor, softcap: float) -> Tensor:
    """Return the derivative of `capped` where it has these values."""
    return 1 - (capped_logits / softcap).square()


@Pointwise
def _rows(logits: Tensor, here: Tensor, softcap: float | None) -> tuple[Tensor, Tensor, Tensor]:
    logits = capped(logits.float(), softcap)
    top = logits.amax(-1)
    lower = logits - top.unsqueeze(-1)
    picked = lower.gather(-1, here.unsqueeze(-1)).squeeze(-1)
    return top, picked, lower.exp().sum(-1)


@Pointwise
def _put_gradient(
    logits: Tensor,
    top: Tensor,
    factor: Tensor | None,
    here: Tensor,
    outside: Tensor,
    softcap: float | None,
) -> None:
    """Overwrite the logits with their gradient."""
    values = capped(logits.float(), softcap)
    probabilities = (values - top.unsqueeze(-1)).exp()
    if factor is not None:
        probabilities = probabilities * factor.unsqueeze(-1)
    columns = torch.arange(logits.shape[-1], device=logits.device)
    label = (columns == here.unsqueeze(-1)) & ~outside.unsqueeze(-1)  # no scatter: one pass
    gradient = probabilities - label.to(probabilities.dtype)
    if softcap is not None:
        gradient = gradient * slope_of_cap(values, softcap)
    logits.copy_(gradient)
