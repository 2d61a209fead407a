"""Observers of steps: profiles of chosen ones on chosen ranks, and the parts of their times.

The statistics are selected by DeepSpeed's settings: `wall_clock_breakdown` prints the parts of a
step's time, `flops_profiler` the FLOPs of a step, `comms_logger` the calls and bytes of a step by
group. DeepSpeed's own profilers do not see the pipeline's actions and microbatches.

Profiles are files in `<run>/profile/`:

- `rank-N.json`: torch's own trace of a profiled rank, in which the actions are named ranges;
- `timeline.json`: the actions of all profiled ranks for Perfetto (ui.perfetto.dev);
- `timeline.svg`, `spans.json` (for launch/draw.py): the last recorded step of one rank of each
  pipeline coordinate, if each has a profiled rank.

Torch's traces are large (50-500 MB on a GPU) and therefore never read within a run.

All times are unix times of rank 0's node. The clock of another node is corrected by the median
difference over a few barriers, which end at about the same moment on all ranks.
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from statistics import mean, median, stdev
from typing import NamedTuple

import torch
from torch.profiler import profile, supported_activities

from parallel3d.base.journal import STEP_PARTS, record
from parallel3d.base.mesh_sizes import AXES, WITHOUT_CP
from parallel3d.base.say import Say
from parallel3d.config import CompleteConfig
from parallel3d.config.parallel3d_block import ProfileConfig
from parallel3d.mesh.agree import gather_json
from parallel3d.mesh.mesh import Mesh
from parallel3d.mesh.nodes import machine_of_this_process
from parallel3d.mesh.traffic import Traffic
from parallel3d.pipeline.clock import timing
from parallel3d.pipeline.executor import Executor
from parallel3d.schedule import draw
from parallel3d.schedule.action import Op
from parallel3d.schedule.schedule import Action, Span
from parallel3d.train.assembly import Assembly
from parallel3d.train.compute_kinds import ComputeKinds
from parallel3d.train.metrics import Result
from parallel3d.train.observer import Observer, Step


class RecordedStep(NamedTuple):
    """A step as recorded by one rank, in unix seconds."""

    number: int
    start: float
    end: float
    spans: list[tuple[str, float, float]]


class Lane(NamedTuple):
    """The recorded steps of one rank, and how many seconds its clock is ahead of rank 0's."""

    rank: int
    coords: tuple[int, ...]
    """Along AXES, or without cp."""
    steps: list[RecordedStep]
    ahead: float

    def spans(self) -> tuple[Span, ...]:
        """Return the actions of the last recorded step, on rank 0's clock."""
        spans = []
        for name, start, end in self.steps[-1].spans:
            spans.append(Span(Action.parse(name), start - self.ahead, end - self.ahead))
        return tuple(spans)

    def events(self, origin: float) -> Iterator[dict[str, object]]:
        """Yield its name, steps and actions as trace events, in microseconds since `origin`."""
        axes = WITHOUT_CP if len(self.coords) == len(WITHOUT_CP) else AXES
        coords = ", ".join(f"{axis} {at}" for axis, at in zip(axes, self.coords, strict=True))
        own = {"name": f"rank {self.rank} ({coords})"}
        yield {"name": "process_name", "ph": "M", "pid": self.rank, "tid": 0, "args": own}
        for step in self.steps:
            whole = (f"step {step.number}", step.start, step.end)
            for name, start, end in (whole, *step.spans):
                yield {
                    "name": name,
                    "ph": "X",
                    "pid": self.rank,
                    "tid": 0,
                    "ts": (start - self.ahead - origin) * 1e6,
                    "dur": (end - start) * 1e6,
                }


