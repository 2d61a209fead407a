"""Saving of the training state: all ranks write, one gives the checkpoint its name.

A checkpoint is written into step-N.tmp, each rank its own file; once every file is on disk and its
digest known to rank 0, that rank writes the manifest and renames the folder. So what is called
step-N is whole, whatever happens. docs/checkpoint.md lists the guarantees.
"""

import json
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import chain
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
from rich.filesize import decimal

from parallel3d.base.errors import CheckpointError, TrainingError
from parallel3d.checkpoint import chunk_runs, disk, free_space
from parallel3d.checkpoint.chunk_runs import HostCopy, copy_bytes
from parallel3d.checkpoint.chunks import header
from parallel3d.checkpoint.manifest import (
    FORMAT,
    STATE,
    TOKENIZER,
    Entry,
    check_file,
    manifest_bytes,
    read_manifest,
    step_folders,
)
from parallel3d.engine import Engine
from parallel3d.mesh.agree import agree, gather_json, on_first
from parallel3d.mesh.mesh import Mesh
from parallel3d.model.spec import LayerSpec, named_params

_log = logging.getLogger(__name__)
MOST_FAILURES = 3  # saves in a row that may fail before training stops


class Saver:
    """A writer of checkpoints into `folder`, the same on every rank, that keeps the newest few.

    A save that fails, on a full disk for instance, leaves the earlier checkpoints as they are, and
    is tried again at the next interval. `always`: steps whose checkpoints are kept besides.
    `say` tells the user; on one rank alone. `tokenizer`: a folder that goes into each checkpoint.
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
    ) -> None:
        self._tokenizer = tokenizer
        self._engine, self._mesh, self._folder = engine, mesh, folder
        self._keep, self._always, self._hashed = keep, always, hashed
        self._asynchronous, self._say = asynchronous, say
        self._shapes = {name: spec.shape for name, spec in named_params(layers).items()}
        self._runs = chunk_runs.runs_to_write(engine, mesh)
        chunks = [chunk for run in self._runs for chunk in run.chunks]
        self._header = header(chunks) if chunks else b""
        self._numel = sum(run.stop - run.start for run in self._runs)
        self._buffer: HostCopy | None = None
        self._thread: Thread | None = None
        self._problem = ""  # of the newest save, the same on all ranks
        self._lost: Exception | None = None  # what the ranks did not come to an answer for
        self._failures = 0
        mine = len(self._header) + 4 * self._numel
        self.num_bytes = int(sum(row[0] for row in mesh.gather_floats([mine])))
        """Size of a checkpoint's tensors, of all ranks together."""

    @property
    def broken(self) -> bool:
        """True if MOST_FAILURES saves in a row have failed, so that training must stop."""
        return self._failures >= MOST_FAILURES

    def expected_seconds(self) -> float:
        """Approximate seconds of a save until it is on disk, by a small trial. Collective."""
        try:
            mine = free_space.seconds_to_write(self._folder, 4 * self._numel)
        except OSError:
            mine = 0.0  # the first save will say what is wrong
        return max(row[0] for row in self._mesh.gather_floats([mine]))

    def save(self, state: dict[str, Any], wait: bool = False) -> float:
        """Save the current training state; gives the seconds for which training was held up.

        Collective. `state` is what state.json holds beside what the saver itself knows. With `wait`
        it is on disk, or has failed, when this returns.
        """
        start = time.perf_counter()
        self.finish()
        self._problem = ""
        alone, problem = self._plan(wait)
        if problem:
            self._fail(problem)
            return time.perf_counter() - start
        state = {**state, **self._own_state()}
        if alone:
            buffer = self._copied()
            self._thread = Thread(
                target=self._write, args=(state, buffer.arrays()), name="checkpoint", daemon=True
            )
            self._thread.start()
        else:
            with closing(chunk_runs.host_arrays(self._engine, self._runs)) as arrays:
                self._write(state, arrays)
            self._conclude()
        return time.perf_counter() - start

    def poll(self) -> None:
        """Take note of an asynchronous save that has ended."""
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
        """True to write behind the training; and why nothing can be saved ("" if it can)."""
        wanted = self._asynchronous and not wait
        new_bytes = 0 if self._buffer is not None else copy_bytes(self._numel)
        memory_lacks = free_space.memory_lacks(new_bytes, self._mesh.local_size)
        disk_lacks = free_space.disk_lacks(self._folder, self.num_bytes)
        rows = self._mesh.gather_floats([memory_lacks if wanted else 0, disk_lacks])
        memory, space = (max(int(row[i]) for row in rows) for i in range(2))
        if space:
            need = decimal(self.num_bytes)
            return False, f"{self._folder} has no room: {decimal(space)} missing of {need}"
        if memory:
            self._say(
                f"host memory lacks {decimal(memory)} a rank for a copy of the training state; "
                "this checkpoint is written while training waits (checkpoint.asynchronous)"
            )
        return wanted and not memory, ""

    def _copied(self) -> HostCopy:
        if self._buffer is None:
            # It is kept: fresh memory costs more than the copy itself.
            self._buffer = HostCopy(self._numel, pinned=self._mesh.device.type != "cpu")
        self._buffer.fill(chunk_runs.live_tensors(self._engine, self._runs))
        return self._buffer

    def _own_state(self) -> dict[str, Any]:
        counters = self._engine.states.counters()
        return {
            "format": FORMAT,
            "parameters": {name: {"shape": list(s)} for name, s in self._shapes.items()},
            "optimizer_steps": counters["optimizer_steps"],
            "loss_scale": counters["loss_scale"],
        }

    def _write(self, state: dict[str, Any], arrays: Iterable[np.ndarray]) -> None:
        """Write, agree, name; leaves in `_problem` what went wrong, on every rank the same."""
        try:
            self._write_all(state, arrays)
        except TrainingError as error:
            self._problem = str(error)
        except Exception as error:  # a lost rank: training cannot go on, and shall say why
            self._lost = error

    def _write_all(self, state: dict[str, Any], arrays: Iterable[np.ndarray]) -> None:
        """Raises TrainingError on all ranks if it cannot be done, and leaves nothing of it."""
        step, mesh = state["step"], self._mesh
        folder, partial = self._folder / f"step-{step}", self._folder / f"step-{step}.tmp"
        remove, begun = disk.remove_folder, partial
        try:
            self._on_first(lambda: disk.make_folder(partial))
            mine = agree(mesh, lambda: self._write_own(partial, arrays))
            found = gather_json(mesh, mine, aside=True)
            files = {name: Entry(*entry) for own in found for name, entry in own.items()}
            self._on_first(lambda: self._name(state, files, partial, folder))
            remove, begun = disk.remove_checkpoint, folder
            known = {name: Entry(*entry) for name, entry in mine.items() if self._hashed}
            keep_newest(
                self._folder, self._keep, newest=folder, mine=known, mesh=mesh, always=self._always
            )
        except TrainingError:
            with suppress(TrainingError):
                self._on_first(lambda: remove(begun))
            raise

    def _write_own(self, partial: Path, arrays: Iterable[np.ndarray]) -> dict[str, Any]:
        """Write this rank's file, if it has anything to write; its name, size and digest."""
        if not self._header:
            return {}
        rank = self._mesh.rank
        name = f"shard-{rank:05d}-of-{self._mesh.size('world'):05d}.safetensors"
        with _reporting(partial / name, f"rank {rank}: "):
            entry = disk.write_file(partial / name, chain([self._header], arrays), self._hashed)
        return {name: [entry.size, entry.digest]}

    def _name(
        self, state: dict[str, Any], files: dict[str, Entry], partial: Path, folder: Path
    ) -> None:
        """Write the state and the manifest, and give the folder its name; one rank does."""
        text = json.dumps(state, indent=1, sort_keys=True, allow_nan=False) + "\n"
        if self._tokenizer is not None:
            disk.copy_folder(self._tokenizer, partial / TOKENIZER)
        files["state.json"] = disk.write_file(partial / "state.json", [text.encode()])
        disk.write_file(partial / "manifest.json", [manifest_bytes(state["step"], files)])
        disk.sync_folder(partial)
        if folder.exists():
            # It belongs to a history that was left when an earlier step was resumed.
            disk.remove_checkpoint(folder)
        disk.rename(partial, folder)
        with suppress(OSError):  # a hint, which nothing depends on
            disk.replace_text(self._folder / "latest", f"{folder.name}\n")

    def _on_first(self, work: Callable[[], None]) -> None:
        """Have rank 0 do it; raises TrainingError on all ranks if that cannot."""
        on_first(self._mesh, _reporting(self._folder)(work))

    def _conclude(self) -> None:
        if self._lost is not None:
            raise self._lost
        if self._problem:
            self._fail(self._problem)
        else:
            self._failures = 0

    def _fail(self, problem: str) -> None:
        self._problem = problem
        self._failures += 1
        then = "training stops" if self.broken else "training goes on; tried again at the next one"
        self._say(
            f"CHECKPOINT NOT SAVED ({self._failures} of {MOST_FAILURES} in a row): {problem}. "
            f"The checkpoints before it stand; {then}"
        )


