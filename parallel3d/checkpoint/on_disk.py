"""The checkpoints in a run's folder, which all ranks share.

A checkpoint is written to step-N.tmp, one file per rank. When all files are on disk and rank 0 has
their digests, it writes the manifest and renames the folder, so a folder called step-N is always
complete. docs/checkpoint.md lists the guarantees.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from rich.filesize import decimal

from parallel3d.base.errors import CheckpointError, TrainingError
from parallel3d.base.journal import record
from parallel3d.checkpoint import disk, free_space
from parallel3d.checkpoint.chunks import ChunkFile
from parallel3d.checkpoint.manifest import (
    STATE,
    TOKENIZER,
    TOKENIZER_FILES,
    Entry,
    check_file,
    check_state,
    read_manifest,
    read_state,
    state_bytes,
    step_folders,
    tensor_files,
)
from parallel3d.checkpoint.places import FoundCheckpoint, Place, WriteFiles, merged
from parallel3d.mesh.agree import agree, gather_json, on_first
from parallel3d.mesh.mesh import Mesh

MOST_FAILURES = 3  # failed saves in a row after which training stops


_OF_A_RUN = ("config.json", "corpus.json", TOKENIZER)


class _RunFolder(NamedTuple):
    """The identity of a run's folder, by which another one in its place is noticed."""

    device: int
    inode: int
    files: frozenset[str]
    """The files of _OF_A_RUN that it has."""

    @classmethod
    def of(cls, folder: Path) -> "_RunFolder | None":
        """Return the identity of what is there now; None if the folder is gone."""
        try:
            status = folder.stat()
            files = frozenset(name for name in _OF_A_RUN if (folder / name).exists())
        except FileNotFoundError:
            return None
        return cls(status.st_dev, status.st_ino, files)


