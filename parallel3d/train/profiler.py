"""Profiles of chosen steps on chosen ranks.

Files in `<run>/profile/`:

- `rank-N.json`: torch's own trace of a profiled rank;
- `timeline.json`: the actions of the profiled ranks for Perfetto (ui.perfetto.dev);
- `lanes.json`: the same, from which `parallel3d draw --merge` adds torch's events to timeline.json;
- `timeline.svg`, `spans.json` (for launch/draw.py): the last recorded step of one rank of each
  pipeline coordinate, if each has a profiled rank.

Torch's traces are large (50-500 MB on a GPU) and therefore never read within a run.

All times are unix times of rank 0's node. The clock of another node is corrected by the median
difference over a few barriers, which end at about the same moment on all ranks.
"""

import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from statistics import median

import torch
from torch.profiler import profile, supported_activities

from parallel3d.config import RunConfig
from parallel3d.config.parallel3d_block import ProfileConfig
from parallel3d.mesh.agree import gather_json
from parallel3d.mesh.mesh import Mesh
from parallel3d.pipeline.clock import timing
from parallel3d.pipeline.executor import Executor
from parallel3d.schedule import draw
from parallel3d.train.timeline import Lane, Step, trace_of, write_lanes
from parallel3d.train.trackers import requested_trackers

_BARRIERS = 5
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Profiler:
    """Profiles the steps and ranks that `chosen` selects, and writes to `run / "profile"`.

    Every rank has one: writing is collective. With `tensorboard`, each profiled rank's trace is
    also copied to where TensorBoard's PyTorch profiler plugin reads it.
    """

    def __init__(
        self,
        chosen: ProfileConfig,
        mesh: Mesh,
        executor: Executor,
        *,
        run: Path,
        tensorboard: bool = False,
    ) -> None:
        self._chosen = range(chosen.start, chosen.start + chosen.steps)
        self._mesh, self._executor = mesh, executor
        self._directory, self._tensorboard = run / "profile", None
        if tensorboard:
            self._tensorboard = run / "tensorboard" / "plugins" / "profile" / run.name
        if isinstance(chosen.ranks, str):
            self._is_profiled = chosen.ranks == "all" or mesh.replicas.coord == 0
        else:
            self._is_profiled = mesh.rank in chosen.ranks
        self._is_pending = False  # steps were recorded, on some rank, and not written
        self._steps: list[Step] = []
        self._torch: profile | None = None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Record the step in the block, counted from 0, if chosen; write after the last one."""
        self._is_pending |= number in self._chosen
        with self._record(number) if self._is_profiled else nullcontext():
            yield
        if number == self._chosen[-1]:
            self.finish()

    @contextmanager
    def _record(self, number: int) -> Iterator[None]:
        if number not in self._chosen:
            yield
            return
        if self._torch is None:
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # do not log each start and stop
            self._torch = profile(activities=supported_activities(), acc_events=True)
            self._torch.start()
        if self._mesh.device.type != "cpu":
            # With an idle device, the first action starts as soon as it is queued.
            torch.accelerator.synchronize()
        start = time.time()
        with timing(self._executor):
            yield
        spans = [(str(action), begin, end) for action, begin, end in self._executor.spans]
        self._steps.append(Step(number, start, time.time(), self._executor.started, spans))

    def finish(self) -> None:
        """Write the recorded steps that are not yet written; collective over the world."""
        if not self._is_pending:
            return
        self._is_pending = False
        self._directory.mkdir(parents=True, exist_ok=True)
        if self._torch is not None:
            self._export(self._torch)
        lanes = self._gather()
        if self._mesh.rank == 0 and lanes:
            self._write(lanes)
        self._steps = []

    def _export(self, recorded: profile) -> None:
        recorded.stop()
        trace = trace_of(self._directory, self._mesh.rank)
        recorded.export_chrome_trace(str(trace))
        if self._tensorboard:
            self._tensorboard.mkdir(parents=True, exist_ok=True)
            # The plugin takes the part before the time as the worker's name.
            name = f"rank-{self._mesh.rank}.{time.time_ns()}.pt.trace.json"
            shutil.copy(trace, self._tensorboard / name)

    def _gather(self) -> list[Lane]:
        """Return the steps of the profiled ranks, which have all written their traces."""
        ends = []
        for _ in range(_BARRIERS):
            self._mesh.barrier()
            ends.append(time.time())
        clock = _BOOT.read_text().strip() if _BOOT.exists() else socket.gethostname()
        record = {"clock": clock, "ends": ends, "coords": self._mesh.coords}
        record["steps"] = [asdict(step) for step in self._steps]
        sends = bool(self._steps) or self._mesh.rank == 0
        rows = dict(enumerate(gather_json(self._mesh, record if sends else None)))
        rows = {rank: row for rank, row in rows.items() if row}
        first = {row["clock"]: row["ends"] for row in reversed(rows.values())}
        zero = rows[0]["ends"]
        lanes = []
        for rank, row in rows.items():
            ahead = median(a - b for a, b in zip(first[row["clock"]], zero, strict=True))
            steps = [Step(**step) for step in row["steps"]]
            lanes += [Lane(rank, tuple(row["coords"]), steps, ahead)] if steps else []
        return lanes

    def _write(self, lanes: list[Lane]) -> None:
        write_lanes(self._directory, lanes)
        schedule = self._executor.schedule
        first = {lane.coords[0]: lane for lane in reversed(lanes)}
        if len(first) < schedule.pp_size:
            return
        spans = tuple(lane.spans(-1) for _, lane in sorted(first.items()))
        title = f"{schedule.name}: step {lanes[0].steps[-1].number}, measured"
        (self._directory / "timeline.svg").write_text(draw.figure([(title, spans)]))
        measured = json.dumps(draw.spans_to_json(schedule, spans))
        (self._directory / "spans.json").write_text(f"{measured}\n")


def make_profiler(
    config: RunConfig, mesh: Mesh, executor: Executor, folder: Path
) -> Profiler | None:
    """Return the profiler that train.profile asks for, or None."""
    if (profile := config.parallel3d.train.profile) is None:
        return None
    tensorboard = "tensorboard" in requested_trackers(config)
    return Profiler(profile, mesh, executor, run=folder, tensorboard=tensorboard)
