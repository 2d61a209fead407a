"""A user's own model families and schedules: folders outside the package that it looks into.

They come last in the `__path__` of `parallel3d.models` and `parallel3d.schedule.schedules`. An
environment variable tells every process that is started from then on.
"""

import importlib
import os
from collections.abc import MutableSequence

MODELS, SCHEDULES = "PARALLEL3D_MODELS", "PARALLEL3D_SCHEDULES"
"""The environment's lists of folders, with ":" between them."""


def from_environment(variable: str) -> list[str]:
    """The folders that an environment variable lists."""
    return [folder for folder in os.environ.get(variable, "").split(os.pathsep) if folder]


def add(folder: str, search_path: MutableSequence[str], variable: str) -> None:
    """Search `folder` from now on, behind what `search_path` has; a second time does nothing."""
    folder = os.path.abspath(folder)
    if folder not in search_path:
        search_path.append(folder)
        importlib.invalidate_caches()
        os.environ[variable] = os.pathsep.join([*from_environment(variable), folder])
