"""Settings that the small runs do not depend on, so that a mistake in one would not be seen.

A setting can have its own value in the small config and yet do nothing there: a window that is
longer than the samples, the form of a loss whose coefficient is 0, an epsilon below the rounding.
Each is put back to its default, as if the code ignored it, and the reference trains again.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from parallel3d.base.errors import ConfigError
from parallel3d.config import CompleteConfig, RunConfig
from parallel3d.verify.measure import TOLERANCE
from parallel3d.verify.reference import Reference, course_of, differences, train_reference
from parallel3d.verify.settings import changed_settings, is_proved

# What the reference computes with; a schedule or a ZeRO stage must not change its results.
_BLOCKS = ("parallel3d.model.", "parallel3d.data.isolate_documents", "optimizer.")


def idle_settings(
    config: RunConfig, small: CompleteConfig, reference: Reference, folder: Path
) -> frozenset[str]:
    """Return the paths of the settings that change nothing that verify could see.

    - `small`: the config that verify trains in place of `config`, and `reference` has trained.
    - `folder`: where the weights of the other runs are written.
    """
    folder = folder / "idle"
    folder.mkdir(exist_ok=True)
    idle = set()
    for path, without in _without_each(config, small):
        try:
            course = replace(course_of(without), rates=reference.course.rates)
            ignoring = train_reference(without, folder, course)
            found = differences(ignoring, reference)
        except (ConfigError, ValueError, KeyError, RuntimeError):
            continue  # another model altogether: a mistake that nobody overlooks
        bounds = reference.tolerances or dict.fromkeys(found, TOLERANCE["fp32"])
        if all(found[name] <= bound for name, bound in bounds.items()):
            idle.add(path)
    return frozenset(idle)


def _without_each(config: RunConfig, small: CompleteConfig) -> Iterator[tuple[str, CompleteConfig]]:
    """Yield the path of each setting that is called proved, and the small config without it."""
    for path, _ in changed_settings(config):
        name = path.removeprefix("parallel3d.")
        is_read = path.startswith(_BLOCKS) and not path.endswith(("family", ".type"))
        if not is_read or not is_proved(name, path, config, small):
            continue
        raw: dict[str, Any] = small.to_dict()
        section = raw
        *blocks, key = path.split(".")
        for block in blocks:
            section = section[block]
        del section[key]
        try:
            changed = RunConfig.from_dict(raw)
            yield path, changed.resolve(small.mesh.sizes.ranks).completed()
        except ConfigError:
            continue  # no run is possible without it
