"""Profiles of chosen steps on every rank, put on one timeline.

In `<run>/profile/`: `rank-N.json`, torch's own trace of a rank; `timeline.json`, actions and
torch's events with a lane for each rank, for Perfetto (ui.perfetto.dev); `timeline.svg` and
`spans.json` (for launch/draw.py), the actions of the last recorded step.

All times are unix times of rank 0's node. The clock of another node is set by barriers, which end
at about the same moment everywhere: the median difference of a few.
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
from parallel3d.train.trackers import wanted

_BARRIERS = 5
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class _Step:
    """A step as one rank saw it, in unix seconds; spans count from `actions`."""

    number: int
    start: float
    end: float
    actions: float
    spans: list[tuple[str, float, float]]


@dataclass(frozen=True)
class _Lane:
    """The record of one rank, and by how many seconds its clock is ahead of rank 0's."""

    rank: int
    pp_dp_tp: tuple[int, int, int]
    steps: list[_Step]
    ahead: float

    def spans(self, step: int) -> tuple[Span, ...]:
        """The actions of the `step`-th recorded step, on rank 0's clock."""
        seen = self.steps[step]
        zero = seen.actions - self.ahead
        return tuple(Span(Action.parse(a), zero + s, zero + e) for a, s, e in seen.spans)


class Profiler:
    """A profiler of the steps that `chosen` names, which writes to `run / "profile"`.

    With `tensorboard`, each rank's trace is also put where TensorBoard's PyTorch profiler looks.
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
        """Wrap a step, counted from 0; after the last chosen one everything is written."""
        if number not in self._chosen:
            yield
            return
        if self._torch is None:
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it reports each start and stop
            self._torch = profile(activities=supported_activities(), acc_events=True)
            self._torch.start()
        if self._mesh.device.type != "cpu":
            # The device has nothing left to do, so the first action starts when it is queued.
            torch.accelerator.synchronize()
        start = time.time()
        with timing(self._executor):
            yield
        spans = [(str(action), begin, end) for action, begin, end in self._executor.spans]
        self._steps.append(_Step(number, start, time.time(), self._executor.started, spans))
        if number == self._chosen[-1]:
            self.finish()

    def finish(self) -> None:
        """Write what was recorded, if anything is left; collective over the world."""
        if self._torch is None or not self._steps:
            return
        self._torch.stop()
        self._directory.mkdir(parents=True, exist_ok=True)
        trace = self._trace_of(self._mesh.rank)
        self._torch.export_chrome_trace(str(trace))
        if self._tensorboard:
            self._tensorboard.mkdir(parents=True, exist_ok=True)
            # The plugin tells workers apart by what stands before the time.
            name = f"rank-{self._mesh.rank}.{time.time_ns()}.pt.trace.json"
            shutil.copy(trace, self._tensorboard / name)
        lanes = self._gather()
        if self._mesh.rank == 0:
            self._write(lanes)
        self._steps = []

    def _trace_of(self, rank: int) -> Path:
        return self._directory / f"rank-{rank}.json"

    def _gather(self) -> list[_Lane]:
        """Every rank's steps; the traces of all ranks are written when this returns."""
        ends = []
        for _ in range(_BARRIERS):
            self._mesh.barrier()
            ends.append(time.time())
        clock = _BOOT.read_text().strip() if _BOOT.exists() else socket.gethostname()
        coords = [self._mesh.coord(axis) for axis in ("pp", "dp", "tp")]
        mine = {"clock": clock, "ends": ends, "coords": coords}
        mine["steps"] = [asdict(step) for step in self._steps]
        everyone = gather_json(self._mesh, mine)
        first = {said["clock"]: said["ends"] for said in reversed(everyone)}
        zero = everyone[0]["ends"]
        lanes = []
        for rank, said in enumerate(everyone):
            ahead = median(a - b for a, b in zip(first[said["clock"]], zero, strict=True))
            steps = [_Step(**step) for step in said["steps"]]
            lanes.append(_Lane(rank, tuple(said["coords"]), steps, ahead))
        return lanes

    def _write(self, lanes: list[_Lane]) -> None:
        schedule = self._executor.schedule
        origin = min(step.start - lane.ahead for lane in lanes for step in lane.steps)
        events: list[dict[str, Any]] = []
        for lane in lanes:
            events += _own_events(lane, origin)
            trace = self._trace_of(lane.rank)
            if trace.exists():  # another node's may lie on its own disk
                events += _torch_events(json.loads(trace.read_text()), lane, origin)
        timeline = {"traceEvents": events, "displayTimeUnit": "ms"}
        (self._directory / "timeline.json").write_text(json.dumps(timeline))
        title = f"{schedule.name}: step {lanes[0].steps[-1].number}, measured"
        picture = draw.figure([(title, tuple(lane.spans(-1) for lane in lanes))])
        (self._directory / "timeline.svg").write_text(picture)
        pipeline = [lane for lane in lanes if lane.pp_dp_tp[1:] == (0, 0)]
        spans = tuple(lane.spans(-1) for lane in pipeline)
        measured = draw.spans_to_json(schedule, spans)
        (self._directory / "spans.json").write_text(json.dumps(measured) + "\n")


def _own_events(lane: _Lane, origin: float) -> Iterator[dict[str, Any]]:
    """The rank's name, its steps, and their actions, in microseconds since `origin`."""
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
    """torch's events of a rank under the rank's own lane, in microseconds since `origin`."""
    shift = (trace.get("baseTimeNanoseconds", 0) - round((origin + lane.ahead) * 1e9)) / 1e3
    named = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in trace["traceEvents"]
        if event.get("ph") == "M" and event["name"] == "thread_name"
    }
    threads: dict[tuple[int, int], int] = {}
    for event in trace["traceEvents"]:
        place = event.get("pid"), event.get("tid")
        # Its marks of the recording itself are on lanes with names for numbers.
        if event["ph"] == "M" or not all(isinstance(number, int) for number in place):
            continue
        if place not in threads:
            threads[place] = len(threads) + 1
            name = named.get(place) or f"device {place[0]}, stream {place[1]}"
            yield _name("thread", lane.rank, threads[place], name)
        moved = {"pid": lane.rank, "tid": threads[place], "ts": round(event["ts"] + shift, 3)}
        if "id" in event:  # arrows between events, numbered by each rank from 1
            moved["id"] = f"{lane.rank}.{event['id']}"
        yield event | moved


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    place = {"ph": "M", "pid": pid, "tid": tid}
    return {"name": f"{kind}_name", **place, "args": {"name": name}}


def make_profiler(
    config: RunConfig, mesh: Mesh, executor: Executor, folder: Path
) -> Profiler | None:
    """Return the profiler of the steps of train.profile, or None."""
    if config.train.profile is None:
        return None
    tensorboard = "tensorboard" in wanted(config)
    return Profiler(config.train.profile, mesh, executor, run=folder, tensorboard=tensorboard)
