"""Profiles of chosen steps on every rank, merged into one timeline.

Files in `<run>/profile/`:

- `rank-N.json`: torch's own trace of a rank;
- `timeline.json`: actions and torch's events of all ranks for Perfetto (ui.perfetto.dev);
- `timeline.svg`, `spans.json` (for launch/draw.py): the actions of the last recorded step.

All times are unix times of rank 0's node. The clock of another node is corrected by the median
difference over a few barriers, which end at about the same moment on all ranks.
"""

import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.profiler import profile, supported_activities

from parallel3d.config import RunConfig
from parallel3d.config.parallel3d_block import ProfileConfig
from parallel3d.mesh.agree import gather_json
from parallel3d.mesh.mesh import Mesh
from parallel3d.pipeline.clock import timing
from parallel3d.pipeline.executor import Executor
from parallel3d.schedule import draw
from parallel3d.schedule.schedule import Action, Span
from parallel3d.train.trackers import requested_trackers

_BARRIERS = 5
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class _Step:
    """A step as recorded by one rank, in unix seconds; spans are relative to `actions`."""

    number: int
    start: float
    end: float
    actions: float
    spans: list[tuple[str, float, float]]


@dataclass(frozen=True)
class _Lane:
    """The recorded steps of one rank, and how many seconds its clock is ahead of rank 0's."""

    rank: int
    pp_dp_tp: tuple[int, int, int]
    steps: list[_Step]
    ahead: float

    def spans(self, step: int) -> tuple[Span, ...]:
        """Return the actions of the `step`-th recorded step, on rank 0's clock."""
        seen = self.steps[step]
        zero = seen.actions - self.ahead
        return tuple(Span(Action.parse(a), zero + s, zero + e) for a, s, e in seen.spans)


class Profiler:
    """Profiles the steps that `chosen` selects, and writes to `run / "profile"`.

    With `tensorboard`, each rank's trace is also copied to where TensorBoard's PyTorch profiler
    plugin reads it.
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
        self._steps: list[_Step] = []
        self._torch: profile | None = None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Record the step in the block, counted from 0, if chosen; write after the last one."""
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
        self._steps.append(_Step(number, start, time.time(), self._executor.started, spans))
        if number == self._chosen[-1]:
            self.finish()

    def finish(self) -> None:
        """Write the recorded steps that are not yet written; collective over the world."""
        if self._torch is None or not self._steps:
            return
        self._torch.stop()
        self._directory.mkdir(parents=True, exist_ok=True)
        trace = self._trace_of(self._mesh.rank)
        self._torch.export_chrome_trace(str(trace))
        if self._tensorboard:
            self._tensorboard.mkdir(parents=True, exist_ok=True)
            # The plugin takes the part before the time as the worker's name.
            name = f"rank-{self._mesh.rank}.{time.time_ns()}.pt.trace.json"
            shutil.copy(trace, self._tensorboard / name)
        lanes = self._gather()
        if self._mesh.rank == 0:
            self._write(lanes)
        self._steps = []

    def _trace_of(self, rank: int) -> Path:
        return self._directory / f"rank-{rank}.json"

    def _gather(self) -> list[_Lane]:
        """Return the steps of every rank; all ranks have written their traces on return."""
        ends = []
        for _ in range(_BARRIERS):
            self._mesh.barrier()
            ends.append(time.time())
        clock = _BOOT.read_text().strip() if _BOOT.exists() else socket.gethostname()
        coords = [self._mesh.coord(axis) for axis in ("pp", "dp", "tp")]
        record = {"clock": clock, "ends": ends, "coords": coords}
        record["steps"] = [asdict(step) for step in self._steps]
        rows = gather_json(self._mesh, record)
        first = {row["clock"]: row["ends"] for row in reversed(rows)}
        zero = rows[0]["ends"]
        lanes = []
        for rank, row in enumerate(rows):
            ahead = median(a - b for a, b in zip(first[row["clock"]], zero, strict=True))
            steps = [_Step(**step) for step in row["steps"]]
            lanes.append(_Lane(rank, tuple(row["coords"]), steps, ahead))
        return lanes

    def _write(self, lanes: list[_Lane]) -> None:
        schedule = self._executor.schedule
        origin = min(step.start - lane.ahead for lane in lanes for step in lane.steps)
        events: list[dict[str, Any]] = []
        for lane in lanes:
            events += _own_events(lane, origin)
            trace = self._trace_of(lane.rank)
            if trace.exists():  # on another node it may be on a local disk
                events += _torch_events(json.loads(trace.read_text()), lane, origin)
        timeline = {"traceEvents": events, "displayTimeUnit": "ms"}
        (self._directory / "timeline.json").write_text(json.dumps(timeline))
        title = f"{schedule.name}: step {lanes[0].steps[-1].number}, measured"
        picture = draw.figure([(title, tuple(lane.spans(-1) for lane in lanes))])
        (self._directory / "timeline.svg").write_text(picture)
        spans = tuple(lane.spans(-1) for lane in lanes if lane.pp_dp_tp[1:] == (0, 0))
        measured = draw.spans_to_json(schedule, spans)
        (self._directory / "spans.json").write_text(json.dumps(measured) + "\n")


