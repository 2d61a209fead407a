"""Elements of the weights that one tensor-parallel rank holds, by kind of layer."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from parallel3d.plan.layers.placement import Counts, LayerKinds, StageLayers


class WeightSizes(NamedTuple):
    """Elements of the weights of some layers on the tensor-parallel rank that holds most of them.

    `small`: of parameters up to ZeRO-3's persistence threshold, kept whole. `largest`: of the
    largest parameter. `module`: held at most to gather one module, in one buffer and copied out of
    it if it has several parameters; `copied`: the copies of a whole layer. `layer`: of the largest
    layer.
    """

    params: int
    num_params: int
    small: int
    num_small: int
    largest: int
    module: int
    copied: int
    layer: int

    @property
    def gathered(self) -> int:
        """Elements that ZeRO-3 keeps in shards."""
        return self.params - self.small


@lru_cache(maxsize=4096)
def weights_of_kind(model: LayerKinds, kind: int, tp: int, threshold: int = 0) -> WeightSizes:
    """Return the sizes of the weights in one layer of a kind."""
    modules = defaultdict[str, list[int]](list)
    for spec in model.kinds[kind].params:
        modules[spec.name.rpartition(".")[0]].append(spec.elements(tp))
    every = [size for module in modules.values() for size in module]
    large = [size for size in every if size > threshold]
    return WeightSizes(
        params=sum(every), num_params=len(every), small=sum(every) - sum(large),
        num_small=len(every) - len(large), largest=max(every, default=0),
        module=max((sum(own) * min(len(own), 2) for own in modules.values()), default=0),
        copied=sum(large) if len(large) > 1 else 0, layer=sum(every),
    )  # fmt: skip


def weights_of(
    model: LayerKinds, held: Counts, tp: int, threshold: int
) -> list[tuple[int, WeightSizes]]:
    """Return how many layers there are of each kind (`held` [kinds]), and the sizes of one.

    A tied weight whose two copies are both among these layers is counted once.
    """
    found = []
    for kind, count in enumerate(held):
        if count:
            one = weights_of_kind(model, kind, tp, threshold)
            if (original := _tied_kind(model, kind)) is not None and held[original]:
                own = one.params - _copies(model, kind, tp)
                one = one._replace(params=own, num_params=one.num_params - 1)
            found.append((count, one))
    return found


def together(layers: Iterable[tuple[int, WeightSizes]]) -> WeightSizes:
    """Return the sizes of layers, of each of which there are so many."""
    layers = list(layers)
    sums = [sum(count * one[i] for count, one in layers) for i in range(4)]
    most = [max(one[i] for _, one in layers) for i in range(4, 8)]
    return WeightSizes(*sums, *most)


@lru_cache(maxsize=16384)
def sizes(stages: tuple[StageLayers, ...], tp: int, threshold: int) -> WeightSizes:
    """Return the sizes of the weights in all layers of these stages."""
    model = stages[0].model
    counts = Counter(kind for stage in stages for kind in stage.kinds)
    held = tuple(counts[kind] for kind in range(len(model.kinds)))
    return together(weights_of(model, held, tp, threshold))


@lru_cache(maxsize=4096)
def partial(model: LayerKinds, kind: int, tp: int, sequence_parallel: bool) -> int:
    """Return the elements of a layer of a kind whose gradients the tp ranks must sum."""
    params = model.kinds[kind].params
    return sum(p.elements(tp) for p in params if p.is_partial(tp, sequence_parallel))


@lru_cache(maxsize=4096)
def _tied_kind(model: LayerKinds, kind: int) -> int | None:
    """Return the kind of the layer that holds the original of this kind's tied weight, if any."""
    for _, original in model.kinds[kind].tied:
        for layer, k in zip(model.layers, model.kind_of, strict=True):
            if original.startswith(layer.name + "."):
                return k
    return None


@lru_cache(maxsize=4096)
def _copies(model: LayerKinds, kind: int, tp: int) -> int:
    """Return the elements of a kind's weights that copy another layer's."""
    layer = model.kinds[kind]
    copies = {name for name, _ in layer.tied}
    return sum(p.elements(tp) for p in layer.params if p.name in copies)


def tied_elsewhere(model: LayerKinds, held: Counts, tp: int) -> int:
    """Return the elements of these layers' tied weights whose other copy lies in other layers."""
    for kind in range(len(held)):
        original = _tied_kind(model, kind)
        if original is not None and bool(held[kind]) != bool(held[original]):
            return _copies(model, kind, tp)
    return 0
