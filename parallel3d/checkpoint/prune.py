"""Removes old checkpoints, once the newest is known to be good."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from parallel3d.checkpoint import disk
from parallel3d.checkpoint.manifest import STATE, Entry, check_file, read_manifest, step_folders
from parallel3d.errors import CheckpointError
from parallel3d.mesh.mesh import Mesh


def keep_newest(
    folder: Path, keep: int, *, newest: Path, mine: Mapping[str, Entry], mesh: Mesh
) -> str:
    """Remove all but the newest `keep` checkpoints; what is wrong with the newest, if it is bad.

    Collective, on the group that is aside. `mine`: the files of the newest that this rank wrote,
    which it reads again and compares; rank 0 does so with the manifest and the state, too. If
    anything is bad, nothing is removed. What cannot be removed stays.
    """
    # All ranks look before any of them removes something.
    old = [path for _, path in step_folders(folder)][keep:] if mesh.rank == 0 else []
    counts = mesh.gather_texts(str(len(old)), aside=True)
    if counts[0] == "0":
        return ""
    bad = _damage(newest, mine, with_manifest=mesh.rank == 0)
    if problems := [text for text in mesh.gather_texts(bad, aside=True) if text]:
        return f"{newest} cannot be read back: {problems[0]}"
    if mesh.rank == 0:
        with suppress(OSError):
            for path in old:
                remove_checkpoint(path)
    mesh.gather_texts("", aside=True)
    return ""


def _damage(newest: Path, mine: Mapping[str, Entry], with_manifest: bool) -> str:
    """What is wrong with these files of a checkpoint, and with those that rank 0 wrote alone."""
    entries = dict(mine)
    try:
        if with_manifest:
            entries[STATE] = read_manifest(newest).files[STATE]
    except CheckpointError as error:
        return str(error)
    for name, entry in entries.items():
        if reason := check_file(newest, name, entry):
            return f"{name}: {reason}"
    return ""


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint, which stops being one before its first file goes."""
    gone = path.with_name(f"{path.name}.deleted")
    disk.remove_folder(gone)
    disk.rename(path, gone)
    disk.remove_folder(gone)


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed save left behind; nothing else may be saving there."""
    for pattern in ("step-*.tmp", "step-*.deleted"):
        for path in folder.glob(pattern):
            with suppress(OSError):
                disk.remove_folder(path)
