"""Folders of the user's own that a config names: looked into before the rest of it is read."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Strict

from parallel3d import models
from parallel3d.base import own_folders
from parallel3d.base.reader import at
from parallel3d.base.section import PathText
from parallel3d.schedule import schedules


def _families_in(folder: Path) -> Iterable[str]:
    return (file.parent.name for file in folder.glob("*/spec.py"))


def _schedules_in(folder: Path) -> Iterable[str]:
    return (file.stem for file in folder.glob("*.py"))


_KINDS = {
    "model_folders": (models, own_folders.MODELS, _families_in),
    "schedule_folders": (schedules, own_folders.SCHEDULES, _schedules_in),
}


def look_into(raw: dict[str, Any]) -> None:
    """Make known what the folders hold that parallel3d.run of a config's object names.

    What names no folder is passed over here, and refused with all else that is wrong.
    """
    for name, (package, variable, _) in _KINDS.items():
        folders = at(raw, f"parallel3d.run.{name}")
        for folder in folders if isinstance(folders, list) else ():
            if isinstance(folder, str) and "\0" not in folder and Path(folder).is_dir():
                own_folders.add(folder, package.__path__, variable)


def _folder_of(name: str) -> Callable[[str], str]:
    package, _, names_in = _KINDS[name]

    def check(text: str) -> str:
        folder = Path(text)
        if not folder.is_dir():
            raise ValueError("is no folder; make it, or name another one")
        shipped = set(names_in(Path(package.__path__[0])))
        if twice := sorted(shipped & set(names_in(folder)) - {"__init__"}):
            raise ValueError(f"holds {twice[0]}, a name that parallel3d has already; rename it")
        return os.path.abspath(text)

    return check


ModelFolders = Annotated[
    tuple[Annotated[PathText, AfterValidator(_folder_of("model_folders"))], ...], Strict(False)
]
ScheduleFolders = Annotated[
    tuple[Annotated[PathText, AfterValidator(_folder_of("schedule_folders"))], ...], Strict(False)
]
