"""Paths as people write them, and checks of a folder before a run writes to it (no torch)."""

import os
import re
from pathlib import Path


def expand_path(text: str) -> str:
    """Return a path with the user's folder in place of ~, and environment variables replaced.

    A path that exists as it is written is returned as it is. Relative paths are relative to the
    working directory. Raises ValueError for a user or a variable that is not known.
    """
    if os.path.lexists(text):
        return text
    path = os.path.expanduser(text)
    if path.startswith("~"):
        raise ValueError("names the folder of a user who is not known; write the whole path")
    for braced, plain in re.findall(r"\$(?:\{(\w+)\}|(\w+))", path, re.ASCII):
        if (name := braced or plain) not in os.environ:
            raise ValueError(
                f"names the environment variable {name}, which is not set; export it, or write "
                "the whole path"
            )
    return os.path.expandvars(path)


def no_folder(folder: str | Path) -> str:
    """Return why a folder, which may not exist yet, cannot be one; "" if it can be."""
    path = Path(folder).absolute()
    for place in (path, *path.parents):
        if os.path.isdir(place):
            return ""
        if os.path.islink(place):
            return f"{place} is a link to {os.readlink(place)}, which does not exist"
        if os.path.lexists(place):
            return f"{place} is no folder"
    return ""


def unwritable(folder: str | Path) -> str:
    """Return why nothing can be written to a folder, which may not exist yet; "" if it can be."""
    if reason := no_folder(folder):
        return reason
    path = Path(folder).absolute()
    existing = next(place for place in (path, *path.parents) if os.path.isdir(place))
    is_writable = os.access(existing, os.W_OK | os.X_OK)
    return "" if is_writable else f"this user may not write to {existing}"
