"""A model's layers as data: parameters, shapes and costs (floor 0, no torch).

The parameters that a layer declares are the ones that the initialiser seeds, the engine counts in
the gradient norm, the checkpoints name and the planner adds up.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from operator import add, sub
from typing import Any, Literal, NamedTuple, Protocol

from parallel3d.model.parametrization import Role

Recompute = Literal["none", "selective", "full"]
MASTER_BYTES = 4
"""Bytes of a trained element's master weight in fp32."""
STATE_BYTES = MASTER_BYTES + 8
"""Bytes of its master weight and Adam's two moments."""


@dataclass(frozen=True)
class Init:
    """The start of a parameter: normal with mean 0 and `std`; the constant `value` if std is 0."""

    std: float = 0.0
    value: float = 0.0


@dataclass(frozen=True)
class ParamSpec:
    """One parameter of a layer: its name inside the layer, and its *global* shape."""

    name: str
    shape: tuple[int, ...]
    tp_dim: int | None  # the dim that tensor parallelism cuts; None: each rank holds all of it
    init: Init
    weight_decay: bool
    units: int | None = None  # parts of tp_dim that are never cut (key/value heads)
    partial: bool = False  # not cut, a rank's gradient is a part (the norm of its own heads)
    role: Role | None = None  # what it maps, by which a parametrisation sets its rates
    folded: tuple[float, ...] = ()  # an export's factor, or one for each index of the first dim

    def cut_dim(self, tp: int) -> int | None:
        """The dim that `tp` ranks cut the parameter along; None if each holds it whole."""
        return None if self.units is not None and self.units < tp else self.tp_dim

    def is_partial(self, tp: int, sequence_parallel: bool) -> bool:
        """True if the tp ranks' gradients of the parameter must be summed.

        Besides `partial` these are parameters whose units each serve several ranks, and all that
        are not cut under sequence parallelism, where each rank sees a part of the tokens.
        """
        if tp == 1 or self.cut_dim(tp) is not None:
            return False
        return sequence_parallel or self.partial or self.tp_dim is not None

    @property
    def numel(self) -> int:
        """Number of elements of the whole parameter."""
        return prod(self.shape)

    def elements(self, tp: int) -> int:
        """Number of the parameter's elements on the tp rank that holds most of them."""
        dim = self.cut_dim(tp)
        if dim is None:
            return self.numel
        return self.numel // self.shape[dim] * -(-self.shape[dim] // tp)


@dataclass(frozen=True)
class Shape:
    """The shape of one microbatch's tokens."""

    batch: int
    seq: int

    @property
    def tokens(self) -> int:
        """Number of tokens in the microbatch."""
        return self.batch * self.seq


class MatMul(NamedTuple):
    """A matrix product on one tp rank, `batch` times: [m, k] x [k, n]."""

    m: int
    k: int
    n: int
    batch: int = 1

    @property
    def flops(self) -> int:
        """FLOPs of the product: a multiply-add counts as two."""
        return 2 * self.batch * self.m * self.k * self.n


class Attention(NamedTuple):
    """Softmax attention over whole sequences on one tp rank."""

    batch: int
    heads: int
    kv_heads: int
    seq: int
    head_size: int

    @property
    def flops(self) -> int:
        """FLOPs of scores and weighted values, in full (no saving for the causal mask)."""
        return 4 * self.batch * self.heads * self.seq * self.seq * self.head_size


class Collective(NamedTuple):
    """One collective of the tensor-parallel group over `elements` of the whole tensor."""

    kind: Literal["all_reduce", "all_gather", "reduce_scatter"]
    elements: int


@dataclass(frozen=True)
class Work:
    """The computation and communication of one tp rank for one microbatch in one layer.

    The backward pass is twice the matrix products and about twice the traffic.
    """

    matmuls: tuple[MatMul, ...] = ()
    attention: Attention | None = None
    traffic: int = 0  # elements that memory-bound operators read and write (norms, residual, ...)
    collectives: tuple[Collective, ...] = ()


