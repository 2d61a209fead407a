"""Save the training state: all ranks write their files, then rank 0 publishes the checkpoint.

A checkpoint is written to step-N.tmp, one file per rank. When all files are on disk and rank 0 has
their digests, it writes the manifest and renames the folder, so a folder called step-N is always
complete. docs/checkpoint.md lists the guarantees.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from itertools import chain
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
from rich.filesize import decimal

from parallel3d.base.errors import CheckpointError, TrainingError
from parallel3d.base.journal import record
from parallel3d.checkpoint import chunk_runs, disk, free_space
from parallel3d.checkpoint.chunk_runs import HostCopy, copy_bytes
from parallel3d.checkpoint.chunks import header
from parallel3d.checkpoint.in_memory import HostMemory
from parallel3d.checkpoint.manifest import (
    FORMAT,
    STATE,
    TOKENIZER,
    Entry,
    check_file,
    read_manifest,
    state_bytes,
    step_folders,
)
from parallel3d.engine import Engine
from parallel3d.mesh.agree import agree, gather_json, on_first
from parallel3d.mesh.mesh import Mesh
from parallel3d.model.spec import LayerSpec, named_params

_log = logging.getLogger(__name__)
_Write = Callable[[dict[str, Any], Iterable[np.ndarray]], None]
MOST_FAILURES = 3  # failed saves in a row after which training stops


class Saver:
    """Writes checkpoints to a folder and removes all but the newest.

    A failed save (on a full disk, for example) leaves earlier checkpoints alone; the next interval
    tries again.
    """

    def __init__(
        self,
        engine: Engine,
        mesh: Mesh,
        layers: Sequence[LayerSpec],
        *,
        folder: Path,
        keep: int = 2,
        always: Sequence[int] = (),
        asynchronous: bool = True,
        say: Callable[[str], None] = _log.warning,
        hashed: bool = True,
        tokenizer: Path | None = None,
        memory: HostMemory | None = None,
    ) -> None:
        """Create a saver. Collective.

        - `folder`: the run's checkpoints, the same on all ranks.
        - `keep`: number of newest checkpoints to keep.
        - `always`: steps whose checkpoints are kept in addition.
        - `asynchronous`: write from a copy while training continues.
        - `say`: prints a message for the user, on one rank only.
        - `hashed`: False skips the digests.
        - `tokenizer`: a folder to copy into each checkpoint.
        - `memory`: the hosts' memory, for `save_in_memory`.
        """
        self._tokenizer = tokenizer
        self._memory = memory
        self._engine = engine
        self._mesh = mesh
        self._folder = folder
        self._keep = keep
        self._always = always
        self._hashed = hashed
        self._asynchronous = asynchronous
        self._say = say
        self._shapes = {name: spec.shape for name, spec in named_params(layers).items()}
        self._runs = chunk_runs.runs_to_write(engine)
        chunks = [chunk for run in self._runs for chunk in run.chunks]
        self._header = header(chunks) if chunks else b""
        self._numel = sum(run.stop - run.start for run in self._runs)
        self._buffer: HostCopy | None = None
        self._thread: Thread | None = None
        self._problem = ""
        """Why the newest save failed, the same on all ranks; "" if it did not."""
        self._lost: Exception | None = None  # a failure on which the ranks could not agree
        self._failures = 0
        self._memory_problem = ""
        """Why the newest save in memory failed; "" if it did not."""
        self._memory_fails = False  # and it was reported
        self._to_disk = True  # where the thread writes to; else to memory
        self._bytes_by_rank = [
            row[0] for row in mesh.messages.gather_floats([len(self._header) + 4 * self._numel])
        ]
        self.num_bytes = int(sum(self._bytes_by_rank))
        """Bytes of a checkpoint's tensors, over all ranks."""

    @property
    def broken(self) -> bool:
        """True if MOST_FAILURES saves in a row have failed, so that training must stop."""
        return self._failures >= MOST_FAILURES

    def save(self, state: dict[str, object], wait: bool = False) -> float:
        """Save the training state and return the seconds that training waited. Collective.

        Once the saver is `broken` this waits for the save in progress, and begins no other.

        - `state`: contents of state.json, except for the keys that the saver adds.
        - `wait`: return only when the checkpoint is on disk, or the save has failed.
        """
        start = time.perf_counter()
        self.finish()
        if self.broken:
            return time.perf_counter() - start
        self._problem = ""
        self._to_disk = True
        in_background, problem = self._plan(wait)
        if problem:
            self._fail(problem)
        elif in_background:
            self._start(self._write, state)
        else:
            with closing(chunk_runs.host_arrays(self._engine, self._runs)) as arrays:
                self._write(state | self._own_state(), arrays)
            self._conclude()
        return time.perf_counter() - start

    def save_in_memory(self, state: dict[str, object]) -> float:
        """Save to the hosts' memory; return the seconds that training waited. Collective.

        While a checkpoint is written to disk, training waits for this save, but not for the disk.
        A failure is reported, once for several in a row, and training goes on.
        """
        assert self._memory is not None, "no memory was given"
        start = time.perf_counter()
        if self._to_disk:
            self.poll()
        else:
            self.finish()
        lacks = self._memory.lacking_bytes(self._bytes_by_rank)
        rows = self._mesh.messages.gather_floats([self._thread is not None, lacks])
        lacks = max(int(row[1]) for row in rows)
        if lacks:
            self._report_in_memory(
                f"{self._memory.folder.parent}: {decimal(lacks)} of memory missing on a host; "
                "enlarge it (docker: --shm-size), or set checkpoint.in_memory_folder"
            )
        elif self._plan(wait=any(row[0] for row in rows))[0]:
            self._to_disk = False
            self._start(self._write_in_memory, state)
        else:
            with closing(chunk_runs.host_arrays(self._engine, self._runs)) as arrays:
                self._write_in_memory(state | self._own_state(), arrays)
            if self._lost is not None:
                raise self._lost
            self._report_in_memory(self._memory_problem)
        return time.perf_counter() - start

    def _start(self, write: _Write, state: dict[str, Any]) -> None:
        """Write from a copy while training continues."""
        if self._buffer is None:
            # Kept for later saves: new memory costs more than the copy itself.
            self._buffer = HostCopy(self._numel, pinned=self._mesh.device.type != "cpu")
        self._buffer.fill(chunk_runs.live_tensors(self._engine, self._runs))
        args = state | self._own_state(), self._buffer.arrays()
        self._thread = Thread(target=write, args=args, name="checkpoint", daemon=True)
        self._thread.start()

    def poll(self) -> None:
        """Finish an asynchronous save if it has ended."""
        if self._thread is not None and not self._thread.is_alive():
            self.finish()

    def finish(self) -> None:
        """Wait for the save in progress, if there is one."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._conclude()

    def require_saved(self) -> None:
        """Wait for the newest save; raises TrainingError on all ranks if it failed."""
        self.finish()
        if self._problem:
            raise TrainingError(f"the last checkpoint was not saved: {self._problem}")

    def _plan(self, wait: bool) -> tuple[bool, str]:
        """Return whether to write in the background, and why the save is impossible, or ""."""
        asynchronous = self._asynchronous and not wait
        new_bytes = 0 if self._buffer is not None else copy_bytes(self._numel)
        memory_lacks = 0
        disk_lacks = 0
        with suppress(OSError):  # out of files, or the disk is away: the write reports it
            memory_lacks = free_space.missing_memory_bytes(new_bytes, self._mesh.local_size)
            disk_lacks = free_space.missing_disk_bytes(self._folder, self.num_bytes)
        if not asynchronous:
            memory_lacks = 0
        rows = self._mesh.messages.gather_floats([memory_lacks, disk_lacks])
        memory_lacks = max(int(row[0]) for row in rows)
        disk_lacks = max(int(row[1]) for row in rows)
        if disk_lacks:
            lacks = f"{decimal(disk_lacks)} of disk space missing for {decimal(self.num_bytes)}"
            return False, f"{self._folder}: {lacks}"
        if memory_lacks:
            self._say(
                f"host memory lacks {decimal(memory_lacks)} per rank to copy the training state; "
                "training waits while this checkpoint is written (checkpoint.asynchronous)"
            )
        return asynchronous and not memory_lacks, ""

    def _report_in_memory(self, problem: str) -> None:
        """Report the first of several saves in memory that fail; "" if one succeeded."""
        if problem and not self._memory_fails:
            if self._mesh.rank == 0:
                record("not_saved", tier="memory", reason=problem)
            self._say(f"NOT SAVED IN MEMORY: {problem}. Training continues")
        self._memory_fails = bool(problem)

    def _own_state(self) -> dict[str, object]:
        return {
            "format": FORMAT,
            "parameters": {name: {"shape": list(s)} for name, s in self._shapes.items()},
            **self._engine.states.counters(),
        }

    def _write(self, state: dict[str, Any], arrays: Iterable[np.ndarray]) -> None:
        """Write the checkpoint; a failure is left in `_problem`, the same on all ranks."""
        self._problem = self._try(lambda: self._write_all(state, arrays))

    def _write_in_memory(self, state: dict[str, Any], arrays: Iterable[np.ndarray]) -> None:
        """Write to the hosts' memory; a failure is left in `_memory_problem`."""
        memory = self._memory
        assert memory is not None
        self._memory_problem = self._try(
            lambda: memory.save(state, lambda folder: self._write_own(folder, arrays))
        )

    def _try(self, write: Callable[[], None]) -> str:
        """Return why a write failed, or ""."""
        try:
            write()
        except TrainingError as error:
            return str(error)
        except Exception as error:  # a rank was lost; raised again where training can report it
            self._lost = error
        return ""

    def _write_all(self, state: dict[str, Any], arrays: Iterable[np.ndarray]) -> None:
        """Write the checkpoint; on failure, remove it and raise TrainingError on all ranks."""
        step = state["step"]
        mesh = self._mesh
        folder = self._folder / f"step-{step}"
        partial = self._folder / f"step-{step}.tmp"
        remove = disk.remove_folder
        written = partial
        try:
            self._on_first(lambda: disk.make_folder(partial))
            entries = agree(mesh, lambda: self._write_own(partial, arrays))
            all_entries = gather_json(mesh, entries, aside=True)
            files = {}
            for of_rank in all_entries:
                for name, entry in of_rank.items():
                    files[name] = Entry(*entry)
            self._on_first(lambda: self._publish(state, files, partial, folder))
            remove = disk.remove_checkpoint
            written = folder
            own_files = {}
            if self._hashed:
                own_files = {name: files[name] for name in entries}
            keep_newest(
                self._folder,
                self._keep,
                newest=folder,
                own_files=own_files,
                mesh=mesh,
                always=self._always,
            )
        except TrainingError:
            with suppress(TrainingError):
                self._on_first(lambda: remove(written))
            raise

    def _write_own(self, partial: Path, arrays: Iterable[np.ndarray]) -> dict[str, Any]:
        """Write this rank's file, if it has one, and return {name: [size, digest]}."""
        if not self._header:
            return {}
        rank = self._mesh.rank
        name = f"shard-{rank:05d}-of-{self._mesh.world.size:05d}.safetensors"
        with disk.reporting(partial / name, f"rank {rank}: "):
            entry = disk.write_file(partial / name, chain([self._header], arrays), self._hashed)
        return {name: [entry.size, entry.digest]}

    def _publish(
        self, state: dict[str, Any], files: dict[str, Entry], partial: Path, folder: Path
    ) -> None:
        """Write the state and the manifest, and rename the folder. Called on rank 0 only."""
        if self._tokenizer is not None:
            disk.copy_folder(self._tokenizer, partial / TOKENIZER)
        disk.publish(partial, folder, state["step"], state_bytes(state), files)
        with suppress(OSError):  # only a hint for people
            disk.replace_text(self._folder / "latest", f"{folder.name}\n")

    def _on_first(self, work: Callable[[], None]) -> None:
        """Call `work` on rank 0; raises TrainingError on all ranks if it fails."""
        on_first(self._mesh, disk.reporting(self._folder, "rank 0: ")(work))

    def _conclude(self) -> None:
        if self._lost is not None:
            raise self._lost
        if not self._to_disk:
            self._report_in_memory(self._memory_problem)
        elif self._problem:
            self._fail(self._problem)
        else:
            self._failures = 0

    def _fail(self, problem: str) -> None:
        self._problem = problem
        self._failures += 1
        if self._mesh.rank == 0:
            record("not_saved", reason=problem, count=self._failures)
        then = "Training stops" if self.broken else "Training continues; the next save tries again"
        self._say(
            f"CHECKPOINT NOT SAVED ({self._failures} of {MOST_FAILURES} in a row): {problem}. "
            f"Earlier checkpoints are unaffected. {then}"
        )


def keep_newest(
    folder: Path,
    keep: int,
    *,
    newest: Path,
    own_files: Mapping[str, Entry],
    mesh: Mesh,
    always: Collection[int] = (),
) -> None:
    """Remove all but the newest `keep` checkpoints, after reading the newest back.

    Collective, on the background group. Rank 0 also reads the manifest and the state. Raises
    TrainingError on all ranks, and removes nothing, if a file is damaged.

    - `own_files`: the newest checkpoint's files that this rank wrote and reads back.
    - `always`: steps that are kept and not counted.
    """

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
                disk.remove_checkpoint(folder / name)

    def find_old() -> list[str]:
        counted = [path.name for step, path in step_folders(folder) if step not in always]
        return counted[keep:]

    # All ranks read back before anything is removed.
    old = on_first(mesh, find_old)
    if old:
        agree(mesh, read_back)
        on_first(mesh, remove)
