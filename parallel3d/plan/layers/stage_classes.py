"""Classes of pipeline stages and coordinates that are alike, so that each class is costed once."""

from dataclasses import dataclass
from functools import lru_cache

from parallel3d.plan.layers.placement import LayerKinds, model_of, stages_of, stages_on
from parallel3d.plan.setting import Setting

Counts = tuple[int, ...]  # of each class or kind, how many


@dataclass(eq=False)
class Outer:
    """A pipeline coordinate that can be the slowest: none of its class has more stages before it.

    `stages_before` [classes]: how many stages of each class come before the coordinate's first.
    `home`: the coordinate's stages. `stages_from` [own stages, classes]: how many stages of each
    class lie from that own stage to the last stage of the model.
    """

    coord: int
    coord_class: int
    stages_before: Counts
    home: tuple[int, ...]
    stages_from: tuple[Counts, ...]


@dataclass(eq=False)
class StageClasses:
    """The stages of a pipeline, sorted into classes that hold the same kinds of layers.

    `stages` [classes]: how many layers of each kind. `class_of` [stages]. `homes` [coordinates]:
    the stages of each, first to last. `coords` [coordinate classes]: the stage classes of each.
    `coord_class_of` [coordinates]. `crossings` [stages - 1]: the coordinates of a stage and of its
    successor.
    """

    model: LayerKinds
    stages: tuple[Counts, ...]
    class_of: tuple[int, ...]
    homes: tuple[tuple[int, ...], ...]
    coords: tuple[tuple[int, ...], ...]
    coord_class_of: tuple[int, ...]
    crossings: tuple[tuple[int, int], ...]
    outer: tuple[Outer, ...]

    @property
    def pp(self) -> int:
        """Number of pipeline coordinates."""
        return len(self.homes)


def stage_classes_of(setting: Setting) -> StageClasses:
    """The classes of a setting's stages; equal ones are one object."""
    return _layout(
        model_of(setting.layers),
        setting.shape.seq,
        setting.schedule,
        setting.pp,
        setting.stages_per_rank,
    )


@lru_cache(maxsize=4096)
def _layout(
    model: LayerKinds, seq: int, schedule: str, pp: int, stages_per_rank: int
) -> StageClasses:
    cuts = stages_of(model, pp * stages_per_rank, seq)
    return _placed(model, cuts, stages_on(schedule, pp, stages_per_rank))


@lru_cache(maxsize=4096)
def _placed(
    model: LayerKinds, cuts: tuple[range, ...], homes: tuple[tuple[int, ...], ...]
) -> StageClasses:
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
    return StageClasses(
        model=model,
        stages=stages,
        class_of=class_of,
        homes=homes,
        coords=coords,
        coord_class_of=coord_class_of,
        crossings=tuple((home_of[s], home_of[s + 1]) for s in range(len(cuts) - 1)),
        outer=tuple(
            Outer(
                coord,
                coord_class_of[coord],
                count(class_of[: homes[coord][0]]),
                homes[coord],
                tuple(count(class_of[s:]) for s in homes[coord]),
            )
            for coord in sorted({0, *last.values()})
        ),
    )
