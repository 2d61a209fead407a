"""What a model family gives to the rest: its layers, as data (floor 0, no torch).

The parameters that a layer declares are the ones that the initialiser seeds, the engine counts in
the gradient norm, the safetensors files name and the planner adds up.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any


@dataclass(frozen=True)
class Init:
    """How a parameter starts: normal with mean 0 and `std`, or the constant `value` if std is 0."""

    std: float = 0.0
    value: float = 0.0


@dataclass(frozen=True)
class ParamSpec:
    """One parameter of a layer: its name inside the layer, and its *global* shape.

    `tp_dim` is the dim that tensor parallelism cuts; None means that every tp rank holds all of it.
    `units`: so many equal parts of that dim are never cut (key/value heads); on more tp ranks than
    units the parameter is not cut. `partial`: each tp rank's gradient of it, where it is not cut,
    is a part of the whole, even where activations are replicated (the norm of a rank's own heads).
    """

    name: str
    shape: tuple[int, ...]
    tp_dim: int | None
    init: Init
    weight_decay: bool
    units: int | None = None
    partial: bool = False

    def cut_dim(self, tp: int) -> int | None:
        """The dim that `tp` ranks cut it along; None if each holds it whole."""
        return None if self.units is not None and self.units < tp else self.tp_dim

    def is_partial(self, tp: int, sequence_parallel: bool) -> bool:
        """Whether its gradients on the tp ranks must be summed.

        So it is, too, for a parameter whose units each serve several ranks, and for all that is not
        cut under sequence parallelism, where each rank sees a part of the tokens.
        """
        if tp == 1 or self.cut_dim(tp) is not None:
            return False
        return sequence_parallel or self.partial or self.tp_dim is not None

    @property
    def numel(self) -> int:
        """Number of elements of the whole parameter."""
        return prod(self.shape)


@dataclass(frozen=True)
class Shape:
    """The shape of one microbatch's tokens."""

    batch: int
    seq: int

    @property
    def tokens(self) -> int:
        """Number of tokens in the microbatch."""
        return self.batch * self.seq


@dataclass(frozen=True)
class LayerCost:
    """What one microbatch costs in one layer, over all its tp ranks together.

    `forward_flops` counts a multiply-add as two and attention in full (no saving for the causal
    mask), as torch's FlopCounterMode does; the backward pass costs twice that.
    """

    forward_flops: int

    @property
    def train_flops(self) -> int:
        """Forward and backward: three times the forward (arXiv:2001.08361, section 2.1)."""
        return 3 * self.forward_flops


@dataclass(frozen=True)
class LayerSpec:
    """One layer of a model, the unit that the pipeline places on stages.

    `build` names the module as "package.module:Class"; it is imported only where torch is wanted
    and called as `Class(config, name, context)`. `tied` maps a parameter of this layer to the
    global name of the one whose value it shares.
    """

    name: str
    params: tuple[ParamSpec, ...]
    cost: Callable[[Shape], LayerCost]
    build: str
    config: Any
    tied: tuple[tuple[str, str], ...] = ()

    @property
    def num_params(self) -> int:
        """Parameters that this layer adds to the model: a tied copy adds none."""
        copies = {name for name, _ in self.tied}
        return sum(p.numel for p in self.params if p.name not in copies)
