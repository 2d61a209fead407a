"""The optimizers: one file each, found by file name (docs/add-an-optimizer.md).

They are in `engine/optimizers/` and in the user's folders. The config and the planner read a file's
constants, so it is not imported as part of `parallel3d.engine`, which loads torch and DeepSpeed;
its functions import what they need.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, Literal, NamedTuple, Protocol, cast

from parallel3d.base import user_folders
from parallel3d.base.errors import ConfigError
from parallel3d.base.section import Section
from parallel3d.model.parametrization import Role
from parallel3d.model.spec import MASTER_BYTES

MATRIX: Role = "hidden"
"""The role of the parameters that an optimizer of whole matrices treats as such."""

MASTER = "master"
"""The kind of the fp32 master weights in checkpoints."""
ADAMW = ("AdamW", "Adam")
"""Types whose file is `adamw`; in DeepSpeed, "Adam" decouples weight decay, too."""
EMA = "ema"
"""The exponential moving average of a master weight, which the engine keeps beside the states."""

__path__ = [
    str(Path(__file__).parents[1] / "engine/optimizers"),
    *user_folders.from_environment(user_folders.OPTIMIZERS),
]


class State(NamedTuple):
    """A tensor that the optimizer keeps for each master weight, of the master's shape."""

    name: str
    """The key in `optimizer.state` and in checkpoints."""
    num_bytes: int
    """Bytes of an element."""
    matrices: bool | None = None
    """True: kept for hidden matrices only; False: for all others only; None: for all parameters."""


class OptimizerFile(Protocol):
    """The contents of an optimizer's file.

    A parameter group is torch's, with `params`, `weight_decay` and `eps`; `lr` is set before each
    step, times the group's `factor` if it has one. `decays` is True if its parameters may decay,
    `matrices` if they are hidden matrices (never, unless the file has WHOLE_MATRICES). The
    optimizer gets flat fp32 masters: pieces of several parameters, one after another.
    """

    Params: type[Section]
    """Settings of optimizer.params: `lr`; `weight_decay` and `eps` if it has them; its own."""
    STATE: tuple[State, ...]
    WHOLE_MATRICES: bool
    """True if an element's update depends on others of its matrix. What `make` returns then has
    a dict `matrices`, into which the engine puts a `WholeMatrices` for each group of them."""
    PARAMETRIZATIONS: tuple[str, ...]
    """The types of parallel3d.model.parametrization whose rates hold for it."""
    OFFLOADS: tuple[str, ...]
    """Devices of zero_optimization.offload_optimizer on which it works: "cpu", "nvme"."""
    CPU_ADAM: bool
    """True if its offloaded step uses DeepSpeed's operator cpu_adam."""
    STEP_BYTES: int
    """Bytes of an element's master and state that a step reads and writes."""
    STEP_FLOPS: int
    """FLOPs of an element's step."""
    VERIFY_LR: float
    """Learning rate of `verify`: steps of a small model must differ by more than 1e-5 after a slip,
    and by less after rounding."""
    make: Callable[..., Any]
    """(groups, params, *, device, cpu_adam) -> the torch optimizer that DeepSpeed shards."""
    new_state: Callable[..., dict[str, Any]]
    """(optimizer, flat master) -> the state that its first step would create."""
    reference: Callable[..., Any]
    """(groups, params) -> plain PyTorch that computes the same."""


def names() -> tuple[str, ...]:
    """Return the names of all optimizers: the files here and in the user's folders."""
    return tuple(sorted({module.name for module in iter_modules(__path__)}))


def file_of(name: str) -> str:
    """Return the name of an optimizer's file by its type in the config, or by the file's name."""
    return "adamw" if name in ADAMW else name


@cache
def load(name: str) -> OptimizerFile:
    """Return the file of an optimizer; raise ConfigError if it cannot be used.

    `name` is its type in the config, here and below, or the name of the file.
    """
    try:
        file = import_module(f"{__name__}.{file_of(name)}")
    except Exception as error:  # the file may be the user's own code
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"its file cannot be imported ({reason}); mend it") from error
    missing = [part for part in OptimizerFile.__annotations__ if not hasattr(file, part)]
    if not missing and "lr" not in file.Params.model_fields:
        missing = ["lr in Params"]
    if missing:
        raise ConfigError(
            f"{file.__file__} lacks {', '.join(missing)}; add what docs/add-an-optimizer.md lists"
        )
    return cast(OptimizerFile, file)


@cache
def kinds(
    name: str, role: Role | Literal["any"] | None = "any", has_ema: bool = False
) -> tuple[str, ...]:
    """Return what is kept for a weight: "master", and the names of the optimizer's state.

    `role` is the parameter's. By default the names of all parameters' states are returned.
    `has_ema`: their averages are kept too (`train.ema`).
    """
    return (MASTER, *(state.name for state in _states(name, role, has_ema)))


@cache
def state_bytes(name: str, role: Role | None = None, has_ema: bool = False) -> int:
    """Return the bytes of a trained element's master weight, optimizer state and average."""
    return MASTER_BYTES + sum(state.num_bytes for state in _states(name, role, has_ema))


def _states(name: str, role: Role | Literal["any"] | None, has_ema: bool) -> list[State]:
    is_matrix = role == MATRIX
    states = [s for s in load(name).STATE if role == "any" or s.matrices in (None, is_matrix)]
    if has_ema:
        states.append(State(EMA, MASTER_BYTES))
    return states
