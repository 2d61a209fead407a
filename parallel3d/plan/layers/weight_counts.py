"""Numbers of weight elements on one tensor-parallel rank, by kind of layer."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from parallel3d.model.optimizers import MATRIX
from parallel3d.plan.layers.placement import Counts, LayerKinds, StageLayers


class WeightSizes(NamedTuple):
    """Elements of the weights of some layers, on the tensor-parallel rank that holds most of them.

    - `params`, `num_params`: elements of all parameters, and their number.
    - `small`, `num_small`: the same for parameters up to ZeRO-3's persistence threshold, which are
      not sharded.
    - `largest`: the largest parameter.
    - `module`: the most that gathering one module takes. A module with several parameters arrives
      in one buffer and is copied out of it, so it counts twice.
    - `copied`: such copies for a complete layer.
    - `layer`: the largest layer.
    - `matrices`: elements of hidden matrices, of all layers.
    - `experts`: elements of experts that ep ranks divide among them; 0 if ep is 1.
    """

    params: int
    num_params: int
    small: int
    num_small: int
    matrices: int
    experts: int
    largest: int
    module: int
    copied: int
    layer: int

    def shard(self, elements: int, shards: int, ep: int) -> int:
        """Return a rank's part of `elements`, all experts and others, that `shards` ranks shard.

        As large as if all had all experts: a rank has fewer experts, and a larger part of each.
        """
        return -(-(elements + (ep - 1) * self.experts) // shards)

    @property
    def gathered(self) -> int:
        """Elements that ZeRO-3 shards."""
        return self.params - self.small


@lru_cache(maxsize=4096)
def weights_of_kind(model: LayerKinds, kind: int, tp: int, threshold: int, ep: int) -> WeightSizes:
    """Return the sizes of the weights in one layer of a kind."""
    modules = defaultdict[str, list[int]](list)
    layer = model.kinds[kind]
    elements = layer.elements({"tensor": tp, "experts": ep})
    for name, size in elements.items():
        modules[name.rpartition(".")[0]].append(size)
    every = [size for module in modules.values() for size in module]
    large = [size for size in every if size > threshold]
    return WeightSizes(
        params=sum(every),
        num_params=len(every),
        small=sum(every) - sum(large),
        num_small=len(every) - len(large),
        largest=max(every, default=0),
        module=max((sum(own) * min(len(own), 2) for own in modules.values()), default=0),
        copied=sum(large) if len(large) > 1 else 0,
        layer=sum(every),
        matrices=sum(elements[p.name] for p in layer.params if p.role == MATRIX),
        experts=sum(elements[p.name] for p in layer.params if ep > 1 and "experts" in p.cut_over),
    )


def weights_of(
    model: LayerKinds, held: Counts, tp: int, threshold: int, ep: int = 1
) -> list[tuple[int, WeightSizes]]:
    """Return the number of layers of each kind that is present, and the sizes of one layer.

    `held` [kinds]: numbers of layers. A tied weight counts once if both its layers are present.
    """
    by_kind = []
    for kind, count in enumerate(held):
        if count:
            one = weights_of_kind(model, kind, tp, threshold, ep)
            if (original := _tied_kind(model, kind)) is not None and held[original]:
                own = one.params - _copies(model, kind, tp)
                one = one._replace(params=own, num_params=one.num_params - 1)
            by_kind.append((count, one))
    return by_kind


def together(layers: Iterable[tuple[int, WeightSizes]]) -> WeightSizes:
    """Return the combined sizes of layers; each comes with its number."""
    layers = list(layers)
    sums = [sum(count * one[i] for count, one in layers) for i in range(6)]
    most = [max(one[i] for _, one in layers) for i in range(6, 10)]
    return WeightSizes(*sums, *most)


@lru_cache(maxsize=16384)
def sizes(stages: tuple[StageLayers, ...], tp: int, threshold: int, ep: int = 1) -> WeightSizes:
    """Return the sizes of the weights in all layers of these stages."""
    model = stages[0].model
    counts = Counter(kind for stage in stages for kind in stage.kinds)
    held = tuple(counts[kind] for kind in range(len(model.kinds)))
    return together(weights_of(model, held, tp, threshold, ep))


@lru_cache(maxsize=4096)
def partial(model: LayerKinds, kind: int, tp: int, sequence_parallel: bool) -> int:
    """Return the elements of a kind's layer whose gradients the tp ranks must sum."""
    params = model.kinds[kind].params
    sizes = {"tensor": tp}
    return sum(p.elements(sizes) for p in params if p.is_partial(sizes, sequence_parallel))


@lru_cache(maxsize=4096)
def _tied_kind(model: LayerKinds, kind: int) -> int | None:
    """Return the kind of layer with the original of this kind's tied weight, if it has one."""
    for _, original in model.kinds[kind].tied:
        for layer, k in zip(model.layers, model.kind_of, strict=True):
            if original.startswith(layer.name + "."):
                return k
    return None


@lru_cache(maxsize=4096)
def _copies(model: LayerKinds, kind: int, tp: int) -> int:
    """Return the elements of a kind's weights that are copies of another layer's."""
    layer = model.kinds[kind]
    copies = {name for name, _ in layer.tied}
    return sum(p.elements({"tensor": tp}) for p in layer.params if p.name in copies)


def tied_elsewhere(model: LayerKinds, held: Counts, tp: int) -> int:
    """Return the elements of these layers' tied weights whose other copy is in other layers."""
    for kind in range(len(held)):
        original = _tied_kind(model, kind)
        if original is not None and bool(held[kind]) != bool(held[original]):
            return _copies(model, kind, tp)
    return 0
