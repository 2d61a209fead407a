"""AdamW: Adam (arXiv:1412.6980) with decoupled weight decay (arXiv:1711.05101)."""

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, Strict

from parallel3d.base.section import Section
from parallel3d.model.optimizers import State

if TYPE_CHECKING:
    import torch

Beta = Annotated[float, Field(ge=0, lt=1)]


class Params(Section):
    """The parameters of Adam."""

    lr: float = Field(gt=0)
    """Peak learning rate; parallel3d.train.lr_schedule scales it.
    Without an optimizer block: 0.001, DeepSpeed's default."""
    betas: Annotated[tuple[Beta, Beta], Strict(False)] = (0.9, 0.999)
    """Decay rates of the first and second moments."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the square root of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay, applied to matrices only. DeepSpeed's default is 0 (torch's AdamW:
    0.01)."""


STATE = (State("exp_avg", 4), State("exp_avg_sq", 4))
WHOLE_MATRICES = False
PARAMETRIZATIONS = ("standard", "mup")
OFFLOADS = ("cpu", "nvme")
CPU_ADAM = True
STEP_BYTES = 24  # master and both moments, read and written
STEP_FLOPS = 14
VERIFY_LR = 3e-4


def make(
    groups: list[dict[str, Any]], params: Params, *, device: "torch.device", cpu_adam: bool
) -> "torch.optim.Optimizer":
    """Return AdamW over parameter groups.

    `cpu_adam` selects DeepSpeed's vectorised one for states on the host. Otherwise it is torch's,
    fused on CUDA and CPUs: unfused, its temporaries take twice the memory of all weights.
    """
    options: dict[str, Any] = {"lr": params.lr, "betas": params.betas, "eps": params.eps}
    if cpu_adam:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        from parallel3d.engine.quirks import updating

        adam: torch.optim.Optimizer = DeepSpeedCPUAdam(
            groups, **options, weight_decay=0.0, adamw_mode=True
        )
        updating.recompute_bias_correction(adam)
        return adam
    from torch.optim import AdamW

    return AdamW(groups, **options, weight_decay=0.0, fused=device.type in ("cuda", "cpu"))


def new_state(optimizer: "torch.optim.Optimizer", master: "torch.Tensor") -> dict[str, Any]:
    """Return the state that the first step would create, with its counter of steps."""
    import torch

    step: torch.Tensor | int = 0  # DeepSpeed's CPU Adam counts with an int
    if isinstance(optimizer, torch.optim.AdamW):
        is_on_device = optimizer.defaults["fused"] or optimizer.defaults["capturable"]
        step = torch.zeros((), dtype=torch.float32, device=master.device if is_on_device else "cpu")
    return {"step": step} | {
        state.name: torch.zeros_like(master, requires_grad=False) for state in STATE
    }


def reference(groups: list[dict[str, object]], params: Params) -> "torch.optim.Optimizer":
    """Return torch's own AdamW, unfused, in the masters' precision."""
    import torch

    return torch.optim.AdamW(groups, betas=params.betas, foreach=False)
