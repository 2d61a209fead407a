"""Compare a measured step with its plan part by part: `parallel3d plan --explain-run RUN`.

A run with `wall_clock_breakdown` records the parts of its step on each rank. The last rank to
arrive at a collective or a message waits least, so of parts that contain waits the least counts.

On shared cores the kernel tells for how long a rank was ready to run while other programs had its
core. That time is taken out of the computes, and out of the waits of the ranks that wait for it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import hypot, sqrt
from pathlib import Path
from statistics import median_low
from typing import Any

from rich.console import Console
from rich.table import Table

from parallel3d.base import terminal
from parallel3d.base.errors import ConfigError
from parallel3d.base.journal import COMPUTE_KINDS, EVENTS, STEP_PARTS
from parallel3d.base.reader import JsonObject
from parallel3d.base.step_lines import read_lines
from parallel3d.config.hardware import Hardware
from parallel3d.plan.layers.placement import (
    cost_of,
    layers_by_stage,
    model_of,
    recompute_of,
    stage_classes_of,
    stages_on,
)
from parallel3d.plan.memory.room import all_fit
from parallel3d.plan.report.plan_table import three
from parallel3d.plan.search import candidates
from parallel3d.plan.search.plans import Plan
from parallel3d.plan.search.remedy import words_of
from parallel3d.plan.setting import RankShare
from parallel3d.plan.time.operators import curves_for, machine_of, work_seconds
from parallel3d.plan.time.sharding import Sharding, transfers_of
from parallel3d.plan.time.step import costs_of, step_time

WAITS = ("waiting", "reduction", "optimizer", "rest")  # each may contain waits for other ranks
PARTS = ("data", "slow rank", "compute", *WAITS)
OTHERS = "other programs"
"""The part of a step in which a rank had no core. It is shown, and never named as the cause."""
PLANNER_ERROR = 0.25
"""The share of a planned step below which a part's excess is within the planner's error: calibrated
curves are up to 26 % off in the small runs that they were fitted to."""
LEAST_EXCESS = {"data": 0.05, "slow rank": 0.1}
"""The same for parts that no curve prices. The cores of one machine differ by some 5 %."""
LEAST_GAIN = 0.03
"""The share of a planned step that a setting must save: less is within the planner's error."""
_KIND_NAMES = {
    "matmul": "matrix products",
    "attention": "attention",
    "memory": "memory-bound operators",
    "host": "host time between operators",
}
assert tuple(_KIND_NAMES) == COMPUTE_KINDS


def measured_parts(run: Path) -> list[dict[str, Any]]:
    """Return the parts of a run's step in seconds, for each rank, with its "pp_coord".

    They are means over the steps of the newest line, which has no first step if there are several.
    Raises ConfigError for a run without such lines.
    """
    try:
        events = read_lines(run / EVENTS)
    except OSError as error:
        raise ConfigError(
            f"{run}: {error.strerror}; name the folder of a run, such as runs/first"
        ) from None
    recorded = [event for event in events if event["event"] == STEP_PARTS]
    if not recorded:
        raise ConfigError(
            f"{run}: has no parts of a step; run it with "
            "--wall_clock_breakdown true --steps_per_print 5 for ten steps"
        )
    ranks: list[dict[str, Any]] = recorded[-1]["ranks"]
    return ranks


def planned_parts(plan: Plan) -> list[dict[str, float]]:
    """Return the planned seconds of a step by the names of the measured parts, for each pp rank."""
    setting = plan.setting
    hardware = plan.request.hardware
    costs = costs_of(setting, hardware, curves_for(hardware))
    # Waits for a core that other ranks have are waits, not computes.
    count = setting.num_microbatches / hardware.crowd(setting.mesh.ranks)
    each = []
    copying = copying_seconds(plan)
    for coord, coord_class in enumerate(costs.layout.coord_class_of):
        stages = costs.layout.coords[coord_class]
        parts = {
            "data": 0.0,
            "compute": count
            * sum(sum(costs.forward[stage]) + sum(costs.backward[stage]) for stage in stages),
            # Gradients are copied to one buffer before they are reduced.
            "reduction": sum(costs.reduce[coord_class]) + copying[coord],
            "optimizer": sum(costs.after[coord_class]) - copying[coord],
            "rest": 0.0,
        }
        parts["waiting"] = max(0.0, plan.time.seconds - sum(parts.values()))
        each.append(parts)
    return each


