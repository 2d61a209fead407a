"""Layers of each stage, and microbatches in flight on each pipeline coordinate.

A search calls these functions a hundred thousand times, so their results are cached. A model is
identified by the id of its tuple of layers: hashing the layers would take longer than the lookup.
"""

from dataclasses import dataclass
from functools import lru_cache

from parallel3d.model.recompute import FULL, NONE, Recompute
from parallel3d.model.spec import LayerCost, LayerSpec, Shape
from parallel3d.plan.setting import ActionOrder, Setting
from parallel3d.schedule.partition import partition
from parallel3d.schedule.schedule import Action, Op
from parallel3d.schedule.schedules import load


@dataclass(eq=False)
class LayerKinds:
    """A model's layers sorted into a few kinds of equal layers.

    - `kind_of` [layers]: the kind of each layer.
    - `kinds` [kinds]: one layer of each kind.
    """

    layers: tuple[LayerSpec, ...]
    kind_of: tuple[int, ...]
    kinds: tuple[LayerSpec, ...]

    @property
    def ends(self) -> tuple[int, int]:
        """The kinds of the embedding and of the head."""
        return self.kind_of[0], self.kind_of[-1]


_models: dict[int, LayerKinds] = {}


def model_of(layers: tuple[LayerSpec, ...]) -> LayerKinds:
    """Return a model's layers sorted into kinds; the same object for the same tuple of layers."""
    model = _models.get(id(layers))
    if model is None:
        seen: dict[object, int] = {}
        alike = ((layer.build, layer.params, layer.tied, layer.config) for layer in layers)
        kind_of = tuple(seen.setdefault(key, len(seen)) for key in alike)
        kinds = tuple(layers[kind_of.index(k)] for k in range(len(seen)))
        # LayerKinds keeps the tuple alive, so that no other object can get its id.
        model = _models[id(layers)] = LayerKinds(layers, kind_of, kinds)
    return model


@lru_cache(maxsize=4096)
def stages_of(model: LayerKinds, num_stages: int, seq: int) -> tuple[range, ...]:
    """Return the layers of each stage, cut as in pipeline/stages.py."""
    shape = Shape(1, seq)  # costs are proportional to the batch, which moves no boundary
    costs = [cost_of(model, k, shape).forward_flops for k in range(len(model.kinds))]
    return partition([costs[k] for k in model.kind_of], num_stages)


@dataclass(eq=False)
class StageLayers:
    """The kinds of one stage's layers; `ends` is True if its last layer is the model's last.

    Equal ones are one object, because hashing the kinds would take long.
    """

    model: LayerKinds
    kinds: tuple[int, ...]
    ends: bool


_stage_layers = lru_cache(maxsize=4096)(StageLayers)


@lru_cache(maxsize=4096)
def layers_by_stage(model: LayerKinds, num_stages: int, seq: int) -> tuple[StageLayers, ...]:
    """Return the kinds of each stage's layers."""
    return tuple(
        _stage_layers(
            model, model.kind_of[layers.start : layers.stop], layers.stop == len(model.layers)
        )
        for layers in stages_of(model, num_stages, seq)
    )


@lru_cache(maxsize=4096)
def blocks_of(model: LayerKinds, num_stages: int, seq: int) -> tuple[int, ...]:
    """Return for each stage the number of its layers without embedding and head."""
    parts = layers_by_stage(model, num_stages, seq)
    return tuple([sum(kind not in model.ends for kind in part.kinds) for part in parts])


def blocks_in_stages(setting: Setting) -> tuple[int, ...]:
    """Return for each stage of a setting the number of its layers that may be recomputed."""
    work = setting.workload
    return blocks_of(model_of(work.layers), setting.num_stages, work.seq)