class Profiler(Observer):
    """Profiles the steps and ranks that `chosen` selects, and writes to `run / "profile"`."""

    collectives = "barriers and an all_gather of spans, after the last profiled step"

    def __init__(self, chosen: ProfileConfig, mesh: Mesh, executor: Executor, *, run: Path) -> None:
        self._chosen = range(chosen.start, chosen.start + chosen.steps)
        self._mesh = mesh
        self._executor = executor
        self._directory = run / "profile"
        if isinstance(chosen.ranks, str):
            self._is_profiled = chosen.ranks == "all" or mesh.replicas.coord == 0
        else:
            self._is_profiled = mesh.rank in chosen.ranks
        self._is_pending = False  # steps were recorded, on some rank, and not written
        self._steps: list[RecordedStep] = []
        self._torch: profile | None = None

    def at_end(self, result: Result) -> None:
        """Write what was recorded if the run was stopped within the profiled steps."""
        self.finish()

    @contextmanager
    def around(self, step: Step) -> Iterator[None]:
        """Record the step in the block, if chosen; write after the last one."""
        number = step.number
        self._is_pending |= number in self._chosen
        is_recorded = self._is_profiled and number in self._chosen
        with self._record(number) if is_recorded else nullcontext():
            yield
        if number == self._chosen[-1]:
            self.finish()

    @contextmanager
    def _record(self, number: int) -> Iterator[None]:
        if self._torch is None:
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # do not log each start and stop
            self._torch = profile(activities=supported_activities())
            self._torch.start()
        if self._mesh.device.type != "cpu":
            # With an idle device, the first action starts as soon as it is queued.
            torch.accelerator.synchronize()
        start = time.time()
        with timing(self._executor):
            yield
        zero = self._executor.started
        spans = [(str(action), zero + a, zero + b) for action, a, b in self._executor.spans]
        self._steps.append(RecordedStep(number, start, time.time(), spans))

    def finish(self) -> None:
        """Write the recorded steps that are not yet written; collective over the world."""
        if not self._is_pending:
            return
        self._is_pending = False
        self._directory.mkdir(parents=True, exist_ok=True)
        if self._torch is not None:
            self._torch.stop()
            self._torch.export_chrome_trace(str(self._directory / f"rank-{self._mesh.rank}.json"))
        lanes = self._gather()
        if self._mesh.rank == 0 and lanes:
            self._write(lanes)
        self._steps = []

    def _gather(self) -> list[Lane]:
        """Return the steps of the profiled ranks, which have all written their traces."""
        ends = []
        for _ in range(5):
            self._mesh.barrier()
            ends.append(time.time())
        rows = gather_json(
            self._mesh, [machine_of_this_process(), ends, self._mesh.coords, self._steps]
        )
        first = {clock: ends for clock, ends, *_ in reversed(rows)}
        lanes = []
        for rank, (clock, _, coords, steps) in enumerate(rows):
            ahead = median(a - b for a, b in zip(first[clock], rows[0][1], strict=True))
            if steps:
                lanes.append(Lane(rank, coords, [RecordedStep(*step) for step in steps], ahead))
        return lanes

    def _write(self, lanes: list[Lane]) -> None:
        origin = min(lane.steps[0].start - lane.ahead for lane in lanes)
        events = [event for lane in lanes for event in lane.events(origin)]
        (self._directory / "timeline.json").write_text(json.dumps({"traceEvents": events}))
        schedule = self._executor.schedule
        first = {lane.coords[0]: lane for lane in reversed(lanes)}
        if len(first) < schedule.pp_size:
            return
        spans = tuple(lane.spans() for _, lane in sorted(first.items()))
        title = f"{schedule.name}: step {lanes[0].steps[-1].number}, measured"
        (self._directory / "timeline.svg").write_text(draw.figure([(title, spans)]))
        (self._directory / "spans.json").write_text(
            json.dumps(draw.spans_to_json(schedule, spans)) + "\n"
        )


PARTS = ("data", "forward", "backward", "waiting", "reduction", "optimizer", "rest")
_PART_OF = {
    Op.F: "forward",
    Op.B: "backward",
    Op.I: "backward",
    Op.W: "backward",
    Op.REDUCE: "reduction",
}


def seconds_without_core() -> float:
    """Return for how long this thread was ready to run and had no core; 0 if that is unknown."""
    try:
        fields = Path("/proc/thread-self/schedstat").read_text().split()
    except OSError:
        return 0.0
    return int(fields[1]) / 1e9