def copying_seconds(plan: Plan) -> list[float]:
    """Return the planned seconds in which each pp rank copies its gradients to one buffer."""
    setting = plan.setting
    hardware = plan.request.hardware
    machine = machine_of(hardware, setting.workload.software, curves_for(hardware))
    layout = stage_classes_of(setting)
    _, once = transfers_of(layout, Sharding.of(setting), machine)
    return [once[coord_class].flatten_seconds for coord_class in layout.coord_class_of]


def planned_kinds(plan: Plan, coord: int) -> dict[str, float]:
    """Return the planned seconds of a coordinate's passes by the names of COMPUTE_KINDS.

    "host" is the rest: the host's time, and collectives inside the passes.
    """
    setting = plan.setting
    work = setting.workload
    hardware = plan.request.hardware
    curves = curves_for(hardware)
    own = RankShare.of(setting)
    model = model_of(work.layers)
    stages = layers_by_stage(model, setting.num_stages, work.seq)
    schedule = setting.order.schedule
    kinds = dict.fromkeys(COMPUTE_KINDS, 0.0)
    count = setting.num_microbatches / hardware.crowd(setting.mesh.ranks)
    for stage in stages_on(schedule, setting.mesh.pp, setting.order.stages_per_rank)[coord]:
        part = stages[stage]
        ways = recompute_of(part, setting.flow.recompute)
        for kind, way in zip(part.kinds, ways, strict=True):
            cost = cost_of(model, kind, own.shape, own.tp, own.sequence_parallel, way)
            passes = ((cost.forward, False), (cost.forward, True), (cost.recomputed, False))
            for operators, backward in passes:
                seconds = work_seconds(
                    operators,
                    work.precision,
                    hardware,
                    curves,
                    work.software,
                    setting.mesh.ranks,
                    backward,
                )
                kinds["matmul"] += count * seconds.matmuls
                kinds["attention"] += count * seconds.attention
                kinds["memory"] += count * seconds.traffic
    compute = planned_parts(plan)[coord]["compute"]
    kinds["host"] = max(0.0, compute - sum(kinds.values()))
    return kinds


Pair = tuple[float, float]  # measured and planned seconds


@dataclass(frozen=True)
class Explanation:
    """A measured step beside its plan.

    - `seconds`: measured and planned, by the names of PARTS and OTHERS, which add up to the steps'
      times.
    - `errors`: the standard errors of what was measured.
    - `kinds`: the computes by the names of COMPUTE_KINDS; empty if the run did not measure them.
    - `part`: the part with the largest excess, or "" if none exceeds its share of the plan
      (PLANNER_ERROR, LEAST_EXCESS) and two standard errors.
    - `rank`: the slow rank, if that is the part.
    - `setting`: the one setting to change, and `gain`: the seconds that it should save.
    - `copying`: the planned seconds of "reduction" in which gradients are copied to one buffer.
    """

    seconds: Mapping[str, Pair]
    errors: Mapping[str, float]
    kinds: Mapping[str, Pair]
    part: str
    rank: int | None
    setting: str
    gain: float
    copying: float

    @property
    def excess(self) -> float:
        """Seconds by which the part exceeds its plan; 0 without one."""
        measured, planned = self.seconds.get(self.part, (0.0, 0.0))
        return measured - planned

    @property
    def kind(self) -> str:
        """The kind of operation with the largest excess, if the part is the computes."""
        if self.part != "compute" or not self.kinds:
            return ""
        return max(self.kinds, key=lambda name: self.kinds[name][0] - self.kinds[name][1])

    def to_json(self) -> JsonObject:
        """Return the object of `parallel3d plan --explain-run RUN --json`."""
        parts = {name: _both(pair) for name, pair in self.seconds.items()}
        for name, error in self.errors.items():
            parts[name]["standard_error"] = error
        return {
            "parts": parts,
            "compute": {name: _both(pair) for name, pair in self.kinds.items()},
            "part": self.part,
            "kind": self.kind,
            "excess_seconds": self.excess,
            "rank": self.rank,
            "setting": self.setting,
            "gain_seconds": self.gain,
        }


def _both(pair: Pair) -> dict[str, float]:
    measured, planned = pair
    return {"measured": measured, "planned": planned}


