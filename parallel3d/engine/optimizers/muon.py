"""Muon for hidden matrices, AdamW for the rest (Jordan et al. 2024; arXiv:2502.16982).

The update of a matrix is its momentum with all singular values moved towards 1. docs/muon.md says
how the whole matrix is assembled, and why the update equals that of one process.
"""

from collections.abc import Iterator
from math import isfinite
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Strict

from parallel3d.base.section import Problem, Section
from parallel3d.model.matrices import NewtonSchulz
from parallel3d.model.optimizers import MATRIX, State
from parallel3d.model.parametrization import Role

if TYPE_CHECKING:
    import torch

Beta = Annotated[float, Field(ge=0, lt=1)]
Triple = tuple[float, float, float]
_JORDAN: Triple = (3.4445, -4.7750, 2.0315)
# arXiv:2505.16932, algorithm 1, with its safety factor; the last step is repeated.
_POLAR_EXPRESS: tuple[Triple, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
_SAFETY = 1.01
_EXACT: Triple = (2.0, -1.5, 0.5)
_MOST_STEPS = 20
_GRID = 1000


def _frozen(value: object) -> object:
    """Return a list of three numbers, or of lists of three, as tuples."""
    if isinstance(value, list):
        return tuple(_frozen(v) for v in value)
    return float(value) if type(value) is int else value


class Params(Section):
    """The parameters of Muon, and of the AdamW beside it."""

    lr: float = Field(gt=0)
    """Peak learning rate; parallel3d.train.lr_schedule scales it."""
    muon_lr: float | None = Field(default=None, gt=0)
    """Peak learning rate of hidden matrices; null means lr."""
    adam_lr: float | None = Field(default=None, gt=0)
    """Peak learning rate of all other parameters; null means lr."""
    momentum: Beta = 0.95
    """Decay rate of the average of gradients."""
    nesterov: bool = True
    """Orthogonalise the average after one more step towards the gradient."""
    ns_steps: int | None = Field(default=None, ge=1, le=_MOST_STEPS)
    """Steps of Newton-Schulz; null: 5, 10 for "deepseekv4", or one for each triple of a list."""
    ns_dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision of Newton-Schulz. bf16 is faster on GPUs, and changes updates by about 1 %."""
    coefficients: Annotated[
        Literal["jordan", "polar_express", "deepseekv4"] | Triple | tuple[Triple, ...],
        BeforeValidator(_frozen),
    ] = "jordan"
    """The polynomial a x + b x^3 + c x^5 of each step. "jordan": 3.4445, -4.7750, 2.0315.
    "polar_express": those of arXiv:2505.16932. "deepseekv4": Jordan's, and 2, -1.5, 0.5 in the last
    two steps. Or [a, b, c], or a list of them, one for each step; the last one is repeated."""
    scale: Literal["original", "match_rms_adamw", "spectral"] = "original"
    """Factor of the update of a matrix [rows, columns]: "original" sqrt(max(1, rows/columns));
    "match_rms_adamw" 0.2 sqrt(max(rows, columns)), with which AdamW's learning rates hold;
    "spectral" sqrt(rows/columns)."""
    per_head: bool = False
    """Orthogonalise the rows of each attention head of query, key and value apart."""
    clip: Literal["all", "adam_only"] = "all"
    """Gradients that gradient_clipping scales: all, or those of AdamW's parameters only. The norm
    is that of all gradients in both cases."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of matrices. A step subtracts the learning rate times it."""
    adam_weight_decay: float | None = Field(default=None, ge=0)
    """Decoupled weight decay of embeddings and the output projection; null means weight_decay."""
    betas: Annotated[tuple[Beta, Beta], Strict(False)] = (0.9, 0.999)
    """AdamW's decay rates of the first and second moments."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the square root of AdamW's second moment."""

    def _problems(self) -> Iterator[Problem]:
        own = self.coefficients
        if not own:
            yield Problem("coefficients", own, "has no triple", "use [3.4445, -4.775, 2.0315]")
        if own and not _converges(self.polynomials):
            yield Problem(
                "coefficients",
                own,
                "makes a singular value between 0 and 1 grow beyond 2, or shrink to nothing",
                'use "jordan", or coefficients whose polynomial maps 0..1 to about 1',
            )

    @property
    def polynomials(self) -> tuple[Triple, ...]:
        """The coefficients a, b, c of each step."""
        own = self.coefficients
        if own == "deepseekv4":
            steps = self.ns_steps or 10
            polynomials = (_JORDAN,) * max(0, steps - 2) + (_EXACT, _EXACT)
            return polynomials[-steps:]
        if own == "polar_express":
            safe = [(a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5) for a, b, c in _POLAR_EXPRESS]
            listed = (*safe[:-1], _POLAR_EXPRESS[-1])
            steps = self.ns_steps or 5
        elif own == "jordan" or not isinstance(own[0], tuple):
            listed = (_JORDAN if own == "jordan" else own,)
            steps = self.ns_steps or 5
        else:
            listed = own
            steps = self.ns_steps or (len(own) if len(own) > 1 else 5)
        return (listed + (listed[-1],) * steps)[:steps]

    @property
    def newton_schulz(self) -> NewtonSchulz:
        """The work on each matrix, for the planner."""
        return NewtonSchulz(len(self.polynomials), self.ns_dtype, self.per_head)

    @property
    def width_power(self) -> float | None:
        """The power of the width by which muP divides the rate of matrices; None: not usable.

        A change of a matrix has the same effect at each width if its largest singular value is
        proportional to sqrt(rows / columns) (arXiv:2310.17813). Updates of the spectral scale are;
        those of "match_rms_adamw" are sqrt(width) times as large.
        """
        return {"spectral": 0.0, "match_rms_adamw": 0.5, "original": None}[self.scale]

    def own_lr(self, role: Role | None) -> float:
        """Return the learning rate of a role's parameters, at muP's base width."""
        return (self.muon_lr if role == MATRIX else self.adam_lr) or self.lr

    def factor(self, rows: int, columns: int) -> float:
        """Return the factor of the update of a matrix."""
        factors = {
            "original": max(1.0, rows / columns) ** 0.5,
            "match_rms_adamw": 0.2 * max(rows, columns) ** 0.5,
            "spectral": (rows / columns) ** 0.5,
        }
        return float(factors[self.scale])


def _converges(polynomials: tuple[Triple, ...]) -> bool:
    """True if the steps keep singular values in 0..1 below 2, and move the largest one near 1."""
    values = [i / _GRID for i in range(_GRID + 1)]
    for a, b, c in polynomials:
        values = [a * x + b * x**3 + c * x**5 for x in values]
        if not all(isfinite(x) and abs(x) < 2 for x in values):
            return False
    return values[-1] > 0.3


STATE = (
    State("momentum_buffer", 4, matrices=True),
    State("exp_avg", 4, matrices=False),
    State("exp_avg_sq", 4, matrices=False),
)
WHOLE_MATRICES = True
PARAMETRIZATIONS = ("standard", "mup")
OFFLOADS = ("cpu",)
CPU_ADAM = True
STEP_BYTES = 24  # AdamW's; Muon's momentum moves less, and its products are counted apart
STEP_FLOPS = 14
VERIFY_LR = 1e-3


def make(
    groups: list[dict[str, Any]], params: Params, *, device: "torch.device", cpu_adam: bool
) -> "torch.optim.Optimizer":
    """Return Muon over the groups with `matrices`, and AdamW over the others."""
    from parallel3d.engine.muon import Muon

    return Muon(groups, params, device=device, cpu_adam=cpu_adam)


def new_state(optimizer: Any, master: "torch.Tensor") -> dict[str, object]:
    """Return the state that the first step would create, with its counter of steps."""
    state: dict[str, object] = optimizer.new_state(master)
    return state


def reference(groups: list[dict[str, object]], params: Params) -> "torch.optim.Optimizer":
    """Return the same in plain PyTorch, for whole parameters.

    A group's `views` returns the matrices of a tensor as views, [rows, columns] each, where rows
    may be several dims. A group without it is AdamW's.
    """
    from parallel3d.engine.muon import PlainMuon

    return PlainMuon(groups, params)