@dataclass(frozen=True)
class Kept:
    """Memory kept: elements of the training type (2 or 4 bytes), and `other` bytes of any type.

    Only the classic attention kernel keeps scores; of dropped ones it keeps a copy and a mask of
    one byte besides (together the 5 bytes of arXiv:2205.05198). For a norm without a fused kernel
    torch keeps on a CPU the normalised value in fp32 besides, and the input in fp32 instead.
    """

    elements: int = 0
    other: int = 0
    scores: int = 0
    dropped_scores: int = 0
    copies: int = 0  # elements kept in fp32 besides, where the training type is narrower
    unfused: int = 0  # elements that enter norms without a fused kernel

    def bytes(self, element_bytes: int, classic: bool = False, fused_norms: bool = True) -> int:
        """Bytes kept, for a training type of `element_bytes`."""
        narrow = element_bytes < 4
        total = self.elements * element_bytes + self.other + 4 * self.copies * narrow
        if classic:
            total += self.scores * element_bytes + self.dropped_scores * (element_bytes + 1)
        if not fused_norms:
            total += self.unfused * (4 + (4 - element_bytes) * narrow)
        return total

    def __add__(self, other: "Kept") -> "Kept":
        return Kept(*map(add, vars(self).values(), vars(other).values()))

    def __sub__(self, other: "Kept") -> "Kept":
        return Kept(*map(sub, vars(self).values(), vars(other).values()))


@dataclass(frozen=True)
class LayerCost:
    """The cost of one microbatch in one layer, on one tp rank but for `forward_flops`.

    Those are of all tp ranks together: a multiply-add counts as two and attention in full (no
    saving for the causal mask), as in torch's FlopCounterMode.
    """

    forward_flops: int
    forward: Work = Work()
    recomputed: Work = Work()  # again in the backward, under activation checkpointing
    backward_collectives: tuple[Collective, ...] = ()  # without those of `recomputed`
    saved: Kept = Kept()  # from forward to backward: the layer's input, and not its output
    working: Kept = Kept()  # the most that forward or backward holds at once beyond `saved`
    resident: Kept = Kept()  # from the first microbatch on (tables of rotary angles)

    @property
    def train_flops(self) -> int:
        """FLOPs forward and backward: three times the forward (arXiv:2001.08361, section 2.1)."""
        return 3 * self.forward_flops


class CostOf(Protocol):
    """The function that gives a layer's cost for a microbatch's shape on `tp` ranks."""

    def __call__(
        self,
        shape: Shape,
        tp: int = 1,
        sequence_parallel: bool = False,
        recompute: Recompute = "none",
    ) -> LayerCost:
        """The cost of one microbatch; raises nothing for a `tp` that the layer allows."""


@dataclass(frozen=True)
class LayerSpec:
    """One layer of a model, the unit that the pipeline places on stages.

    `build` names the module as "package.module:Class"; it is imported only where torch is wanted
    and called as `Class(config, name, context)`. `tied` maps a parameter of this layer to the
    global name of the one whose value it shares.
    """

    name: str
    params: tuple[ParamSpec, ...]
    cost: CostOf
    build: str
    config: Any
    tied: tuple[tuple[str, str], ...] = ()

    @property
    def num_params(self) -> int:
        """Number of parameters that the layer adds to the model: a tied copy adds none."""
        return sum(p.numel for p in self.own_params)

    @property
    def own_params(self) -> tuple[ParamSpec, ...]:
        """The layer's parameters but for tied copies, whose values belong to other layers."""
        copies = {name for name, _ in self.tied}
        return tuple(p for p in self.params if p.name not in copies)


def named_params(layers: Iterable[LayerSpec]) -> dict[str, ParamSpec]:
    """Each parameter of a model by its global name; tied copies are left out."""
    return {f"{layer.name}.{p.name}": p for layer in layers for p in layer.own_params}


def tied_names(layers: Iterable[LayerSpec]) -> dict[str, str]:
    """Global names of the tied copies, each with its original's: whose value it shares."""
    return {f"{layer.name}.{copy}": original for layer in layers for copy, original in layer.tied}