def recompute_of(part: StageLayers, recompute: Recompute) -> list[Recompute]:
    """Return what each layer of a stage computes again; embedding and head do not."""
    if recompute.is_uniform:
        return [recompute] * len(part.kinds)
    is_block = [kind not in part.model.ends for kind in part.kinds]
    first = recompute.num_full(sum(is_block))
    return [FULL if sum(is_block[:i]) < first else NONE for i in range(len(is_block))]


@lru_cache(maxsize=65536)
def cost_of(
    model: LayerKinds,
    kind: int,
    shape: Shape,
    tp: int = 1,
    sequence_parallel: bool = False,
    recompute: Recompute = NONE,
) -> LayerCost:
    """Return FLOPs, bytes and activations of one layer of a kind on one tensor-parallel rank."""
    return model.kinds[kind].cost(shape, tp, sequence_parallel, recompute)


Stages = tuple[int, ...]  # the stages of one pipeline coordinate, first to last


@lru_cache(maxsize=4096)
def stages_on(schedule: str, pp: int, stages_per_rank: int) -> tuple[Stages, ...]:
    """Return the stages of each pipeline coordinate."""
    placement = load(schedule).schedule(pp, 1, stages_per_rank).pp_coord_of_stage
    return tuple(tuple(s for s, c in enumerate(placement) if c == coord) for coord in range(pp))


@lru_cache(maxsize=65536)
def most_in_flight(order: ActionOrder) -> tuple[int, ...]:
    """Return the most microbatches that each pipeline coordinate has in flight at once."""
    schedule, *sizes = order
    return load(schedule).peak_in_flight(*sizes)


_GROUPS = 4
MicrobatchCounts = tuple[int, ...]  # [stages of a coordinate]: microbatches in flight


def in_flight(order: ActionOrder, coord: int) -> tuple[MicrobatchCounts, ...]:
    """Return the counts of microbatches in flight at a coordinate's fullest moments.

    With several stages per rank, no single moment need have the most of all stages: every moment
    before a run of backwards is returned.
    """
    if order.stages_per_rank == 1:
        return ((most_in_flight(order)[coord],),)
    return _counted(shortened(order), coord)


@lru_cache(maxsize=16384)
def shortened(order: ActionOrder) -> ActionOrder:
    """Return the order with few microbatches, if they have as much in flight as all."""
    few = order._replace(num_microbatches=_few(order.pp, order.num_microbatches))
    return few if most_in_flight(few) == most_in_flight(order) else order


def _few(pp: int, num_microbatches: int) -> int:
    """Return a number of microbatches that fills the pipeline, after which the schedule repeats.

    They form the first four of the groups that schedules/interleaved.py describes.
    """
    groups, surplus = divmod(num_microbatches, pp)
    if groups <= _GROUPS:
        return num_microbatches
    each, larger = divmod(surplus, groups)
    surplus = _GROUPS * each + min(_GROUPS, larger)
    return num_microbatches if surplus >= pp else _GROUPS * pp + surplus


@lru_cache(maxsize=256)
def programs_of(order: ActionOrder) -> tuple[tuple[Action, ...], ...]:
    """Return the computes of each pipeline coordinate, in order."""
    schedule, *sizes = order
    return load(schedule).schedule(*sizes).programs


@lru_cache(maxsize=65536)
def _counted(order: ActionOrder, coord: int) -> tuple[MicrobatchCounts, ...]:
    """Return the microbatches in flight before each run of backwards of a coordinate's program."""
    stages = stages_on(order.schedule, order.pp, order.stages_per_rank)[coord]
    counts = [0] * len(stages)
    seen = set()
    rising = False
    for op, stage, _ in programs_of(order)[coord]:
        if op == Op.F:
            counts[stages.index(stage)] += 1
            rising = True
        elif op in (Op.B, Op.W):
            if rising:
                seen.add(tuple(counts))
                rising = False
            counts[stages.index(stage)] -= 1
    return tuple(sorted(seen))


Counts = tuple[int, ...]  # [classes] or [kinds]: a number of each


