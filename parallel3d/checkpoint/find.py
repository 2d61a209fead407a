"""Find the checkpoint to resume from: the newest that all ranks can verify, or a named one.

Each rank reads its share of the files in full, compares their digests, and checks that tensor files
are valid.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel3d.base.errors import CheckpointError
from parallel3d.checkpoint import disk
from parallel3d.checkpoint.chunks import ChunkFile
from parallel3d.checkpoint.in_memory import Copies, HostMemory
from parallel3d.checkpoint.manifest import (
    STATE,
    Entry,
    check_file,
    check_state,
    read_manifest,
    read_state,
    step_folders,
    tensor_files,
)
from parallel3d.mesh.agree import agree, on_first
from parallel3d.mesh.mesh import Mesh


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint that all ranks have verified: its folder, tensor files, and state.json."""

    folder: Path
    files: tuple[str, ...]
    state: Mapping[str, Any]
    copies: Copies | None = None
    """The hosts that hold the files, if the folder is in the hosts' memory."""

    @property
    def step(self) -> int:
        """Steps that were done when the checkpoint was written."""
        return int(self.state["step"])


def find(
    folder: Path, resume: int | str, mesh: Mesh, memory: HostMemory | None = None
) -> tuple[FoundCheckpoint | None, list[str]]:
    """Return the checkpoint to resume from, or None, and why newer ones were rejected. Collective.

    - `folder`: the run's checkpoints.
    - `resume`: checkpoint.resume: "none", "auto" (None if no checkpoint can be verified), a step of
      the run, or a path.
    - `memory`: searched, too, if `resume` is "auto"; of equal steps the one on disk comes first.

    Raises CheckpointError on all ranks if a named checkpoint cannot be used.
    """
    if resume == "none":
        return None, []
    if resume != "auto":
        path = folder / f"step-{resume}" if isinstance(resume, int) else Path(resume)
        try:
            return verify_on_all_ranks(path, mesh), []
        except CheckpointError as error:
            setting = f'parallel3d.checkpoint.resume = "{resume}"'
            raise CheckpointError(f"{setting}: {path} {error}") from None
    rejected: list[str] = []
    # All ranks must try the same checkpoints.
    steps = on_first(mesh, lambda: [step for step, _ in step_folders(folder)])
    places = [(step, True, "") for step in steps]
    if memory:
        places += [(step, False, digest) for step, digest in memory.steps()]
    for step, on_disk, digest in sorted(places, reverse=True):
        try:
            if on_disk:
                return verify_on_all_ranks(folder / f"step-{step}", mesh), rejected
            assert memory is not None
            return FoundCheckpoint(*memory.verify(step, digest)), rejected
        except CheckpointError as error:
            rejected.append(f"step-{step} {error}")
    return None, rejected


def set_aside(folder: Path, step: int, mesh: Mesh) -> list[str]:
    """Rename checkpoints after `step` to step-N.rejected and return the new names. Collective.

    Otherwise the next resume would take one of them for the newest.
    """

    def rename() -> list[str]:
        renamed = []
        for number, path in step_folders(folder):
            if number > step:
                rejected = path.with_name(f"{path.name}.rejected")
                with suppress(OSError):
                    disk.remove_folder(rejected)
                    disk.rename(path, rejected)
                    renamed.append(rejected.name)
        return renamed

    names: list[str] = on_first(mesh, rename)
    return names


def verify_on_all_ranks(path: Path, mesh: Mesh) -> FoundCheckpoint:
    """Verify a checkpoint on all ranks and return it. Collective.

    Raises CheckpointError on all ranks, with one line without the folder, if any rank rejects it.
    """

    rejecting = _rejecting(mesh.rank)
    entries, state = on_first(mesh, rejecting(lambda: _read_state_and_files(path)))
    files = {name: Entry(*entry) for name, entry in entries.items()}
    agree(mesh, rejecting(lambda: _check_share(path, files, mesh.rank, mesh.world.size)))
    return FoundCheckpoint(path, tensor_files(files), state)


@contextmanager
def _rejecting(rank: int) -> Iterator[None]:
    try:
        yield
    except (CheckpointError, OSError) as error:
        raise CheckpointError(f"is rejected: {error} (seen by rank {rank})") from None


def _read_state_and_files(path: Path) -> tuple[Mapping[str, Entry], dict[str, object]]:
    """Return the files in the manifest, and the state."""
    manifest = read_manifest(path)
    state = read_state(path)
    check_state(state, manifest.step)
    return manifest.files, state


def _check_share(path: Path, files: Mapping[str, Entry], rank: int, world_size: int) -> None:
    """Read this rank's share of the files in full and compare them with the manifest."""
    names = sorted(files)
    for name in names[rank::world_size]:
        reason = check_file(path, name, files[name])
        if reason:
            raise CheckpointError(f"{name} {reason}")
        if name != STATE:
            ChunkFile(path / name).close()  # raises if it is not valid
    (path / names[rank % len(names)]).stat()  # a rank without a share checks that it sees one