class DiskPlace(Place):
    """Keeps the newest checkpoints in a folder.

    A failed save (on a full disk, for example) leaves earlier checkpoints alone; the next interval
    tries again.
    """

    tier = "disk"
    waits_for_others = True

    def __init__(
        self,
        mesh: Mesh,
        folder: Path,
        *,
        keep: int = 2,
        always: Collection[int] = (),
        hashed: bool = True,
        tokenizer: Path | None = None,
    ) -> None:
        """Create the place without looking at the folder.

        - `folder`: the same on all ranks; it may not exist yet.
        - `keep`: number of newest checkpoints to keep.
        - `always`: steps whose checkpoints are kept in addition.
        - `hashed`: False skips the digests.
        - `tokenizer`: a folder to copy into each checkpoint, if it exists.
        """
        self._mesh = mesh
        self._folder = folder
        self._keep = keep
        self._always = always
        self._tokenizer = tokenizer
        self._run_folder: _RunFolder | None = None
        self.hashed = hashed

    @property
    def is_broken(self) -> bool:
        """True if MOST_FAILURES saves in a row have failed, so that training must stop."""
        return self.num_failures >= MOST_FAILURES

    def missing_bytes(self, bytes_by_rank: Sequence[float]) -> int:
        """Return the bytes that the disk lacks for another checkpoint."""
        return free_space.missing_disk_bytes(self._folder, int(sum(bytes_by_rank)))

    def describe_missing(self, missing_bytes: int, num_bytes: int) -> str:
        """Return why a checkpoint of `num_bytes` is not saved."""
        lacks = f"{decimal(missing_bytes)} of disk space missing for {decimal(num_bytes)}"
        return f"{self._folder}: {lacks}"

    def begin(self) -> None:
        """Note the run's folder, which must still be there, with these files, when it saves."""
        self._run_folder = _RunFolder.of(self._folder.parent)

    def write(self, state: Mapping[str, Any], write_files: WriteFiles) -> None:
        """Write a checkpoint, and remove older ones; on failure, remove it and raise."""
        mesh = self._mesh
        folder = self._folder / f"step-{state['step']}"
        partial = folder.with_name(f"{folder.name}.tmp")
        remove = disk.remove_folder
        written = partial
        try:
            self._on_first(lambda: self._make(partial))
            entries = agree(mesh, lambda: write_files(partial))
            files = merged(gather_json(mesh, entries, aside=True))
            self._on_first(lambda: self._publish(state, files, partial, folder))
            remove = disk.remove_checkpoint
            written = folder
            self._keep_newest(folder, merged([entries] if self.hashed else []))
        except TrainingError:
            with suppress(TrainingError):
                self._on_first(lambda: remove(written))
            raise

    def _make(self, partial: Path) -> None:
        """Make the folder of a save, if the run's folder is still the same."""
        if self._run_folder and _RunFolder.of(self._folder.parent) != self._run_folder:
            raise TrainingError(
                f"{self._folder.parent} is not what it was when the run began: it, or one of "
                f"{', '.join(_OF_A_RUN)}, was removed or replaced; put it back, or start "
                "the same command again to begin anew"
            )
        disk.make_folder(partial)

    def _publish(
        self, state: Mapping[str, Any], files: dict[str, Entry], partial: Path, folder: Path
    ) -> None:
        """Write the state and the manifest, and rename the folder. Called on rank 0 only."""
        tokenizer = self._tokenizer
        if tokenizer and tokenizer.is_dir() and any(tokenizer.iterdir()):  # none with ids only
            copied = disk.copy_folder(tokenizer, partial / TOKENIZER)
            entries = {name: entry._asdict() for name, entry in copied.items()}
            state = {**state, TOKENIZER_FILES: entries}
        disk.publish(partial, folder, state["step"], state_bytes(state), files)
        with suppress(OSError):  # only a hint for people
            disk.replace_text(self._folder / "latest", f"{folder.name}\n")

    def _keep_newest(self, newest: Path, own_files: Mapping[str, Entry]) -> None:
        """Remove all but the newest checkpoints, after reading the newest back.

        Collective, on the background group. Rank 0 also reads the manifest and the state. Raises
        TrainingError on all ranks, and removes nothing, if a file is damaged.

        - `own_files`: the newest checkpoint's files that this rank wrote and reads back.
        """
        mesh = self._mesh

        @disk.reporting(newest, "cannot be read back: ")
        def read_back() -> None:
            entries = dict(own_files)
            if mesh.rank == 0:
                entries[STATE] = read_manifest(newest).files[STATE]
            for name, entry in entries.items():
                reason = check_file(newest, name, entry)
                if reason:
                    raise CheckpointError(f"{name}: {reason}")

        def remove() -> None:
            with suppress(OSError):
                for name in old:
                    disk.remove_checkpoint(self._folder / name)

        def find_old() -> list[str]:
            steps = step_folders(self._folder)
            counted = [path.name for step, path in steps if step not in self._always]
            return counted[self._keep :]

        # All ranks read back before anything is removed.
        old = on_first(mesh, find_old)
        if old:
            agree(mesh, read_back)
            on_first(mesh, remove)

    def _on_first(self, work: Callable[[], None]) -> None:
        """Call `work` on rank 0; raises TrainingError on all ranks if it fails."""
        on_first(self._mesh, disk.reporting(self._folder, "rank 0: ")(work))

    def report_failure(self) -> str:
        """Record every failed save, and return a message about it."""
        if self._mesh.rank == 0:
            record("not_saved", reason=self.problem, count=self.num_failures)
        then = "Training continues; the next save tries again"
        if self.is_broken:
            then = "Training stops"
        return (
            f"CHECKPOINT NOT SAVED ({self.num_failures} of {MOST_FAILURES} in a row): "
            f"{self.problem}. It has changed no earlier checkpoint. {then}"
        )

    def steps(self) -> list[tuple[int, str]]:
        """Return the steps that rank 0 sees, so that all ranks try the same ones. Collective."""
        steps = on_first(self._mesh, lambda: [step for step, _ in step_folders(self._folder)])
        return [(step, "") for step in steps]

    def verify(self, step: int, version: str) -> FoundCheckpoint:
        """Verify a step on all ranks and return it. Collective."""
        return verify_on_all_ranks(self._folder / f"step-{step}", self._mesh)

    def forget_after(self, step: int) -> list[str]:
        """Rename checkpoints after `step` to step-N.rejected and return the new names. Collective.

        Otherwise the next resume would take one of them for the newest.
        """

        def rename() -> list[str]:
            renamed = []
            for number, path in step_folders(self._folder):
                if number > step:
                    rejected = path.with_name(f"{path.name}.rejected")
                    with suppress(OSError):
                        disk.remove_folder(rejected)
                        disk.rename(path, rejected)
                        renamed.append(rejected.name)
            return renamed

        names: list[str] = on_first(self._mesh, rename)
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