class StepWatch(Observer):
    """Observes steps on every rank and prints the parts of their times on rank 0.

    It does so if DeepSpeed's `wall_clock_breakdown` is set. Times are means over a pipeline
    coordinate's ranks and over the steps since the last line. "data" is the time to get the batch,
    "reduction" the reduction of gradients; "waiting" is receives, GATHERs and the bubble. If the
    program has no GATHER, ZeRO-3's gathers count as forward and backward.

    An event "step_parts" of the journal has for each rank the means and their "spread" (a step's
    standard deviation), the number of threads, the seconds that the main thread was "on core" and
    "without core" (ready to run, while others had the cores), and the run's second step, which is
    in no mean, by kind of operation.
    """

    collectives = "all_gather of times or traffic, after the steps that are printed"

    def __init__(self, config: CompleteConfig, mesh: Mesh, parts: Assembly, *, say: Say) -> None:
        self._config = config
        self._mesh = mesh
        self._parts = parts
        self._say = say
        self._timed: list[dict[str, float]] = []
        self._kinds: ComputeKinds | None = None
        self._first: int | None = None
        self._counted = self._profiled = False

    @contextmanager
    def around(self, step: Step) -> Iterator[None]:
        """Observe the step in the block; collective if it prints."""
        number = step.number
        if self._first is None:
            self._first = number
        logger = self._config.comms_logger
        last = number + 1 == self._config.num_steps
        # Skip the first step, in which DeepSpeed also records the order of the modules.
        count = logger.enabled and not self._counted and (number > self._first or last)
        chosen = () if logger.prof_all else logger.prof_ops
        traffic = Traffic(self._mesh, chosen) if count else None
        began = time.perf_counter()
        began_unix = time.time()
        on_core = time.thread_time()
        waited = seconds_without_core()
        times = self._config.wall_clock_breakdown
        timed = (self._parts.executor, self._parts.engine) if times else ()
        profiling = self._kinds_of(number)
        by_kind = profiling.measuring() if profiling else nullcontext()
        with traffic or nullcontext(), timing(*timed), by_kind:
            yield
        step_seconds = time.perf_counter() - began
        if times:
            before_program = self._parts.executor.started - began_unix
            seconds = self._parts_of(step_seconds, before_program)
            seconds["on core"] = time.thread_time() - on_core
            seconds["without core"] = seconds_without_core() - waited
            if profiling:
                profiling.of_passes(seconds["forward"] + seconds["backward"])
            if not profiling or not self._timed:  # a profile makes the step longer
                self._timed.append(seconds)
            if last or (number + 1) % self._config.steps_per_print == 0:
                self._show_times(number + 1)
        if traffic:
            self._counted = True
            self._show_traffic(number + 1, traffic)
        flops = self._config.flops_profiler
        if flops.enabled and not self._profiled and number + 1 >= flops.profile_step:
            self._profiled = True
            self._show_flops(number + 1, step_seconds)

    def _kinds_of(self, number: int) -> ComputeKinds | None:
        """Return what measures the run's second step by kind of operation; None for others."""
        config = self._config
        is_second = number - 1 == self._first
        if config.wall_clock_breakdown and is_second and config.train.profile is None:
            self._kinds = ComputeKinds(self._mesh.device)
            return self._kinds
        return None

    def _parts_of(self, step_seconds: float, before_program: float) -> dict[str, float]:
        """Return a step's parts; its program began `before_program` seconds after the step."""
        executor = self._parts.executor
        seconds = dict.fromkeys(PARTS, 0.0)
        seconds["data"] = max(0.0, before_program)
        for span in executor.spans:
            name = _PART_OF.get(span.action.op)
            if name:
                seconds[name] += span.end - span.start
        program = max((span.end for span in executor.spans), default=0.0)
        seconds["waiting"] = max(0.0, program + seconds["data"] - sum(seconds.values()))
        seconds["reduction"] += max(0.0, executor.ended - executor.started - program)
        seconds["optimizer"] = self._parts.engine.step_seconds
        seconds["rest"] = max(0.0, step_seconds - sum(seconds.values()))
        return seconds

    def _show_times(self, step: int) -> None:
        """Print the means of the parts of each stage, and record those of each rank."""
        timed = self._timed
        own: dict[str, float] = {
            "pp_coord": self._mesh.pipeline.coord,
            "threads": torch.get_num_threads(),
            "steps": len(timed),
        }
        for name in timed[0]:
            values = [seconds[name] for seconds in timed]
            own[name] = mean(values)
            own[f"{name} spread"] = stdev(values) if len(values) > 1 else 0.0
        if self._kinds:
            own |= self._kinds.seconds
        rows = self._mesh.messages.gather_floats([*own.values()])
        ranks = [dict(zip(own, row, strict=True)) for row in rows]
        if self._mesh.rank == 0:
            record(STEP_PARTS, step=step, steps=len(timed), ranks=ranks)
        for pp in range(self._mesh.pipeline.size):
            stage = [rank for rank in ranks if rank["pp_coord"] == pp]
            means = {name: 1e3 * mean(rank[name] for rank in stage) for name in PARTS}
            words = " + ".join(f"{name} {ms:.1f}" for name, ms in means.items())
            place = f"pp {pp}, " if self._mesh.pipeline.size > 1 else ""
            total = sum(means.values())
            self._say(f"time    step {step}, {place}mean of {len(timed)}: {total:.1f} ms = {words}")
        self._timed = []

    def _show_traffic(self, step: int, traffic: Traffic) -> None:
        """Print the traffic of the first rank of each stage; its other ranks do the same."""
        mesh = self._mesh
        is_first = mesh.replicas.coord == mesh.tensor.coord == 0
        calls = [asdict(c) for c in traffic.calls]
        everyone = gather_json(mesh, [mesh.pipeline.coord, calls] if is_first else None)
        self._say(f"comms   step {step}, one rank of each stage; MiB of full messages")
        self._say("        pp  group     ranks  operation       calls          MiB")
        for pp, calls in filter(None, everyone):
            for c in calls:
                self._say(
                    f"        {pp:<3} {c['group']:<9} {c['ranks']:>5}  "
                    f"{c['operation']:<14} {c['calls']:>6,} {c['bytes'] / 2**20:>12,.4g}"
                )
            if not calls:
                self._say(f"        {pp:<3} none: every group has one rank")

    def _show_flops(self, step: int, seconds: float) -> None:
        parts = self._parts
        count = parts.executor.schedule.num_microbatches
        flops = parts.flops_per_token * parts.shape.tokens * count * self._mesh.samples.size
        rate = flops / seconds / self._mesh.world.size / 1e12
        self._say(
            f"flops   step {step}: {flops / 1e12:,.4g} TFLOP in {seconds:.3g} s, {rate:,.4g} "
            f"TFLOP/s per device; a token: {parts.flops_per_token / 1e6:,.4g} MFLOP (parallel3d's "
            "own count, as for MFU: matrix products and full attention, without recomputation)"
        )
