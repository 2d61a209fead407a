"""Search for the checkpoint to resume from: the newest that every rank can verify, or a named one.

Rank 0 sees that all files are there with their sizes; each rank reads its share of them whole to
compare digests, and sees that a file is what its name says.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel3d.base.errors import CheckpointError
from parallel3d.checkpoint import disk
from parallel3d.checkpoint.chunks import ChunkFile
from parallel3d.checkpoint.manifest import (
    Entry,
    check_file,
    read_manifest,
    read_state,
    shapes_of,
    step_folders,
)
from parallel3d.mesh.agree import agree, on_first
from parallel3d.mesh.mesh import Mesh

_TENSORS = ".safetensors"
_NEEDED = {
    *("tokens", "next_sample", "optimizer_steps", "loss_scale"),
    *("config", "mesh", "tokenizer", "corpus"),
}


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint that all ranks have verified: its folder, tensor files, and state.json."""

    folder: Path
    files: tuple[str, ...]
    state: Mapping[str, Any]

    @property
    def step(self) -> int:
        """The steps that were done when the checkpoint was written."""
        return int(self.state["step"])


def find(folder: Path, resume: int | str, mesh: Mesh) -> tuple[FoundCheckpoint | None, list[str]]:
    """The checkpoint that `checkpoint.resume` names, and why newer ones were rejected.

    Collective. `folder` holds the run's own checkpoints. "auto" gives None where none can be
    verified. Raises CheckpointError on all ranks if the one that was named cannot be used.
    """
    if resume == "none":
        return None, []
    if resume != "auto":
        path = folder / f"step-{resume}" if isinstance(resume, int) else Path(resume)
        try:
            return verified(path, mesh), []
        except CheckpointError as error:
            setting = f'parallel3d.checkpoint.resume = "{resume}"'
            raise CheckpointError(f"{setting}: {path} {error}") from None
    rejected: list[str] = []
    # All ranks must try the same ones.
    for name in on_first(mesh, lambda: [path.name for _, path in step_folders(folder)]):
        try:
            return verified(folder / name, mesh), rejected
        except CheckpointError as error:
            rejected.append(f"{name} {error}")
    return None, rejected


def set_aside(folder: Path, step: int, mesh: Mesh) -> list[str]:
    """Rename the checkpoints after `step`, which are no longer the run's; gives the new names.

    Collective. They must not be taken for the newest when the run is resumed again.
    """

    def rename() -> list[str]:
        renamed = []
        for number, path in step_folders(folder):
            if number > step:
                aside = path.with_name(f"{path.name}.rejected")
                with suppress(OSError):
                    disk.remove_folder(aside)
                    disk.rename(path, aside)
                    renamed.append(aside.name)
        return renamed

    names: list[str] = on_first(mesh, rename)
    return names


def verified(path: Path, mesh: Mesh) -> FoundCheckpoint:
    """The checkpoint in a folder that every rank can read; collective.

    CheckpointError on all ranks, in one line without the folder, unless each finds it good.
    """

    rejecting = _rejecting(mesh.rank)
    found, state = on_first(mesh, rejecting(lambda: _described(path)))
    files = {name: Entry(*entry) for name, entry in found.items()}
    agree(mesh, rejecting(lambda: _look(path, files, mesh.rank, mesh.size("world"))))
    return FoundCheckpoint(
        path, tuple(name for name in sorted(files) if name.endswith(_TENSORS)), state
    )


@contextmanager
def _rejecting(rank: int) -> Iterator[None]:
    try:
        yield
        return
    except CheckpointError as error:
        problem = str(error)
    except OSError as error:
        problem = f"{error.strerror} ({error.filename})"
    raise CheckpointError(f"is rejected: {problem} (seen by rank {rank})")


def _described(path: Path) -> tuple[Mapping[str, Entry], dict[str, Any]]:
    """The files that the manifest lists, all there with their sizes, and the state."""
    manifest = read_manifest(path)
    for name, entry in sorted(manifest.files.items()):
        _check_size(path, name, entry)
    state = read_state(path)
    if state.get("step") != manifest.step:
        raise CheckpointError(f"state.json is of step {state.get('step')}, not {manifest.step}")
    shapes_of(state)
    if missing := sorted(_NEEDED - state.keys()):
        raise CheckpointError(f"state.json has no {missing[0]!r}")
    return manifest.files, state


def _look(path: Path, files: Mapping[str, Entry], rank: int, world_size: int) -> None:
    """Read this rank's share of the files to their ends; see that they are as the manifest says."""
    names = sorted(files)
    for name in names[rank::world_size]:
        if reason := check_file(path, name, files[name]):
            raise CheckpointError(f"{name} {reason}")
        if name.endswith(_TENSORS):
            ChunkFile(path / name).close()  # raises where it is none
    # A rank without a share sees that the folder is there at all.
    _check_size(path, names[rank % len(names)], files[names[rank % len(names)]])


def _check_size(path: Path, name: str, entry: Entry) -> None:
    if (size := (path / name).stat().st_size) != entry.size:
        raise CheckpointError(f"{name} is {size} bytes, not {entry.size}")
