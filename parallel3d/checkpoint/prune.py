"""Removal of old checkpoints, once the newest is known to be good."""

from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

from parallel3d.base.errors import CheckpointError, TrainingError
from parallel3d.checkpoint import disk
from parallel3d.checkpoint.manifest import STATE, Entry, check_file, read_manifest, step_folders
from parallel3d.mesh.agree import agree, on_first
from parallel3d.mesh.mesh import Mesh


def keep_newest(
    folder: Path, keep: int, *, newest: Path, mine: Mapping[str, Entry], mesh: Mesh,
    always: Collection[int] = (),
) -> None:  # fmt: skip
    """Remove all but the newest `keep` checkpoints, unless the newest of them is bad.

    Those of the steps `always` stay, and are not counted. Collective, on the group that is aside.
    `mine`: the files of the newest that this rank wrote, which it reads again and compares; rank 0
    does so with the manifest and the state, too. If anything is bad, nothing is removed and
    TrainingError is raised on all ranks. What cannot be removed stays.
    """

    def look() -> None:
        if reason := _damage(newest, mine, with_manifest=mesh.rank == 0):
            raise TrainingError(f"{newest} cannot be read back: {reason}")

    def remove() -> None:
        with suppress(OSError):
            for name in old:
                remove_checkpoint(folder / name)

    # All ranks look before any of them removes something.
    old = on_first(
        mesh, lambda: [p.name for n, p in step_folders(folder) if n not in always][keep:]
    )
    if old:
        agree(mesh, look)
        on_first(mesh, remove)


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
    """Remove a checkpoint, in such an order that a part of it is never taken for one."""
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