class _MeasuredRank:
    """A rank's measured parts without the time in which it had no core.

    - `lost`: that time, if other programs took the core; if more ranks than cores share them, it is
      a part of "waiting".
    - `passes`: forwards and backwards.
    """

    def __init__(self, parts: Mapping[str, float], hardware: Hardware, num_ranks: int) -> None:
        self.parts = dict(parts)
        self.coord = int(parts["pp_coord"])
        self.lost = parts.get("without core", 0.0) if hardware.cores is not None else 0.0
        passes = parts["forward"] + parts["backward"]
        busy = passes + parts["optimizer"] + parts["rest"]
        share = 1 - min(0.9, self.lost / busy) if busy else 1.0
        self.passes = share * passes
        self.parts["optimizer"] *= share
        self.parts["rest"] *= share
        if hardware.crowd(num_ranks) > 1:
            self.parts["waiting"] += self.lost
            self.lost = 0.0

    def error(self, *names: str) -> float:
        """Return the standard error of the sum of some parts."""
        spreads = [self.parts.get(f"{name} spread", 0.0) for name in names]
        return hypot(*spreads) / sqrt(self.parts.get("steps", 1.0))


def explain_run(plan: Plan, measured: Sequence[Mapping[str, Any]]) -> Explanation:
    """Compare the measured parts of each rank's step with the plan of the same setting."""
    planned = planned_parts(plan)
    hardware = plan.request.hardware
    ranks = [_MeasuredRank(parts, hardware, len(measured)) for parts in measured]
    ratios = [rank.passes / planned[rank.coord]["compute"] for rank in ranks]
    usual = median_low(ratios)
    slowest = ratios.index(max(ratios))
    slow = ranks[slowest]
    own = planned[slow.coord]
    latest = max(ranks, key=lambda rank: rank.parts["data"])
    seconds = {
        "data": latest.parts["data"],
        "slow rank": slow.passes - usual * own["compute"],
        "compute": usual * own["compute"],
    }
    of_passes = slow.error("forward", "backward")
    of_usual = ranks[ratios.index(usual)].error("forward", "backward")
    errors = {
        "data": latest.error("data"),
        "slow rank": hypot(of_passes, of_usual),  # the error of a difference
        "compute": of_passes,
    }
    for name in WAITS:
        excesses = []
        for place, rank in enumerate(ranks):
            excess = rank.parts[name] - planned[rank.coord][name]
            others_lost = max([r.lost for r in ranks[:place] + ranks[place + 1 :]], default=0.0)
            # It may have waited for ranks that had no core.
            excesses.append(max(min(0.0, excess), excess - others_lost))
        seconds[name] = own[name] + min(excesses)
        errors[name] = slow.error(name)
    pairs = {name: (seconds[name], own.get(name, 0.0)) for name in PARTS}
    pairs[OTHERS] = (max(rank.lost for rank in ranks), 0.0)
    part = ""
    excess = 0.0
    for name in PARTS:
        own_excess = pairs[name][0] - pairs[name][1]
        share = LEAST_EXCESS.get(name, PLANNER_ERROR)
        if own_excess > max(excess, share * plan.time.seconds, 2 * errors[name]):
            part = name
            excess = own_excess
    threads = int(slow.parts.get("threads", 0))
    if part == "data":
        setting, gain = _change_of_reading(plan, latest, excess)
    else:
        setting, gain = _change(plan, part, excess, pairs, threads)
    kinds = _kinds(plan, slow, seconds["compute"])
    named = slowest if part == "slow rank" else None
    copying = copying_seconds(plan)[slow.coord]
    return Explanation(pairs, errors, kinds, part, named, setting, gain, copying)


def _kinds(plan: Plan, rank: _MeasuredRank, compute: float) -> dict[str, Pair]:
    """Return the kinds of operation of a rank's computes, which take `compute` seconds in all."""
    measured = [rank.parts.get(name, 0.0) for name in COMPUTE_KINDS]
    if not any(measured):
        return {}
    planned = planned_kinds(plan, rank.coord)
    scale = compute / sum(measured)
    pairs = {}
    for name, seconds in zip(COMPUTE_KINDS, measured, strict=True):
        pairs[name] = (scale * seconds, planned[name])
    return pairs


