"""Save the training state to one of the places that keep a run's checkpoints.

The saver knows how: it copies the state, starts a thread, and writes this rank's file. A place
(`places.py`) says whether a checkpoint fits, publishes it, and judges failures; `train/saving.py`
says when to save.
"""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
from rich.filesize import decimal

from parallel3d.base.errors import TrainingError
from parallel3d.base.say import Say
from parallel3d.checkpoint import chunk_runs, disk, free_space
from parallel3d.checkpoint.chunk_runs import ChunkRun, HostCopy, copy_bytes
from parallel3d.checkpoint.chunks import header
from parallel3d.checkpoint.manifest import FORMAT
from parallel3d.checkpoint.places import Entries, Place
from parallel3d.engine import Engine
from parallel3d.mesh.mesh import Mesh
from parallel3d.model import optimizers
from parallel3d.model.spec import LayerSpec, named_params

_log = logging.getLogger(__name__)


@dataclass
class _Save:
    """A save of one step to a place, and what came of it."""

    place: Place
    state: Mapping[str, Any]
    problem: str = ""
    """Why it failed, the same on all ranks; "" if it did not."""
    lost: Exception | None = None
    """A failure on which the ranks could not agree."""


@dataclass(frozen=True)
class _File:
    """A rank's file: the runs of chunks in it, and the header that names them ("" if none)."""

    rank: int
    runs: Sequence[ChunkRun]

    @cached_property
    def header(self) -> bytes:
        chunks = [chunk for run in self.runs for chunk in run.chunks]
        return header(chunks) if chunks else b""

    @cached_property
    def numel(self) -> int:
        return sum(run.stop - run.start for run in self.runs)


