"""Where a setting's layers live, and how many microbatches each pipeline coordinate holds.

All of it is asked a hundred thousand times by a search, for few different answers, so answers are
kept. A model is known by its tuple of layers itself: to compare or hash one takes far longer than
to look up an answer.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from parallel3d.model.spec import LayerCost, LayerSpec, Recompute, Shape
from parallel3d.schedule.partition import partition
from parallel3d.schedule.schedule import Op
from parallel3d.schedule.schedules import load


@dataclass(eq=False)
class Model:
    """A model's layers, sorted into the few kinds that are alike but for their name.

    `kind_of` [layers]: each layer's kind. `kinds`: one layer of each.
    """

    layers: tuple[LayerSpec, ...]
    kind_of: tuple[int, ...]
    kinds: tuple[LayerSpec, ...]


_models: dict[int, Model] = {}


def model_of(layers: tuple[LayerSpec, ...]) -> Model:
    """The kinds of a model's layers; the same object for the same tuple."""
    model = _models.get(id(layers))
    if model is None:
        seen: dict[Any, int] = {}
        kind_of = tuple(seen.setdefault(_kind(layer), len(seen)) for layer in layers)
        kinds = tuple(layers[kind_of.index(k)] for k in range(len(seen)))
        # It holds on to the tuple, so that its id is not given to another.
        model = _models[id(layers)] = Model(layers, kind_of, kinds)
    return model


def _kind(layer: LayerSpec) -> tuple[Any, ...]:
    return layer.build, layer.params, layer.tied, layer.config


@lru_cache(maxsize=4096)
def stages_of(model: Model, num_stages: int, seq: int) -> tuple[range, ...]:
    """The layers of each stage, as pipeline/stages.py cuts them."""
    shape = Shape(1, seq)  # every cost is proportional to the batch, so it moves no boundary
    costs = [float(cost_of(model, k, shape).forward_flops) for k in range(len(model.kinds))]
    return partition([costs[k] for k in model.kind_of], num_stages)


class Part:
    """The layers of a stage, by kind: one object for all stages of a model that are alike.

    `ends`: whether the last of them is the model's last.
    """

    def __init__(self, model: Model, kinds: tuple[int, ...], ends: bool) -> None:
        self.model, self.kinds, self.ends = model, kinds, ends


_parts: dict[tuple[int, tuple[int, ...], bool], Part] = {}


@lru_cache(maxsize=4096)
def parts_of(model: Model, num_stages: int, seq: int) -> tuple[Part, ...]:
    """The parts that a model is cut into."""
    found = []
    for layers in stages_of(model, num_stages, seq):
        kinds, ends = model.kind_of[layers.start : layers.stop], layers.stop == len(model.layers)
        key = id(model), kinds, ends
        found.append(_parts.setdefault(key, Part(model, kinds, ends)))
    return tuple(found)


@lru_cache(maxsize=65536)
def cost_of(
    model: Model,
    kind: int,
    shape: Shape,
    tp: int = 1,
    sequence_parallel: bool = False,
    recompute: Recompute = "none",
) -> LayerCost:
    """What a layer of that kind costs."""
    return model.kinds[kind].cost(shape, tp, sequence_parallel, recompute)


@lru_cache(maxsize=4096)
def stages_on(schedule: str, pp: int, stages_per_rank: int) -> tuple[tuple[int, ...], ...]:
    """The stages of each pipeline coordinate, first to last."""
    placement = load(schedule).schedule(pp, 1, stages_per_rank).pp_coord_of_stage
    return tuple(tuple(s for s, c in enumerate(placement) if c == coord) for coord in range(pp))


_GROUPS = 4
Counts = tuple[int, ...]  # microbatches in flight of each of a coordinate's stages


@lru_cache(maxsize=16384)
def in_flight(
    schedule: str, pp: int, num_microbatches: int, stages_per_rank: int
) -> tuple[tuple[Counts, ...], ...]:
    """Per coordinate, the most forwards of each of its stages whose backward is still to come.

    With several stages on a rank no one moment need be the worst for stages of any size, so it
    gives the counts of all moments that can be: those before a backward.
    """
    if stages_per_rank == 1:
        most = load(schedule).peak_in_flight(pp, num_microbatches, 1)
        return tuple(((n,),) for n in most)
    few = few_microbatches(schedule, pp, num_microbatches, stages_per_rank)
    return _counted(schedule, pp, few, stages_per_rank)


@lru_cache(maxsize=16384)
def few_microbatches(schedule: str, pp: int, num_microbatches: int, stages_per_rank: int) -> int:
    """So few microbatches whose list holds as much in flight as that of all; or all of them."""
    most = load(schedule).peak_in_flight
    few = _few(pp, num_microbatches)
    same = most(pp, few, stages_per_rank) == most(pp, num_microbatches, stages_per_rank)
    return few if same else num_microbatches


def _few(pp: int, num_microbatches: int) -> int:
    """So few microbatches fill the pipeline as well: what follows repeats what was.

    As many go in as out of the first four groups, if they come in groups that differ by one at
    most (see schedules/interleaved.py).
    """
    groups, surplus = divmod(num_microbatches, pp)
    if groups <= _GROUPS:
        return num_microbatches
    each, larger = divmod(surplus, groups)
    surplus = _GROUPS * each + min(_GROUPS, larger)
    return num_microbatches if surplus >= pp else _GROUPS * pp + surplus


@lru_cache(maxsize=256)
def _counted(
    schedule: str, pp: int, num_microbatches: int, stages_per_rank: int
) -> tuple[tuple[Counts, ...], ...]:
    """The counts before each run of backwards, from the schedule's own list."""
    programs = load(schedule).schedule(pp, num_microbatches, stages_per_rank).programs
    found = []
    for stages, program in zip(stages_on(schedule, pp, stages_per_rank), programs, strict=True):
        place = {stage: i for i, stage in enumerate(stages)}
        counts, seen, rising = [0] * len(stages), set(), False
        for op, stage, _ in program:
            if op == Op.F:
                counts[place[stage]] += 1
                rising = True
            elif op in (Op.B, Op.W):
                if rising:
                    seen.add(tuple(counts))
                    rising = False
                counts[place[stage]] -= 1
        found.append(tuple(sorted(seen)))
    return tuple(found)