def keep_newest(
    folder: Path, keep: int, *, newest: Path, mine: Mapping[str, Entry], mesh: Mesh,
    always: Collection[int] = (),
) -> None:  # fmt: skip
    """Remove all but the newest `keep` checkpoints, unless the newest of them is bad.

    Collective, on the group that is aside. `always`: steps that stay, and are not counted. `mine`:
    the files of the newest that this rank wrote, and reads again; rank 0 reads the manifest and the
    state, too. Raises TrainingError on all ranks, and removes nothing, if one is bad.
    """

    def look() -> None:
        if reason := _damage(newest, mine, with_manifest=mesh.rank == 0):
            raise TrainingError(f"{newest} cannot be read back: {reason}")

    def remove() -> None:
        with suppress(OSError):
            for name in old:
                disk.remove_checkpoint(folder / name)

    # All ranks look before any of them removes something.
    old = on_first(
        mesh, lambda: [p.name for n, p in step_folders(folder) if n not in always][keep:]
    )
    if old:
        agree(mesh, look)
        on_first(mesh, remove)


def _damage(newest: Path, mine: Mapping[str, Entry], with_manifest: bool) -> str:
    """The fault of these files of a checkpoint, or of those that rank 0 wrote alone; else ""."""
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


@contextmanager
def _reporting(place: Path, prefix: str = "") -> Iterator[None]:
    """Make errors of any kind a TrainingError: the other ranks wait to hear of them."""
    try:
        yield
    except Exception as error:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        place = getattr(error, "filename", None) or place
        raise TrainingError(f"{prefix}{reason} ({place})") from None
