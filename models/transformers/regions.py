"""Where tensor parallelism cuts the layers of a model of transformers, by its own plan.

A *region* is a module of which a part is cut: the parent of a row-parallel linear layer. The ranks
hold the same input at its entry (under sequence parallelism they gather it) and the sum of their
parts at its exit. What is not cut inside has a part of its gradient on each rank.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from torch import nn
from transformers.pytorch_utils import Conv1D

from parallel3d.models.transformers.facts import Unsupported
from parallel3d.models.transformers.plans import (
    COLUMN,
    EXPERTS,
    GATHERED,
    HEADS,
    PACKED,
    ROW,
    SPLIT,
    UNCUT,
    planned,
)
from parallel3d.models.transformers.skeleton import Skeleton

_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
_PACKED = (*_WEIGHTS, *(f"{name}_bias" for name in _WEIGHTS))


class Heads(NamedTuple):
    """Rows of queries, keys and values that are held by key/value head: its queries, key, value.

    - `groups`: key/value heads. `queries`: of each. `size`: features of a head.
    """

    groups: int
    queries: int
    size: int

    @property
    def order(self) -> tuple[int, ...]:
        """The numbers of the heads in transformers' order, in ours."""
        keys = self.groups * self.queries
        values = keys + self.groups
        found: list[int] = []
        for group in range(self.groups):
            first = group * self.queries
            found += [*range(first, first + self.queries), keys + group, values + group]
        return tuple(found)


@dataclass(frozen=True)
class Place:
    """How a parameter of a layer is held.

    - `shape`: the global shape, which may split a dim of transformers' shape.
    - `dim`: the dim that is cut over the tensor-parallel ranks; None if none is.
    - `units`: its indivisible parts (key/value heads).
    - `partial`: each rank has a part of its gradient.
    - `whole`: each rank computes with all tokens, also under sequence parallelism.
    - `experts`: dim 0 has the experts, which ranks may divide.
    - `heads`: dim 0 has rows in another order than transformers'; None: it has not.
    - `turned`: a matrix of transformers' [in, out] is [out, in] here, as that of a linear layer is.
    """

    shape: tuple[int, ...]
    dim: int | None = None
    units: int | None = None
    partial: bool = False
    whole: bool = False
    experts: bool = False
    heads: Heads | None = None
    turned: bool = False


