"""Elements of the weights that one tensor-parallel rank holds, by kind of layer."""

from collections import defaultdict
from functools import lru_cache
from typing import NamedTuple

from parallel3d.plan.layers.placement import LayerKinds
from parallel3d.plan.layers.stage_classes import Counts


class WeightSizes(NamedTuple):
    """Elements of the weights of some layers on one tensor-parallel rank.

    `params`: of all weights; `largest`: of the largest parameter; `module`: held at most to gather
    one module, whose parameters come in one buffer and are copied out of it, if there are several;
    `small`: of all parameters below ZeRO-3's persistence threshold; `copied`: of the parameters
    that a gather of a whole layer copies likewise; `layer`: of the largest layer.
    """

    params: int
    largest: int
    module: int
    small: int
    copied: int
    layer: int


@lru_cache(maxsize=4096)
def weights_of_kind(model: LayerKinds, kind: int, tp: int, threshold: int = 0) -> WeightSizes:
    """Return the sizes of one layer of a kind on the tensor-parallel rank that holds most."""
    modules = defaultdict[str, list[int]](list)
    for spec in model.kinds[kind].params:
        modules[spec.name.rpartition(".")[0]].append(spec.elements(tp))
    every = [size for module in modules.values() for size in module]
    large = [size for size in every if size >= threshold]
    return WeightSizes(
        params=sum(every),
        largest=max(every, default=0),
        module=max((sum(own) * min(len(own), 2) for own in modules.values()), default=0),
        small=sum(every) - sum(large),
        copied=sum(large) if len(large) > 1 else 0,
        layer=sum(every),
    )


@lru_cache(maxsize=16384)
def sizes(model: LayerKinds, layers: tuple[range, ...], tp: int, threshold: int) -> WeightSizes:
    """Return the sizes of the weights in these layers; a weight tied among them counts once."""
    held = [model.kind_of[i] for part in layers for i in part]
    every = [weights_of_kind(model, kind, tp, threshold) for kind in held]
    twice = sum(_copies(model, kind, tp) for kind in held if _tied_kind(model, kind) in held)
    return WeightSizes(
        params=sum(one.params for one in every) - twice,
        largest=max(one.largest for one in every),
        module=max(one.module for one in every),
        small=sum(one.small for one in every),
        copied=max(one.copied for one in every),
        layer=max(one.layer for one in every),
    )


class WeightCounts(NamedTuple):
    """Elements and number of the parameters that one tensor-parallel rank holds of some layers."""

    elements: float = 0.0
    num_params: float = 0.0
    partial: float = 0.0
    """Elements whose gradients the tp ranks must sum."""
    gathered: float = 0.0
    """Elements that ZeRO-3 keeps in shards, rather than whole for being small."""
    num_gathered: float = 0.0

    def plus(self, other: "WeightCounts", times: int = 1) -> "WeightCounts":
        """The sum of these weights and `times` times the `other` ones."""
        return WeightCounts(*(a + times * b for a, b in zip(self, other, strict=True)))


@lru_cache(maxsize=4096)
def _of_kind(
    model: LayerKinds, kind: int, tp: int, sequence_parallel: bool, persistence: int
) -> WeightCounts:
    """The weights that one tensor-parallel rank holds of one layer of a kind."""
    total = WeightCounts()
    for param in model.kinds[kind].params:
        numel = param.elements(tp)
        partial = numel if param.is_partial(tp, sequence_parallel) else 0.0
        large = numel > persistence
        total = total.plus(WeightCounts(numel, 1, partial, numel if large else 0.0, float(large)))
    return total


def weights_of(
    model: LayerKinds, held: Counts, tp: int, sequence_parallel: bool, persistence: int
) -> tuple[tuple[int, WeightCounts], ...]:
    """For each kind of layer: how many layers, and the weights of one on a tensor-parallel rank.

    `held` [kinds]: the number of layers of each kind. A tied weight whose two copies are both among
    these layers is counted once.
    """
    found = []
    for kind, count in enumerate(held):
        if count:
            one = _of_kind(model, kind, tp, sequence_parallel, persistence)
            if (original := _tied_kind(model, kind)) is not None and held[original]:
                copy = _copies(model, kind, tp)
                one = one.plus(WeightCounts(copy, 1, 0.0, copy, 1), -1)
            found.append((count, one))
    return tuple(found)


@lru_cache(maxsize=4096)
def _tied_kind(model: LayerKinds, kind: int) -> int | None:
    """The kind of the layer that holds the original of this kind's tied weight, or None."""
    for _, original in model.kinds[kind].tied:
        for layer, k in zip(model.layers, model.kind_of, strict=True):
            if original.startswith(layer.name + "."):
                return k
    return None


@lru_cache(maxsize=4096)
def _copies(model: LayerKinds, kind: int, tp: int) -> int:
    """Elements, on one tensor-parallel rank, of a kind's weights that copy another layer's."""
    layer = model.kinds[kind]
    copies = {name for name, _ in layer.tied}
    return sum(p.elements(tp) for p in layer.params if p.name in copies)


def tied_elsewhere(model: LayerKinds, held: Counts, tp: int) -> float:
    """Elements of these layers' tied weights whose other copy lies in other layers."""
    for kind in range(len(held)):
        original = _tied_kind(model, kind)
        if original is not None and bool(held[kind]) != bool(held[original]):
            return _copies(model, kind, tp)
    return 0.0
