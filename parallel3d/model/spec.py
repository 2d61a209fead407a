"""A model's layers as data: parameters, shapes and costs (floor 0, no torch).

The initialiser seeds the parameters that a layer declares, the engine counts them in the gradient
norm, checkpoints name them, and the planner adds them up.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from operator import add, sub
from typing import Literal, NamedTuple, Protocol

from parallel3d.model.config import ModelConfig
from parallel3d.model.parametrization import Role
from parallel3d.model.recompute import NONE, Recompute

CutOver = tuple[str | None, ...]
Sizes = Mapping[str, int]
"""The number of ranks of each role of a mesh; a role that is not in it has one."""
MASTER_BYTES = 4
"""Bytes of a trained element's master weight in fp32."""


@dataclass(frozen=True)
class Init:
    """Initial values of a parameter: normal around `value` with `std`, or the constant `value`."""

    std: float = 0.0
    value: float = 0.0
    bounds: tuple[float, float] | None = None
    """Normal values beyond them are drawn again; without `std`, values are uniform between them."""
    values: tuple[float, ...] = ()
    """The parameter's elements in order, repeated to its end, in place of `std` and `value`."""
    zero_row: int | None = None
    """A row of a matrix that is 0 (that of the padding token)."""


@dataclass(frozen=True)
class ParamSpec:
    """One parameter of a layer: its name inside the layer and its *global* shape."""

    name: str
    shape: tuple[int, ...]
    cut_over: CutOver
    """The role of the mesh that cuts each dim, from the first on; () if none is cut."""
    init: Init
    weight_decay: bool
    units: int | None = None
    """Indivisible parts of a dim that is cut (key/value heads)."""
    partial: bool = False
    """True if the parameter is not cut, but each rank has part of the gradient (norm of its
    heads)."""
    whole: bool = False
    """True if each rank computes with all tokens, also under sequence parallelism, so that each has
    the whole gradient."""
    role: Role | None = None
    """The parameter's function, by which a parametrisation sets its rates."""
    folded: tuple[float, ...] = ()
    """A factor at export, or one per index of the first dim."""

    def cuts(self, sizes: Sizes) -> dict[int, str]:
        """Return the dims that are cut on a mesh of these sizes, each with the role that cuts it.

        A role of more ranks than the dim has `units` does not cut it.
        """
        return {
            dim: role
            for dim, role in enumerate(self.cut_over)
            if role is not None and (self.units is None or sizes.get(role, 1) <= self.units)
        }

    def replicated_over(self, sizes: Sizes) -> tuple[str, ...]:
        """Return the roles whose ranks hold equal copies (before ZeRO shards them).

        The first is that of the ranks whose gradients are averaged. Copies on tensor-parallel ranks
        come from equal computations.
        """
        cuts = self.cuts(sizes).values()
        replicas = "expert_replicas" if "experts" in cuts else "replicas"
        return (replicas,) if "tensor" in cuts else (replicas, "tensor")

    def is_partial(self, sizes: Sizes, sequence_parallel: bool) -> bool:
        """True if the tensor-parallel ranks' gradients of the parameter must be summed.

        Besides `partial`, these are parameters whose units each serve several ranks, and under
        sequence parallelism all that are not cut, because each rank sees a part of the tokens.
        """
        if sizes["tensor"] == 1 or "tensor" not in self.replicated_over(sizes):
            return False
        if self.whole:
            return self.partial or "tensor" in self.cut_over
        return sequence_parallel or self.partial or "tensor" in self.cut_over

    @property
    def numel(self) -> int:
        """Number of elements of the full parameter."""
        return prod(self.shape)

    def elements(self, sizes: Sizes) -> int:
        """Return the parameter's number of elements on the rank that holds most of them."""
        cuts = self.cuts(sizes)
        return prod(
            -(-size // sizes.get(cuts[dim], 1)) if dim in cuts else size
            for dim, size in enumerate(self.shape)
        )


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


def flops_of(products: Iterable[MatMul]) -> int:
    """Return the FLOPs of several products."""
    return sum(product.flops for product in products)


class Attention(NamedTuple):
    """Causal softmax attention over whole sequences on one tp rank.

    - `window`: how many tokens a query sees, itself included; None means all before it.
    """

    batch: int
    heads: int
    kv_heads: int
    seq: int
    head_size: int
    window: int | None = None

    @property
    def keys(self) -> int:
        """The most keys that a query attends to."""
        return min(self.seq, self.window or self.seq)

    @property
    def hidden(self) -> float:
        """The share of `seq` x `keys` that the causal mask hides: half without a window."""
        return (self.keys - 1) / (2 * self.seq)

    @property
    def key_elements(self) -> int:
        """Elements of keys and values."""
        return 2 * self.batch * self.kv_heads * self.seq * self.head_size

    @property
    def flops(self) -> int:
        """FLOPs of scores and weighted values, in full (no saving for the causal mask)."""
        return 4 * self.batch * self.heads * self.seq * self.keys * self.head_size


class Collective(NamedTuple):
    """One collective of the tensor-parallel group over `elements` of the full tensor."""

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

    @property
    def flops(self) -> int:
        """FLOPs of products and attention, in full (no saving for the causal mask)."""
        attention = self.attention.flops if self.attention else 0
        return flops_of(self.matmuls) + attention

    def __add__(self, later: "Work") -> "Work":
        """Return this work and then `later`; only one of the two may have an attention."""
        assert self.attention is None or later.attention is None
        return Work(
            self.matmuls + later.matmuls,
            self.attention or later.attention,
            self.traffic + later.traffic,
            self.collectives + later.collectives,
        )


@dataclass(frozen=True)
class KeptMemory:
    """Memory kept: elements of the training type (2 or 4 bytes), and `other` bytes of any type.

    Only the classic attention kernel keeps `scores`. For `dropped_scores` it also keeps a copy and
    a one-byte mask (together the 5 bytes of arXiv:2205.05198). For a norm without a fused kernel,
    torch on a CPU keeps the input in fp32, and additionally the normalised value in fp32.
    """

    elements: int = 0
    other: int = 0
    scores: int = 0
    dropped_scores: int = 0
    copies: int = 0  # elements also kept in fp32, if the training type is narrower
    unfused: int = 0  # elements that enter norms without a fused kernel

    def bytes(self, element_bytes: int, classic: bool = False, fused_norms: bool = True) -> int:
        """Return the bytes kept, for a training type of `element_bytes`."""
        narrow = element_bytes < 4
        total = self.elements * element_bytes + self.other + 4 * self.copies * narrow
        if classic:
            total += self.scores * element_bytes + self.dropped_scores * (element_bytes + 1)
        if not fused_norms:
            total += self.unfused * (4 + (4 - element_bytes) * narrow)
        return total

    def __add__(self, other: "KeptMemory") -> "KeptMemory":
        return KeptMemory(*map(add, vars(self).values(), vars(other).values()))

    def __sub__(self, other: "KeptMemory") -> "KeptMemory":
        return KeptMemory(*map(sub, vars(self).values(), vars(other).values()))


def fullest(*moments: KeptMemory) -> KeptMemory:
    """Return the moment with most elements, together with the most scores of any moment.

    Only the classic kernel has scores, so moments are ordered without them; they bound its peak.
    """
    most = max(moments, key=lambda memory: memory.elements)
    scores = max(memory.scores for memory in moments)
    dropped_scores = max(memory.dropped_scores for memory in moments)
    return replace(most, scores=scores, dropped_scores=dropped_scores)


@dataclass(frozen=True)
class LayerCost:
    """The cost of one microbatch in a layer or a part of it, on one tp rank.

    `forward_flops` is the sum over all tp ranks: a multiply-add counts as two and attention in full
    (no saving for the causal mask), as in torch's FlopCounterMode. A part that computes only some
    tokens, as an expert does, counts those.
    """

    forward_flops: int
    forward: Work = Work()
    recomputed: Work = Work()
    """Repeated in the backward, under activation checkpointing."""
    backward_collectives: tuple[Collective, ...] = ()
    """Collectives of the backward, without those of `recomputed`."""
    saved: KeptMemory = KeptMemory()
    """Kept from forward to backward: with the layer's input, without its output."""
    working: KeptMemory = KeptMemory()
    """Peak of forward or backward beyond `saved`."""
    resident: KeptMemory = KeptMemory()
    """Kept from the first microbatch on (tables of rotary angles)."""

    def __add__(self, later: "LayerCost") -> "LayerCost":
        """Return the cost of this part and then `later`.

        The backward of `later` comes first, while all is saved; what it saved is free in this
        part's backward.
        """
        return LayerCost(
            self.forward_flops + later.forward_flops,
            self.forward + later.forward,
            self.recomputed + later.recomputed,
            self.backward_collectives + later.backward_collectives,
            self.saved + later.saved,
            fullest(later.working, self.working - later.saved),
            self.resident + later.resident,
        )

    @property
    def train_flops(self) -> int:
        """FLOPs forward and backward: three times the forward (arXiv:2001.08361, section 2.1)."""
        return 3 * self.forward_flops


def in_order(parts: Iterable[LayerCost]) -> LayerCost:
    """Return the cost of several parts of a layer, first to last."""
    return sum(parts, LayerCost(0))


class CostOf(Protocol):
    """A function from a microbatch's shape and the number of tp ranks to a layer's cost."""

    def __call__(
        self,
        shape: Shape,
        tp: int = 1,
        sequence_parallel: bool = False,
        recompute: Recompute = NONE,
    ) -> LayerCost:
        """Return the cost of one microbatch, for any `tp` that the layer allows."""


@dataclass(frozen=True)
class LayerSpec:
    """One layer of a model, the unit that the pipeline assigns to stages.

    - `build`: the module as "package.module:Class". It is imported only where torch is needed, and
      called as `Class(config, name, context)`. If it has `prepare(config)`, that is called before,
      where modules are not sharded as they are made.
    - `tied`: maps a parameter of this layer to the global name of the parameter it shares its value
      with.
    - `active`: the share of a parameter's elements that each token uses, by name, where it is not
      all (k / E of E stacked experts).
    - `side_losses`: the names of the side losses that the layer returns (`tensor/side_loss.py`).
    - `shares_samples`: the side losses are also right where cp ranks share the tokens of a sample.
    - `num_experts`: if it is not 0, the layer returns its experts' loads among them, under the name
      `loads`: [num_experts + 1], each expert's share of the tokens relative to the mean, and the
      share of tokens that were dropped.
    """

    name: str
    params: tuple[ParamSpec, ...]
    cost: CostOf
    build: str
    config: ModelConfig
    tied: tuple[tuple[str, str], ...] = ()
    active: tuple[tuple[str, float], ...] = ()
    side_losses: tuple[str, ...] = ()
    num_experts: int = 0
    shares_samples: bool = False

    @property
    def loads(self) -> str:
        """The name of the layer's loads among its side losses."""
        return f"{self.name}.loads"

    @property
    def rows_per_token(self) -> int:
        """Experts that each token is sent to; 0 in a dense layer."""
        shares = [share for _, share in self.active]
        return round(self.num_experts * max(shares, default=0.0))

    @property
    def num_params(self) -> int:
        """Number of parameters that the layer adds to the model; tied copies do not count."""
        return sum(p.numel for p in self.own_params)

    @property
    def num_active_params(self) -> int:
        """Number of those parameters that each token uses; all in a dense layer."""
        share = dict(self.active)
        return sum(round(p.numel * share.get(p.name, 1)) for p in self.own_params)

    def elements(self, sizes: Sizes) -> dict[str, int]:
        """Return by name each parameter's elements on the rank that holds most of them."""
        return {p.name: p.elements(sizes) for p in self.params}

    @property
    def own_params(self) -> tuple[ParamSpec, ...]:
        """The layer's parameters without tied copies, whose values belong to other layers."""
        copies = {name for name, _ in self.tied}
        return tuple(p for p in self.params if p.name not in copies)


def count_params(layers: Iterable[LayerSpec], active: bool = False) -> int:
    """Return the parameters of some layers, or (`active`) those that each token uses."""
    return sum(layer.num_active_params if active else layer.num_params for layer in layers)


def named_params(layers: Iterable[LayerSpec]) -> dict[str, ParamSpec]:
    """Return the parameters of a model by global name, without tied copies."""
    return {f"{layer.name}.{p.name}": p for layer in layers for p in layer.own_params}


def tied_names(layers: Iterable[LayerSpec]) -> dict[str, str]:
    """Return the global names of tied copies, each with the name of its original."""
    return {f"{layer.name}.{copy}": original for layer in layers for copy, original in layer.tied}