class LayerPlan:
    """The regions of one layer of a skeleton, and how its parameters are held."""

    def __init__(self, skeleton: Skeleton, number: int) -> None:
        self.layer = skeleton.layers[number]
        self.rms_norms = skeleton.rms_norms
        self._plan = skeleton.plan
        self._list = skeleton.list
        path = f"{skeleton.prefix}.{skeleton.list}.{number}"
        prefix = f"{path}." if skeleton.prefix else f"{skeleton.list}.{number}."
        path = f"{skeleton.list}.{number}."
        gathered = skeleton.gathered
        self._gathered = {x.removeprefix(path) for x in gathered if x.startswith(path)}
        calls = skeleton.watched.calls.items()
        self.calls = {name.removeprefix(prefix): x for name, x in calls if name.startswith(prefix)}

    def style(self, name: str) -> str:
        """Return the style of a module or parameter of the layer; "" if the plan has none."""
        style = self._planned(name)
        if style == GATHERED and self._is_fused_mlp(name):
            return PACKED
        if style == SPLIT and self._is_fused_mlp(self._partner(name)):
            return ROW
        return style

    def _planned(self, name: str) -> str:
        if name in self._gathered:
            return GATHERED
        return planned(self._plan, f"{self._list}.*.{name}")

    @cached_property
    def regions(self) -> frozenset[str]:
        """The modules with row-parallel layers, by name."""
        found = set()
        for name, module in self.layer.named_modules():
            if self.style(name) == ROW and isinstance(module, nn.Linear | Conv1D):
                found.add(name.rpartition(".")[0])
        return frozenset(found)

    @cached_property
    def wholes(self) -> frozenset[str]:
        """The modules that need all tokens, and are no regions, by name.

        A rank computes them as a whole: they may mix tokens.
        """
        found = set()
        for name, child in self.layer.named_children():
            is_cut = name in self.regions or self.style(name) in (COLUMN, ROW, PACKED)
            has_matrix = any(p.dim() > 1 for p in child.parameters())
            if not is_cut and (has_matrix or name in self.calls):
                found.add(name)
        return frozenset(found)

    @cached_property
    def experts(self) -> str | None:
        """The name of the module of the layer's experts, if it has transformers' packed form.

        None if there is none, or more than one.
        """
        found = []
        for name, module in self.layer.named_modules():
            if hasattr(module, "is_concatenated") and hasattr(module, "parallel3d_choices"):
                found.append(name)
        return found[0] if len(found) == 1 else None

    def place(self, name: str) -> Place:
        """Return how the parameter of this name in the layer is held."""
        owner, _, leaf = name.rpartition(".")
        is_of_experts = owner == self.experts and leaf in _PACKED
        shape = tuple(self.layer.get_parameter(name).shape)
        module = self.layer.get_submodule(owner)
        turns = isinstance(module, Conv1D) or getattr(module, "is_transposed", False)
        is_turned = turns and leaf in ("weight", *_WEIGHTS)
        if is_turned:
            shape = (*shape[:-2], shape[-1], shape[-2])
        place = self._place(name, shape)
        return replace(place, experts=is_of_experts, turned=is_turned)

    def _place(self, name: str, shape: tuple[int, ...]) -> Place:
        owner, _, leaf = name.rpartition(".")
        style = self.style(owner)
        whole = name.partition(".")[0] in self.wholes
        if style == EXPERTS:
            return self._place_in_experts(name, shape, whole)
        if style == PACKED:
            return Place((2, shape[0] // 2, *shape[1:]), 1, whole=whole)
        if style == HEADS:
            heads = self.heads_of(owner.rpartition(".")[0])
            if heads.queries == 1:
                return Place((3, shape[0] // 3, *shape[1:]), 1, heads.groups, whole=whole)
            return Place(shape, 0, heads.groups, whole=whole, heads=heads)
        if style == COLUMN or self.style(name) == COLUMN:
            return Place(shape, 0, self._units(owner, shape[0]), whole=whole)
        if style == GATHERED:
            return Place(shape, 0, whole=whole)
        if style in (ROW, SPLIT):
            return Place(shape, 1, whole=whole) if leaf == "weight" else Place(shape, whole=whole)
        if style not in UNCUT:
            raise Unsupported(f"is cut in the style {style!r} ({name}), which is not known")
        own_heads = self._heads_in(owner, shape)
        if own_heads is not None:
            return Place(shape, 0, own_heads, whole=whole)
        return Place(shape, partial=self._region_of(owner) is not None, whole=whole)

    def heads_of(self, name: str) -> Heads:
        """Return the heads of an attention module whose projections are fused."""
        call = self.calls.get(name)
        if call is None or call.key_size != call.value_size:
            raise Unsupported(f"computes the attention of fused projections by itself ({name})")
        return Heads(call.kv_heads, call.heads // call.kv_heads, call.key_size)

    def is_within(self, name: str) -> bool:
        """True for a child of a region that comes before its row-parallel layer."""
        parent = name.rpartition(".")[0]
        if parent not in self.regions:
            return False
        children = [child for child, _ in self.layer.get_submodule(parent).named_children()]
        paths = [f"{parent}.{child}" if parent else child for child in children]
        sums = [number for number, path in enumerate(paths) if self.style(path) == ROW]
        return paths.index(name) < max(sums)

    def _region_of(self, name: str) -> str | None:
        for region in self.regions:
            if region and (name == region or name.startswith(f"{region}.")):
                return region
        return None

    def _heads_in(self, owner: str, shape: tuple[int, ...]) -> int | None:
        """Return the heads of a parameter [heads, size] that acts on the heads of a region."""
        region = self._region_of(owner)
        call = self.calls.get(region or "")
        module = self.layer.get_submodule(owner)
        if call is None or isinstance(module, nn.Linear | Conv1D) or len(shape) != 2:
            return None
        is_of_head = shape[1] in (call.key_size, call.value_size)
        return shape[0] if is_of_head and shape[0] in (call.heads, call.kv_heads) else None

    def _place_in_experts(self, name: str, shape: tuple[int, ...], whole: bool) -> Place:
        experts = self.layer.get_submodule(name.rpartition(".")[0])
        if not hasattr(experts, "is_concatenated"):
            raise Unsupported(f"has experts of another form than transformers' packed one ({name})")
        style = self.style(name)
        if style == PACKED and experts.is_concatenated:
            return Place((shape[0], 2, shape[1] // 2, *shape[2:]), 2, whole=whole)
        if style in (PACKED, COLUMN):  # gate and up in turns are cut in pairs
            pairs = shape[1] // 2 if experts.has_gate and not experts.is_concatenated else None
            return Place(shape, 1, pairs, whole=whole)
        if style == ROW:
            return Place(shape, 2, whole=whole)
        return Place(shape, partial=True, whole=whole)

    def _units(self, owner: str, rows: int) -> int | None:
        """Return the key/value heads, if a column-parallel layer computes keys or values alone."""
        call = self.calls.get(owner.rpartition(".")[0])
        if call is None or call.heads == call.kv_heads:
            return None
        is_of_heads = rows in (call.kv_heads * call.key_size, call.kv_heads * call.value_size)
        return call.kv_heads if is_of_heads else None

    def _partner(self, name: str) -> str:
        """Return the gathered layer beside a layer with a split input; "" unless it is alone."""
        parent = name.rpartition(".")[0]
        gathered = []
        for child, _ in self.layer.get_submodule(parent).named_children():
            beside = f"{parent}.{child}"
            if self._planned(beside) == GATHERED:
                gathered.append(beside)
        return gathered[0] if len(gathered) == 1 else ""

    def _is_fused_mlp(self, name: str) -> bool:
        """True if a gathered layer computes gate and up of the split layer beside it."""
        if not name:
            return False
        parent = name.rpartition(".")[0]
        if parent in self.calls:
            return False
        for child, module in self.layer.get_submodule(parent).named_children():
            if self._planned(f"{parent}.{child}") == SPLIT and isinstance(module, nn.Linear):
                fused = self.layer.get_submodule(name)
                is_double = fused.out_features == 2 * module.in_features
                return self._partner(f"{parent}.{child}") == name and bool(is_double)
        return False
