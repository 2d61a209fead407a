"""Losses of a router: the balance of its loads (arXiv:2101.03961), and its z-loss."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.tensor.collectives import mean_over_group
from parallel3d.tensor.side_loss import SideLoss

BalanceForm = Literal["microbatch", "sequence", "pooled"]
"""The tokens over which loads and scores are compared: those of a microbatch in one layer, those of
each sequence, or those of a microbatch in all layers of a stage."""


class RouterLosses(NamedTuple):
    """The losses that a router adds to the training loss.

    - `coefficients`: of "balance" and "z"; a loss with 0 is left out.
    - `form`: of the balance loss.
    - `samples`: the ranks that share the tokens of each sample; None: one rank has them all.
    - `alike`: ranks that compute the same losses, and whose gradients of the router are summed.
    """

    coefficients: Mapping[str, float]
    form: BalanceForm
    samples: dist.ProcessGroup | None = None
    alike: int = 1

    def of(self, logits: Tensor, shares: Tensor, chosen: Tensor, batch: int) -> dict[str, SideLoss]:
        """Return the losses of `batch` sequences, by name.

        - `logits`, `shares` [tokens, experts]: the shares of a token have the sum 1.
        - `chosen` [tokens, k]: each token's experts.
        """
        values: dict[str, Tensor] = {}
        if self.coefficients["balance"]:
            values["balance"] = self._balance(shares, chosen, batch)
        if self.coefficients["z"]:
            values["z"] = logits.logsumexp(-1).square().mean()
        losses = {}
        for name, value in values.items():
            part = value.detach() + (value - value.detach()) / self.alike
            losses[name] = SideLoss(part, self.coefficients[name], value.dim() > 0)
        return losses

    def _balance(self, shares: Tensor, chosen: Tensor, batch: int) -> Tensor:
        """Return the experts' number x the sum of load x mean share, or the two if pooled."""
        experts = shares.shape[-1]
        parts = batch if self.form == "sequence" else 1
        mean = shares.unflatten(0, (parts, -1)).mean(1)  # [parts, experts]
        rows = chosen.reshape(parts, -1)  # [parts, rows]
        ones = torch.ones_like(rows, dtype=shares.dtype)
        loads = torch.zeros_like(mean).scatter_add_(1, rows, ones) / rows.shape[1]
        # Other ranks may have the other tokens of these samples.
        loads, mean = mean_over_group(torch.stack([loads, mean]), self.samples)
        if self.form == "pooled":
            return torch.stack([loads[0] * chosen.shape[1], mean[0]])
        return experts * (loads * mean).sum(-1).mean()


def loads_of(counts: Tensor, rows: int, dropped: Tensor | None = None) -> SideLoss:
    """Return the loads that a layer reports: each expert's relative to the mean, and what it drops.

    - `counts` [experts]: the tokens that chose each expert; `rows`: their sum.
    - `dropped` []: the share of choices that were dropped; None: none was.
    """
    none = torch.zeros((), device=counts.device)
    last = none if dropped is None else dropped
    return SideLoss(torch.cat([counts * (len(counts) / rows), last.unsqueeze(0)]), 0.0)
