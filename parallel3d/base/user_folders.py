"""Search folders for a user's own model families, schedules and optimizers.

They are appended to the `__path__` of `parallel3d.models`, `parallel3d.schedule.schedules` and
`parallel3d.model.optimizers`, and to an environment variable that processes started later inherit.
"""

import importlib
import os
from collections.abc import MutableSequence

MODELS, SCHEDULES, OPTIMIZERS = (
    f"PARALLEL3D_{kind}" for kind in ("MODELS", "SCHEDULES", "OPTIMIZERS")
)
"""Environment variables that list folders, separated by ":"."""


def from_environment(variable: str) -> list[str]:
    """Return the folders that an environment variable lists."""
    return [folder for folder in os.environ.get(variable, "").split(os.pathsep) if folder]


def add(folder: str, search_path: MutableSequence[str], variable: str) -> None:
    """Append `folder` to `search_path` and to the environment variable, if it is not there yet."""
    folder = os.path.abspath(folder)
    if folder not in search_path:
        search_path.append(folder)
        importlib.invalidate_caches()
        os.environ[variable] = os.pathsep.join([*from_environment(variable), folder])