@dataclass(eq=False)
class Outer:
    """A pipeline coordinate that can be the slowest: none of its class has more stages before it.

    - `stages_before` [classes]: numbers of stages before the coordinate's first stage.
    - `home`: the coordinate's stages.
    - `stages_from` [own stages, classes]: numbers of stages from that stage to the model's last.
    """

    coord: int
    coord_class: int
    stages_before: Counts
    home: Stages
    stages_from: tuple[Counts, ...]


@dataclass(eq=False)
class StageClasses:
    """The stages of a pipeline, sorted into classes with the same numbers of each kind of layer.

    - `stages` [stage classes]: numbers of layers of each kind.
    - `class_of` [stages]: the class of each stage.
    - `homes` [coordinates]: the stages of each coordinate, first to last.
    - `coords` [coordinate classes]: the stage classes of each class of coordinates.
    - `coord_class_of` [coordinates]: the class of each coordinate.
    - `crossings` [stages - 1]: the coordinates of a stage and of its successor.
    - `outer`: the coordinates that can be the slowest.
    """

    model: LayerKinds
    stages: tuple[Counts, ...]
    class_of: tuple[int, ...]
    homes: tuple[Stages, ...]
    coords: tuple[tuple[int, ...], ...]
    coord_class_of: tuple[int, ...]
    crossings: tuple[tuple[int, int], ...]
    outer: tuple[Outer, ...]

    @property
    def pp(self) -> int:
        """Number of pipeline coordinates."""
        return len(self.homes)

    def share_in_full(self, recompute: Recompute, stage_class: int) -> float:
        """Return the share of the blocks of such a stage that run again as a whole."""
        counts = enumerate(self.stages[stage_class])
        blocks = sum(count for kind, count in counts if kind not in self.model.ends)
        return recompute.num_full(blocks) / max(1, blocks)


def stage_classes_of(setting: Setting) -> StageClasses:
    """Return the classes of a setting's stages; the same object for equal classes."""
    work = setting.workload
    stages_per_rank, schedule = setting.order
    return _layout(model_of(work.layers), work.seq, schedule, setting.mesh.pp, stages_per_rank)


@lru_cache(maxsize=4096)
def _layout(
    model: LayerKinds, seq: int, schedule: str, pp: int, stages_per_rank: int
) -> StageClasses:
    cuts = stages_of(model, pp * stages_per_rank, seq)
    return _placed(model, cuts, stages_on(schedule, pp, stages_per_rank))


@lru_cache(maxsize=4096)
def _placed(model: LayerKinds, cuts: tuple[range, ...], homes: tuple[Stages, ...]) -> StageClasses:
    kinds = range(len(model.kinds))
    held = [tuple([model.kind_of[i] for i in layers].count(k) for k in kinds) for layers in cuts]
    stages = tuple(dict.fromkeys(held))
    class_of = tuple(map(stages.index, held))
    on = [tuple(class_of[s] for s in home) for home in homes]
    coords = tuple(dict.fromkeys(on))
    coord_class_of = tuple(map(coords.index, on))
    home_of = {s: coord for coord, home in enumerate(homes) for s in home}

    def count(some: tuple[int, ...]) -> Counts:
        return tuple(some.count(c) for c in range(len(stages)))

    last = {c: coord for coord, c in enumerate(coord_class_of)}
    outer = []
    for coord in sorted({0, *last.values()}):
        home = homes[coord]
        stages_before = count(class_of[: home[0]])
        stages_from = tuple(count(class_of[stage:]) for stage in home)
        outer.append(Outer(coord, coord_class_of[coord], stages_before, home, stages_from))
    return StageClasses(
        model=model,
        stages=stages,
        class_of=class_of,
        homes=homes,
        coords=coords,
        coord_class_of=coord_class_of,
        crossings=tuple((home_of[s], home_of[s + 1]) for s in range(len(cuts) - 1)),
        outer=tuple(outer),
    )
