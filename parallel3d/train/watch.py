"""Printed statistics of steps, selected by DeepSpeed's settings.

`wall_clock_breakdown` prints the parts of a step's time, `flops_profiler` the FLOPs of the layers,
`comms_logger` the calls and bytes of a step by group. DeepSpeed's own profilers do not see the
pipeline's actions and microbatches.
"""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path

from parallel3d.config import RunConfig
from parallel3d.mesh.agree import gather_json
from parallel3d.mesh.mesh import Mesh
from parallel3d.mesh.traffic import Traffic
from parallel3d.pipeline.clock import timing
from parallel3d.schedule.action import Op
from parallel3d.train.assembly import Assembly

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
        train, tokens = parts.flops_per_token, config.tokens_per_step
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


def make_watch(
    config: RunConfig, mesh: Mesh, parts: Assembly, *, say: Callable[[str], None] | None
) -> StepWatch | None:
    """Return the observer of a run's steps, if the config selects one; `say` prints its lines."""
    requested = (
        config.wall_clock_breakdown,
        config.flops_profiler.enabled,
        config.comms_logger.enabled,
    )
    return (
        StepWatch(config, mesh, parts, say=say or (lambda text: None)) if any(requested) else None
    )
