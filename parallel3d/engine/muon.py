"""Muon's step on ZeRO's flat masters, and the same in plain PyTorch (engine/optimizers/muon.py)."""

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from parallel3d.model import optimizers

if TYPE_CHECKING:
    from parallel3d.engine.whole_matrices import WholeMatrices

_SMALLEST_NORM = 1e-7
_BATCH = 2**26  # elements of equal matrices that are orthogonalised at a time


class Muon(torch.optim.Optimizer):
    """Muon over flat masters of hidden matrices, and AdamW over the other groups.

    `matrices` has an entry for each flat master of hidden matrices, which the engine adds. Momentum
    is element by element, so each rank keeps that of its own shard.
    """

    def __init__(
        self, groups: list[dict[str, Any]], params: Any, *, device: torch.device, cpu_adam: bool
    ) -> None:
        self.params = params
        self.matrices: dict[Tensor, WholeMatrices] = {}
        set_rates(groups, params)
        super().__init__(groups, {"lr": params.lr})
        self._adam_file = optimizers.load("adamw")
        adam = {name: getattr(params, name) for name in ("lr", "betas", "eps")}
        self._adam = self._adam_file.make(
            [group for group in self.param_groups if not group["matrices"]],
            self._adam_file.Params(**adam),
            device=device,
            cpu_adam=cpu_adam,
        )
        self._adam.state = self.state

    def new_state(self, master: Tensor) -> dict[str, Any]:
        """Return the state of a flat master before its first step."""
        if master in self.matrices:
            return {"step": 0, "momentum_buffer": torch.zeros_like(master, requires_grad=False)}
        return self._adam_file.new_state(self._adam, master)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure
        """Update the masters that have a gradient; collective over the ranks of the stage."""
        for group in self.param_groups:
            if group["matrices"]:
                for master in group["params"]:
                    if master.grad is not None:
                        self._update(master, master.grad, group)
        groups = [g for g in self.param_groups if g["params"] and not g["matrices"]]
        if groups:  # DeepSpeed passes one group at a time
            self._adam.param_groups = groups
            self._adam.step()

    def _update(self, master: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[master]
        momentum = self.params.momentum
        if not state:
            state.update(self.new_state(master))
        state["step"] += 1
        average = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        direction = gradient.lerp_(average, momentum) if self.params.nesterov else average
        update = self.matrices[master].map(direction, self._orthogonalised)
        master.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])

    def _orthogonalised(self, matrices: Sequence[Tensor]) -> list[Tensor]:
        """Return the update of each matrix; those of one shape are computed together."""
        by_shape = defaultdict[torch.Size, list[int]](list)
        for index, matrix in enumerate(matrices):
            by_shape[matrix.shape].append(index)
        updates = list(matrices)
        for shape, indices in by_shape.items():
            size = max(1, _BATCH // shape.numel())
            factor = self.params.factor(*shape)
            for first in range(0, len(indices), size):
                batch = indices[first : first + size]
                stack = orthogonalise(torch.stack([matrices[i] for i in batch]), self.params)
                for index, update in zip(batch, stack.mul_(factor), strict=True):
                    updates[index] = update
        return updates


def set_rates(groups: list[dict[str, object]], params: Any) -> None:
    """Set the decay of AdamW's groups, and each group's `factor` of the learning rate."""
    for group in groups:
        if not group["matrices"] and group["decays"] and params.adam_weight_decay is not None:
            group["weight_decay"] = params.adam_weight_decay
        role = optimizers.MATRIX if group["matrices"] else None
        group["factor"] = params.own_lr(role) / params.lr


def orthogonalise(matrices: Tensor, params: Any) -> Tensor:
    """Return U V^T of each matrix U S V^T approximately, [batch, rows, columns], in fp32.

    Newton-Schulz: each step maps the singular values by a x + b x^3 + c x^5. Matrices are divided
    by their norm in fp32, before they are cast.
    """
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=_SMALLEST_NORM)
    if params.ns_dtype == "bf16":
        x = x.bfloat16()
    for a, b, c in params.polynomials:
        gram = torch.bmm(x, x.mT)
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, gram, x, beta=a)
    x = x.float()
    return x.mT if is_tall else x


class PlainMuon(torch.optim.Optimizer):
    """Muon as its definition has it, matrix by matrix, on whole parameters; AdamW for the rest.

    Written apart from `Muon`, which is compared with it.
    """

    def __init__(self, groups: list[dict[str, Any]], params: Any) -> None:
        self.params = params
        super().__init__(groups, {"lr": params.lr})
        others = [group for group in self.param_groups if "views" not in group]
        self._adam = torch.optim.AdamW(others, betas=params.betas, foreach=False)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure
        """Update all parameters."""
        self._adam.step()
        for group in self.param_groups:
            if "views" not in group:
                continue
            for weight in group["params"]:
                gradient = weight.grad
                beta = self.params.momentum
                mean = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                mean.copy_(beta * mean + (1 - beta) * gradient)
                moved = beta * mean + (1 - beta) * gradient if self.params.nesterov else mean
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                pairs = zip(group["views"](weight), group["views"](moved), strict=True)
                for matrix, direction in pairs:
                    direction = direction.reshape(-1, direction.shape[-1])
                    rows, columns = direction.shape
                    factor = {
                        "original": max(1, rows / columns) ** 0.5,
                        "match_rms_adamw": 0.2 * max(rows, columns) ** 0.5,
                        "spectral": (rows / columns) ** 0.5,
                    }[self.params.scale]
                    update = factor * self._orthogonal(direction)
                    matrix.sub_(group["lr"] * update.view(matrix.shape))

    def _orthogonal(self, matrix: Tensor) -> Tensor:
        x = matrix / max(float(matrix.norm()), _SMALLEST_NORM)
        if self.params.ns_dtype == "bf16":
            x = x.bfloat16()
        for a, b, c in self.params.polynomials:
            x = a * x + b * (x @ x.T) @ x + c * (x @ x.T) @ (x @ x.T) @ x
        return x.to(matrix.dtype)
