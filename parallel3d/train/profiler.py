"""Observers of steps: profiles of chosen ones on chosen ranks, and printed statistics.

The statistics are selected by DeepSpeed's settings: `wall_clock_breakdown` prints the parts of a
step's time, `flops_profiler` the FLOPs of the layers, `comms_logger` the calls and bytes of a step
by group. DeepSpeed's own profilers do not see the pipeline's actions and microbatches.

Profiles are files in `<run>/profile/`:

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
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator
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
from parallel3d.mesh.traffic import Traffic
from parallel3d.pipeline.clock import timing
from parallel3d.pipeline.executor import Executor
from parallel3d.schedule import draw
from parallel3d.schedule.action import Op
from parallel3d.train.assembly import Assembly
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
        is_recorded = self._is_profiled and number in self._chosen
        with self._record(number) if is_recorded else nullcontext():
            yield
        if number == self._chosen[-1]:
            self.finish()

    @contextmanager
    def _record(self, number: int) -> Iterator[None]:
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
        record = {
            "clock": clock,
            "ends": ends,
            "coords": self._mesh.coords,
            "steps": [asdict(step) for step in self._steps],
        }
        own = record if self._steps or self._mesh.rank == 0 else None
        rows = {rank: row for rank, row in enumerate(gather_json(self._mesh, own)) if row}
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


PARTS = ("forward", "backward", "waiting", "reduction", "optimizer", "rest")
_PART_OF = {
    Op.F: "forward", Op.B: "backward", Op.I: "backward", Op.W: "backward", Op.REDUCE: "reduction"
}  # fmt: skip


class StepWatch:
    """Observes steps on every rank and prints the statistics that the config selects on rank 0.

    Times are means over a pipeline coordinate's ranks and over the steps since the last line.
    "reduction" is the reduction of gradients; "waiting" is receives, GATHERs and the bubble. If the
    program has no GATHER, ZeRO-3's gathers count as forward and backward.
    """

    def __init__(
        self, config: RunConfig, mesh: Mesh, parts: Assembly, *, say: Callable[[str], None]
    ) -> None:
        self._config, self._mesh, self._parts, self._say = config, mesh, parts, say
        self._sums, self._steps = dict.fromkeys(PARTS, 0.0), 0
        self._first: int | None = None
        self._counted = self._profiled = False

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Observe the step in the block, counted from 0; collective if it prints."""
        if self._first is None:
            self._first = number
        logger, last = self._config.comms_logger, number + 1 == self._config.num_steps
        # Skip the first step, in which DeepSpeed also records the order of the modules.
        count = logger.enabled and not self._counted and (number > self._first or last)
        chosen = () if logger.prof_all else logger.prof_ops
        traffic = Traffic(self._mesh, chosen) if count else None
        began = time.perf_counter()
        times = self._config.wall_clock_breakdown
        timed = (self._parts.executor, self._parts.engine) if times else ()
        with traffic or nullcontext(), timing(*timed):
            yield
        step_seconds = time.perf_counter() - began
        if times:
            self._add(step_seconds)
            if last or (number + 1) % self._config.steps_per_print == 0:
                self._show_times(number + 1)
        if traffic:
            self._counted = True
            self._show_traffic(number + 1, traffic)
        flops = self._config.flops_profiler
        if flops.enabled and not self._profiled and number + 1 >= flops.profile_step:
            self._profiled = True
            self._show_flops(number + 1, step_seconds)

    def _add(self, step_seconds: float) -> None:
        executor, seconds = self._parts.executor, dict.fromkeys(PARTS, 0.0)
        for span in executor.spans:
            if name := _PART_OF.get(span.action.op):
                seconds[name] += span.end - span.start
        program = max((span.end for span in executor.spans), default=0.0)
        seconds["waiting"] = max(0.0, program - sum(seconds.values()))
        seconds["reduction"] += max(0.0, executor.ended - executor.started - program)
        seconds["optimizer"] = self._parts.engine.step_seconds
        seconds["rest"] = max(0.0, step_seconds - sum(seconds.values()))
        for name, value in seconds.items():
            self._sums[name] += value
        self._steps += 1

    def _show_times(self, step: int) -> None:
        own = [self._mesh.pipeline.coord, *(s / self._steps for s in self._sums.values())]
        rows = self._mesh.gather_floats(own)
        for pp in range(self._mesh.pipeline.size):
            stage_rows = [row[1:] for row in rows if row[0] == pp]
            means = [
                1e3 * sum(column) / len(stage_rows) for column in zip(*stage_rows, strict=True)
            ]
            words = " + ".join(f"{n} {ms:.1f}" for n, ms in zip(PARTS, means, strict=True))
            place = f"pp {pp}, " if self._mesh.pipeline.size > 1 else ""
            over = f"mean of {self._steps}"
            self._say(f"time    step {step}, {place}{over}: {sum(means):.1f} ms = {words}")
        self._sums, self._steps = dict.fromkeys(PARTS, 0.0), 0

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
        config, parts = self._config, self._parts
        kinds: dict[str, list[float]] = {}
        for layer in parts.layers:
            kind, flops = re.sub(r"\.\d+$", "", layer.name), layer.cost(parts.shape).forward_flops
            totals = kinds.setdefault(kind, [0.0, 0.0, 0.0])
            for i, value in enumerate((1.0, layer.num_params, flops / parts.shape.tokens)):
                totals[i] += value
        forward = sum(row[2] for row in kinds.values())
        train, count = parts.flops_per_token, parts.executor.schedule.num_microbatches
        tokens = parts.shape.tokens * count * self._mesh.samples.size
        rate = train * tokens / seconds / self._mesh.world.size / 1e12
        lines = [
            "flops   counted as for MFU: matrix products and full attention, without recomputation",
            "        (parallel3d's own count, not DeepSpeed's profiler)",
            f"        step {step}: {train * tokens / 1e12:,.4g} TFLOP in {seconds:.3g} s, "
            f"{rate:,.4g} TFLOP/s per device; a token: {forward / 1e6:,.4g} MFLOP forward, "
            f"{train / 1e6:,.4g} with backward",
        ]
        if config.flops_profiler.detailed:
            lines.append("        layer       number    parameters  MFLOP/token forward   share")
            for kind, (number, params, of_kind) in kinds.items():
                lines.append(
                    f"        {kind:<12}{number:>6.0f}{params:>14,.0f}{of_kind / 1e6:>21,.4g}"
                    f"{100 * of_kind / forward:>6.1f} %"
                )
        path = config.flops_profiler.output_file
        if path is None or self._mesh.rank != 0:
            for line in lines:
                self._say(line)
            return
        try:
            Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")
            self._say(f"flops   written to {path}")
        except OSError as error:
            self._say(
                f"WARNING: flops_profiler.output_file = {path}: {error.strerror}; not written"
            )