def _own_events(lane: _Lane, origin: float) -> Iterator[dict[str, Any]]:
    """Yield a rank's name, steps and actions as trace events, in microseconds since `origin`."""
    pp, dp, tp = lane.pp_dp_tp
    name = f"rank {lane.rank} (pp {pp}, dp {dp}, tp {tp})"
    yield _name("process", lane.rank, 0, name)
    yield _name("thread", lane.rank, 0, "pipeline")
    zero = origin + lane.ahead

    def event(name: str, category: str, start: float, end: float) -> dict[str, Any]:
        times = {"ts": round((start - zero) * 1e6, 3), "dur": round((end - start) * 1e6, 3)}
        return {"name": name, "cat": category, "ph": "X", "pid": lane.rank, "tid": 0} | times

    for step in lane.steps:
        yield event(f"step {step.number}", "step", step.start, step.end)
        for text, start, end in step.spans:
            op = Action.parse(text).op.value
            yield event(text, op, step.actions + start, step.actions + end)


def _torch_events(trace: dict[str, Any], lane: _Lane, origin: float) -> Iterator[dict[str, Any]]:
    """Yield torch's events of a rank in the rank's lane, in microseconds since `origin`."""
    shift = (trace.get("baseTimeNanoseconds", 0) - round((origin + lane.ahead) * 1e9)) / 1e3
    named = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in trace["traceEvents"]
        if event.get("ph") == "M" and event["name"] == "thread_name"
    }
    threads: dict[tuple[int, int], int] = {}
    for event in trace["traceEvents"]:
        place = event.get("pid"), event.get("tid")
        # Events about the recording itself have names instead of numbers for pid and tid.
        if event["ph"] == "M" or not all(isinstance(number, int) for number in place):
            continue
        if place not in threads:
            threads[place] = len(threads) + 1
            name = named.get(place) or f"device {place[0]}, stream {place[1]}"
            yield _name("thread", lane.rank, threads[place], name)
        moved = {"pid": lane.rank, "tid": threads[place], "ts": round(event["ts"] + shift, 3)}
        if "id" in event:  # an arrow between events; each rank counts them from 1
            moved["id"] = f"{lane.rank}.{event['id']}"
        yield event | moved


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    place = {"ph": "M", "pid": pid, "tid": tid}
    return {"name": f"{kind}_name", **place, "args": {"name": name}}


def make_profiler(
    config: RunConfig, mesh: Mesh, executor: Executor, folder: Path
) -> Profiler | None:
    """Return the profiler that train.profile asks for, or None."""
    if config.train.profile is None:
        return None
    tensorboard = "tensorboard" in requested_trackers(config)
    return Profiler(config.train.profile, mesh, executor, run=folder, tensorboard=tensorboard)