class Saver:
    """Writes checkpoints to places, one at a time in the background."""

    def __init__(
        self,
        engine: Engine,
        mesh: Mesh,
        layers: Sequence[LayerSpec],
        places: Sequence[Place],
        *,
        asynchronous: bool = True,
        say: Say = _log.warning,
    ) -> None:
        """Create a saver. Collective.

        - `places`: where it can save to; the first one is the disk.
        - `asynchronous`: write from a copy while training continues.
        - `say`: prints a message for the user, on one rank only.
        """
        self._engine = engine
        self._mesh = mesh
        self.places = places
        self._asynchronous = asynchronous
        self._say = say
        self._parameters = {
            name: {"shape": list(spec.shape)} for name, spec in named_params(layers).items()
        }
        own = _File(mesh.rank, chunk_runs.runs_to_write(engine))
        self._files = [own]
        for rank in sorted({rank for place in places for rank in place.also_writes}):
            copy = mesh.copies.ranks.index(rank)
            self._files.append(_File(rank, chunk_runs.runs_to_write(engine, copy)))
        self._buffers: list[HostCopy] = []  # one for each file, in their order
        self._running: tuple[_Save, Thread] | None = None
        self._bytes_by_rank = [
            row[0] for row in mesh.messages.gather_floats([len(own.header) + 4 * own.numel])
        ]
        self.num_bytes = int(sum(self._bytes_by_rank))
        """Bytes of a checkpoint's tensors, over all ranks."""

    @property
    def broken(self) -> bool:
        """True if so many saves in a row have failed that training must stop."""
        return any(place.is_broken for place in self.places)

    def save(
        self, state: Mapping[str, object], place: Place | None = None, *, wait: bool = False
    ) -> float:
        """Save the training state and return the seconds that training waited. Collective.

        A save to a place that does not wait for others is written at once, from the live state,
        while the one before it is still being written elsewhere. A failure is reported, and
        training goes on; nothing is saved to a place that is broken.

        - `state`: contents of state.json, except for the keys that the saver adds.
        - `place`: one of `places`, by default the first one.
        - `wait`: return only when the checkpoint is saved, or the save has failed.
        """
        start = time.perf_counter()
        place = place or self.places[0]
        if place.waits_for_others or self._is_saving_to(place):
            self.finish()
        else:
            self.poll()
        if not place.is_broken:
            self._begin(_Save(place, {**state, **self._own_state()}), wait)
        return time.perf_counter() - start

    def poll(self) -> None:
        """Finish an asynchronous save if it has ended."""
        if self._running is not None and not self._running[1].is_alive():
            self.finish()

    def finish(self) -> None:
        """Wait for the save in progress, if there is one."""
        if self._running is not None:
            save, thread = self._running
            thread.join()
            self._running = None
            self._conclude(save)

    def require_saved(self) -> None:
        """Wait for the newest save; raises TrainingError on all ranks if that to disk failed."""
        self.finish()
        problem = self.places[0].problem
        if problem:
            raise TrainingError(f"the last checkpoint was not saved: {problem}")

    def _is_saving_to(self, place: Place) -> bool:
        return self._running is not None and self._running[0].place is place

    def _begin(self, save: _Save, wait: bool) -> None:
        """Write a checkpoint, or start to write it in the background."""
        save.problem, in_background = self._plan(save.place, wait)
        if in_background:
            self._start(save)
            return
        if not save.problem:
            with ExitStack() as stack:
                arrays = []
                for file in self._files_of(save.place):
                    of_file = chunk_runs.host_arrays(self._engine, file.runs)
                    arrays.append(stack.enter_context(closing(of_file)))
                self._write(save, arrays)
        self._conclude(save)

    def _plan(self, place: Place, wait: bool) -> tuple[str, bool]:
        """Return why the save is impossible, or "", and whether to write in the background."""
        new_files = self._files_of(place)[len(self._buffers) :]
        new_bytes = sum(copy_bytes(file.numel) for file in new_files)
        memory_lacks = 0
        place_lacks = 0
        with suppress(OSError):  # out of files, or the disk is away: the write reports it
            memory_lacks = free_space.missing_memory_bytes(new_bytes, self._mesh.local_size)
            place_lacks = place.missing_bytes(self._bytes_by_rank)
        is_busy = self._running is not None
        rows = self._mesh.messages.gather_floats([memory_lacks, place_lacks, is_busy])
        memory_lacks = max(int(row[0]) for row in rows)
        place_lacks = max(int(row[1]) for row in rows)
        if place_lacks:
            return place.describe_missing(place_lacks, self.num_bytes), False
        # The copy of a save in progress is in use.
        if wait or not self._asynchronous or any(row[2] for row in rows):
            return "", False
        if memory_lacks:
            self._say(
                f"host memory lacks {decimal(memory_lacks)} per rank to copy the training state; "
                "training waits while this checkpoint is written (checkpoint.asynchronous)"
            )
        return "", not memory_lacks

    def _start(self, save: _Save) -> None:
        """Write from a copy while training continues."""
        files = self._files_of(save.place)
        for file in files[len(self._buffers) :]:
            # Kept for later saves: new memory costs more than the copy itself.
            self._buffers.append(HostCopy(file.numel, pinned=self._mesh.device.type != "cpu"))
        arrays = []
        for file, buffer in zip(files, self._buffers, strict=False):
            buffer.fill(chunk_runs.live_tensors(self._engine, file.runs))
            arrays.append(buffer.arrays())
        args = save, arrays
        thread = Thread(target=self._write, args=args, name="checkpoint", daemon=True)
        self._running = save, thread
        thread.start()

    def _files_of(self, place: Place) -> Sequence[_File]:
        """Return the files that this rank writes to a place, its own first."""
        return self._files if place.also_writes else self._files[:1]

    def _write(self, save: _Save, arrays: Sequence[Iterable[np.ndarray]]) -> None:
        """Write to the place; a failure is left in `save`."""
        try:
            save.place.write(
                save.state, lambda folder: self._write_own(folder, arrays, save.place.hashed)
            )
        except TrainingError as error:
            save.problem = str(error)
        except Exception as error:  # a rank was lost; raised again where training can report it
            save.lost = error

    def _write_own(
        self, folder: Path, arrays: Sequence[Iterable[np.ndarray]], hashed: bool
    ) -> Entries:
        """Write this rank's files, whose tensors `arrays` has; return {name: [size, digest]}."""
        entries = {}
        for file, of_file in zip(self._files, arrays, strict=False):
            if not file.header:
                continue
            name = f"shard-{file.rank:05d}-of-{self._mesh.world.size:05d}.safetensors"
            with disk.reporting(folder / name, f"rank {self._mesh.rank}: "):
                entry = disk.write_file(folder / name, chain([file.header], of_file), hashed)
            entries[name] = [entry.size, entry.digest]
        return entries

    def _conclude(self, save: _Save) -> None:
        """Report the end of a save."""
        if save.lost is not None:
            raise save.lost
        message = save.place.conclude(save.problem)
        if message:
            self._say(message)

    def _own_state(self) -> dict[str, object]:
        states = self._engine.states
        average = {optimizers.EMA: True} if optimizers.EMA in states.kinds else {}
        return {
            "format": FORMAT,
            "parameters": self._parameters,
            **average,
            **states.counters(),
        }
