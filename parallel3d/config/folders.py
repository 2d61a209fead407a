"""Folders of the user's own that a config names: looked into before the rest of it is read."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Strict

from parallel3d import models
from parallel3d.base import user_folders
from parallel3d.base.reader import at
from parallel3d.base.section import PathText
from parallel3d.schedule import schedules

# The package that looks into such folders, the variable that lists them, and what they hold.
_KINDS = {
    "model_folders": (models, user_folders.MODELS, "*/spec.py"),
    "schedule_folders": (schedules, user_folders.SCHEDULES, "*.py"),
}


def look_into(raw: dict[str, Any]) -> None:
    """Make known what the folders of `raw` hold; names of no folder are refused later."""
    for name, (package, variable, _) in _KINDS.items():
        folders = at(raw, f"parallel3d.run.{name}")
        for folder in folders if isinstance(folders, list) else ():
            if isinstance(folder, str) and "\0" not in folder and Path(folder).is_dir():
                user_folders.add(folder, package.__path__, variable)


def _folder_of(name: str) -> Callable[[str], str]:
    package, _, files = _KINDS[name]

    def check(text: str) -> str:
        folder = Path(text)
        if not folder.is_dir():
            raise ValueError("is no folder; make it, or name another one")
        shipped = Path(package.__path__[0])
        found = {path.relative_to(folder).parts[0] for path in folder.glob(files)} - {"__init__.py"}
        if twice := sorted(name for name in found if (shipped / name).exists()):
            name = twice[0].removesuffix(".py")
            raise ValueError(f"holds {name}, a name that parallel3d has already; rename it")
        return os.path.abspath(text)

    return check


ModelFolders = Annotated[
    tuple[Annotated[PathText, AfterValidator(_folder_of("model_folders"))], ...], Strict(False)
]
ScheduleFolders = Annotated[
    tuple[Annotated[PathText, AfterValidator(_folder_of("schedule_folders"))], ...], Strict(False)
]
