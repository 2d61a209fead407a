"""The small configs of a set of meshes, and what one process of transformers makes of them."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf, sqrt
from pathlib import Path

from parallel3d.config import RunConfig
from parallel3d.verify.course import LOUD_STEP, course_of
from parallel3d.verify.reference import Reference, train_reference
from parallel3d.verify.shrink import Sizes, shrink

_NEVER_CLIPPED = 1e9


def prepare(
    config: RunConfig, meshes: Sequence[Sizes], folder: Path
) -> tuple[dict[Sizes, RunConfig], Reference]:
    """The small config of each mesh, and the reference of all, trained on the course.

    Where the config clips, the limit lies between the norms of the quiet and the loud step, which
    are measured first. Raises ConfigError.
    """
    small = shrink(config, tuple(meshes), str(folder), clipping=_NEVER_CLIPPED)
    first = small[meshes[0]]
    course = course_of(first)
    if config.gradient_clipping:
        until = slice(0, LOUD_STEP + 1)
        beginning = replace(course, steps=course.steps[until], rates=course.rates[until])
        *quiet, loud = train_reference(first, folder, beginning).grad_norms
        limit = sqrt(max(quiet) * loud)
        assert 0 < limit < inf, (quiet, loud)
        small = shrink(config, tuple(meshes), str(folder), clipping=limit)
    return small, train_reference(small[meshes[0]], folder, course)