def _change(
    plan: Plan, part: str, excess: float, seconds: Mapping[str, Pair], threads: int
) -> tuple[str, float]:
    """Return the one setting that should save most, and the seconds that it should save.

    - `threads`: of the slowest rank; 0 if the run did not record them.
    """
    if part == "slow rank":
        return "leave this rank's host out, or free it of other work", excess
    found = _best_neighbour(plan, seconds)
    hardware = plan.request.hardware
    if part == "compute" and hardware.cores is not None and excess > found[1]:
        ranks = hardware.sharing(plan.setting.mesh.ranks)
        wanted = max(1, int(hardware.cores.count.value) // ranks)
        if not threads:
            return "OMP_NUM_THREADS: more threads for a rank, or fewer ranks on the cores", excess
        if threads != wanted:
            return f"OMP_NUM_THREADS: {wanted} for each rank instead of {threads}", excess
    has_link = plan.setting.mesh.ranks > 1
    if has_link and part in ("waiting", "reduction") and found[1] < 0.2 * excess:
        return "the link between its ranks (no setting of this mesh saves a fifth of that)", excess
    return found


def _change_of_reading(plan: Plan, rank: _MeasuredRank, excess: float) -> tuple[str, float]:
    """Return the setting that shortens a rank's wait for its batch by `excess` seconds.

    Reading ahead hides a read that is shorter than the rest of the step, or long now and then.
    """
    steps = plan.request.config.data.read_ahead
    rest = sum(rank.parts[name] for name in ("forward", "backward", *WAITS))
    if not steps:
        return "parallel3d.data.read_ahead: 2 instead of 0", min(excess, rest)
    if rank.parts.get("data spread", 0.0) > rank.parts["data"]:
        return f"parallel3d.data.read_ahead: more than {steps}, for some reads are long", excess
    return "parallel3d.data.cache: a faster disk; reading a step takes longer than the step", excess


# The parts of a plan, by the measured part in which they mostly are.
_MEASURED_IN = {
    "compute": "compute",
    "tensor": "compute",
    "bubble": "waiting",
    "pipeline": "waiting",
    "data": "reduction",
    "offload": "optimizer",
    "optimizer": "optimizer",
}


def _best_neighbour(plan: Plan, seconds: Mapping[str, Pair]) -> tuple[str, float]:
    """Return the planner's choice whose change alone saves most, and the seconds that it saves.

    Each part of the other plan is scaled by what the run measured of it, but not below the plan.
    """
    request = plan.request
    now = plan.setting.choices
    flow = now[0]
    words = words_of(*now)
    scales = {}
    for name, part in _MEASURED_IN.items():
        measured, planned = seconds[part]
        scales[name] = max(1.0, measured / planned) if planned > 0 else 1.0

    def corrected(parts: Mapping[str, float]) -> float:
        return sum(scales[name] * planned for name, planned in parts.items())

    before = corrected(plan.time.parts)
    least = LEAST_GAIN * plan.time.seconds
    best = "none: no change of one setting is planned to save 3 % of the step", 0.0
    for choices in candidates.choices(request, candidates.flows(request, flow.mesh)):
        pairs = zip(words, words_of(*choices), strict=True)
        changed = [new for old, new in pairs if old != new]
        if len(changed) != 1 or choices[0].ep != flow.ep or choices[2].copies != now[2].copies:
            continue
        setting = candidates.setting_of(request, *choices)
        if all_fit(setting, request.hardware):
            gain = before - corrected(step_time(setting, request.hardware).parts)
            if gain >= least:
                best = max(best, (changed[0], gain), key=lambda pair: pair[1])
    return best


def sentence(explanation: Explanation) -> str:
    """Return the part with the largest excess, and the setting to change, in words."""
    first = f"no part exceeds its plan by {100 * PLANNER_ERROR:.0f} % of the planned step"
    if explanation.part:
        more = ""
        if explanation.rank is not None:
            more = f" (rank {explanation.rank})"
        elif explanation.kind:
            more = f" (mostly {_KIND_NAMES[explanation.kind]})"
        first = f"largest excess: {explanation.part}{more}, {three(explanation.excess)} s"
    gain = f", about {three(explanation.gain)} s a step" if explanation.gain > 0 else ""
    return f"{first}; setting to change: {explanation.setting}{gain}"


def show(explanation: Explanation, plan: Plan, out: Console) -> None:
    """Print the parts side by side, the one with the largest excess, and the setting to change."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("seconds of a step", "measured", "±", "plan", "excess"):
        table.add_column(column, justify="left" if column.startswith("seconds") else "right")
    for name, pair in explanation.seconds.items():
        table.add_row(name, *_cells(pair, explanation.errors.get(name, 0.0)))
        if name == "compute":
            for kind, own in explanation.kinds.items():
                table.add_row(f"  {_KIND_NAMES[kind]}", *_cells(own))
    out.print(table)
    terminal.say(out, f"\nplanned step: {three(plan.time.seconds)} s; {sentence(explanation)}")


def _cells(pair: Pair, error: float = 0.0) -> list[str]:
    measured, planned = pair
    cells = (measured, error, planned, measured - planned)
    return ["–" if abs(cell) < 5e-7 else three(cell) for cell in cells]
