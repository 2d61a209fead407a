"""Checks of a folder that a run will write to, before it does (no torch)."""

import os
from pathlib import Path


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
