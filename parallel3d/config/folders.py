"""The user's own models, schedules and optimizers: folders, registered before a config is read."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from parallel3d import models
from parallel3d.base import user_folders
from parallel3d.base.errors import ConfigError
from parallel3d.base.paths import expand_path
from parallel3d.base.reader import JsonObject, block_at
from parallel3d.base.section import Items, PathText
from parallel3d.model import optimizers
from parallel3d.schedule import schedules

# The package that searches such folders, the environment variable that lists them, and their files.
_KINDS = {
    "model_folders": (models, user_folders.MODELS, "*/spec.py"),
    "schedule_folders": (schedules, user_folders.SCHEDULES, "*.py"),
    "optimizer_folders": (optimizers, user_folders.OPTIMIZERS, "*.py"),
}


def register(raw: JsonObject) -> None:
    """Register the folders that `raw` names; names that are not folders are refused later.

    Raises ConfigError if an environment variable lists one that is not there.
    """
    run = block_at(raw, "parallel3d.run")
    for name, (package, variable, _) in _KINDS.items():
        for folder in user_folders.from_environment(variable):
            if not Path(folder).is_dir():
                raise ConfigError(
                    f"the environment variable {variable} lists {folder}, which is not a folder; "
                    "create it, or take it out"
                )
        for folder in folders if isinstance(folders := run.get(name), list) else ():
            if isinstance(folder, str) and "\0" not in folder:
                path = _expanded(folder)
                if path.is_dir():
                    user_folders.add(str(path), package.__path__, variable)


def _expanded(folder: str) -> Path:
    """Return the path of a folder as its setting is read; as it is written if it cannot be read."""
    with suppress(ValueError):
        return Path(expand_path(folder))
    return Path(folder)


def _folder_of(name: str) -> Callable[[str], str]:
    package, _, files = _KINDS[name]

    def check(text: str) -> str:
        folder = Path(text)
        if not folder.is_dir():
            raise ValueError("is not a folder; create it, or name another one")
        shipped = Path(package.__path__[0])
        names = {path.relative_to(folder).parts[0] for path in folder.glob(files)} - {"__init__.py"}
        if clashes := sorted(name for name in names if (shipped / name).exists()):
            name = clashes[0].removesuffix(".py")
            raise ValueError(f"contains {name!r}, a name that parallel3d uses itself; rename it")
        return os.path.abspath(text)

    return check


ModelFolders = Items[Annotated[PathText, AfterValidator(_folder_of("model_folders"))]]
ScheduleFolders = Items[Annotated[PathText, AfterValidator(_folder_of("schedule_folders"))]]
OptimizerFolders = Items[Annotated[PathText, AfterValidator(_folder_of("optimizer_folders"))]]
