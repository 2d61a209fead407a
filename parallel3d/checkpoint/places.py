"""The places that keep a run's checkpoints: what saving and resuming ask of each.

`on_disk.py` is the folder of the run. The command that trains hands further places to a run.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from parallel3d.checkpoint.manifest import Entry

Entries = Mapping[str, Sequence[Any]]
"""Files by name, each with its size in bytes and its digest, as JSON holds them."""
WriteFiles = Callable[[Path], Entries]
"""Writes this rank's files to a folder and returns their entries. Not collective."""


@dataclass(frozen=True)
class Copies:
    """The ranks that can read the files of a checkpoint that no folder holds alone."""

    holders: Mapping[str, Sequence[int]]
    """Ranks whose hosts hold an intact copy, by file; the first one reads the file's header."""
    fetch: Callable[[Collection[str]], None]
    """Copy files that this rank reads to its host, if they are not there. Collective; raises
    TrainingError on all ranks if a host cannot take them."""


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint that all ranks have verified: its folder, tensor files, and state.json."""

    folder: Path
    files: tuple[str, ...]
    state: Mapping[str, Any]
    copies: Copies | None = None
    """The ranks that can read the files; None if every rank sees all of them in `folder`."""
    place: "Place | None" = None
    """The place that holds it; None for a folder on disk, of this run or of another one."""

    @property
    def step(self) -> int:
        """Steps that were done when the checkpoint was written."""
        return int(self.state["step"])

    @property
    def tier(self) -> str:
        """Where it is: "disk", or the tier of its place."""
        return self.place.tier if self.place else "disk"


class Place(Protocol):
    """Keeps checkpoints of one run. The ranks call its methods together."""

    tier: ClassVar[str]
    """Its name in the run's journal: "disk" or "memory"."""
    waits_for_others: ClassVar[bool]
    """True if a save here waits for one that is still being written at another place."""
    hashed: bool = True
    """False if files are written without their digests."""
    every: int = 0
    """Steps between the saves here, besides those on disk."""
    also_writes: Sequence[int] = ()
    """Ranks whose files this rank writes here, too: it holds copies of their shards."""
    problem: str = ""
    """Why the newest save failed, the same on all ranks; "" if it did not."""
    num_failures: int = 0
    """Number of newest saves that failed in a row."""

    @property
    def is_broken(self) -> bool:
        """True if so many saves failed that none is begun any more, and training must stop."""
        return False

    def missing_bytes(self, bytes_by_rank: Sequence[float]) -> int:
        """Return the bytes that this rank sees missing for another step; 0 if it fits.

        Not collective; may raise OSError.
        """

    def describe_missing(self, missing_bytes: int, num_bytes: int) -> str:
        """Return why a checkpoint of `num_bytes` is not saved."""

    def write(self, state: Mapping[str, Any], write_files: WriteFiles) -> None:
        """Save a step, maybe in a thread beside training. Collective.

        Raises TrainingError on all ranks, and leaves earlier steps alone, if it cannot be saved.

        - `state`: contents of state.json; rank 0's are used.
        """

    def conclude(self, problem: str) -> str:
        """Note the end of a save, and return a message for the user, or "".

        - `problem`: why it failed, the same on all ranks; "" if it did not.
        """
        self.problem = problem
        if not problem:
            self.num_failures = 0
            return ""
        self.num_failures += 1
        return self.report_failure()

    def report_failure(self) -> str:
        """Record in the journal that a save failed, and return a message for the user, or ""."""

    def steps(self) -> list[tuple[int, str]]:
        """Return the steps that it holds, each with what tells its versions apart. Collective."""

    def verify(self, step: int, version: str) -> FoundCheckpoint:
        """Read a step completely and return it. Collective.

        Raises CheckpointError on all ranks, with one line, if it cannot be used.
        """

    def begin(self) -> None:
        """Note that the run's folder is complete; called on rank 0."""
        return

    def note_restart(self, step: int) -> None:
        """Note that a run is about to load a step from here. Collective."""
        return

    def forget_after(self, step: int) -> list[str]:
        """Forget the steps after `step`, which are no longer part of the run. Collective.

        With -1 the run goes on from elsewhere, and all steps are forgotten. Returns the names of
        what was set aside for the user.
        """

    def end(self) -> None:
        """Remove what a run that has ended well does not need."""
        return


def merged(entries: Iterable[Entries]) -> dict[str, Entry]:
    """Return the files of all ranks by name."""
    files = {}
    for of_rank in entries:
        for name, entry in of_rank.items():
            files[name] = Entry(*entry)
    return files
