"""Compare a measured step with its plan part by part: `parallel3d plan --explain-run RUN`.

A run with `wall_clock_breakdown` records the parts of its step on each rank. The last rank to
arrive at a collective or a message waits least, so of parts that contain waits the least counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low
from typing import Any

from rich.console import Console
from rich.table import Table

from parallel3d.base import terminal
from parallel3d.base.errors import ConfigError
from parallel3d.base.journal import EVENTS, STEP_PARTS
from parallel3d.base.reader import JsonObject
from parallel3d.base.step_lines import read_lines
from parallel3d.plan.report.plan_table import three
from parallel3d.plan.search import candidates
from parallel3d.plan.search.plans import Plan
from parallel3d.plan.search.remedy import all_fit, words_of
from parallel3d.plan.time.operators import curves_for
from parallel3d.plan.time.step import costs_of, step_time

WAITS = ("waiting", "reduction", "optimizer", "rest")  # each may contain waits for other ranks
PARTS = ("data", "slow rank", "compute", *WAITS)
LEAST_EXCESS = 0.05
"""The share of a planned step below which a part's excess is within the planner's error."""


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
    count = setting.num_microbatches
    each = []
    for coord_class in costs.layout.coord_class_of:
        stages = costs.layout.coords[coord_class]
        parts = {
            "data": 0.0,
            "compute": count
            * sum(sum(costs.forward[stage]) + sum(costs.backward[stage]) for stage in stages),
            "reduction": sum(costs.reduce[coord_class]),
            "optimizer": sum(costs.after[coord_class]),
            "rest": 0.0,
        }
        parts["waiting"] = max(0.0, plan.time.seconds - sum(parts.values()))
        each.append(parts)
    return each


@dataclass(frozen=True)
class Explanation:
    """A measured step beside its plan.

    - `seconds`: measured and planned, by the names of PARTS, which add up to the steps' times.
    - `part`: the part with the largest excess, or "" if none exceeds LEAST_EXCESS of the plan.
    - `rank`: the slow rank, if that is the part.
    - `setting`: the one setting to change, and `gain`: the seconds that it should save.
    """

    seconds: Mapping[str, tuple[float, float]]
    part: str
    rank: int | None
    setting: str
    gain: float

    @property
    def excess(self) -> float:
        """Seconds by which the part exceeds its plan; 0 without one."""
        measured, planned = self.seconds.get(self.part, (0.0, 0.0))
        return measured - planned

    def to_json(self) -> JsonObject:
        """Return the object of `parallel3d plan --explain-run RUN --json`."""
        parts = {}
        for name, (measured, planned) in self.seconds.items():
            parts[name] = {"measured": measured, "planned": planned}
        return {
            "parts": parts,
            "part": self.part,
            "excess_seconds": self.excess,
            "rank": self.rank,
            "setting": self.setting,
            "gain_seconds": self.gain,
        }


def explain_run(plan: Plan, ranks: Sequence[Mapping[str, Any]]) -> Explanation:
    """Compare the measured parts of each rank's step with the plan of the same setting."""
    planned = planned_parts(plan)
    computes = [rank["forward"] + rank["backward"] for rank in ranks]
    ratios = []
    for rank, seconds in zip(ranks, computes, strict=True):
        ratios.append(seconds / planned[rank["pp_coord"]]["compute"])
    usual = median_low(ratios)
    slowest = ratios.index(max(ratios))
    own = planned[ranks[slowest]["pp_coord"]]
    measured = {
        "data": max(rank["data"] for rank in ranks),
        "slow rank": computes[slowest] - usual * own["compute"],
        "compute": usual * own["compute"],
    }
    for name in WAITS:
        excesses = [rank[name] - planned[rank["pp_coord"]][name] for rank in ranks]
        measured[name] = own[name] + min(excesses)
    pairs = {name: (measured[name], own.get(name, 0.0)) for name in PARTS}
    part = max(PARTS, key=lambda name: pairs[name][0] - pairs[name][1])
    excess = pairs[part][0] - pairs[part][1]
    if excess < LEAST_EXCESS * plan.time.seconds:
        part = ""
    setting, gain = _change(plan, part, excess, pairs)
    return Explanation(pairs, part, slowest if part == "slow rank" else None, setting, gain)


def _change(
    plan: Plan, part: str, excess: float, seconds: Mapping[str, tuple[float, float]]
) -> tuple[str, float]:
    """Return the one setting that should save most, and the seconds that it should save."""
    match part:
        case "data":
            return "parallel3d.data.read_ahead: read more steps in advance", excess
        case "slow rank":
            return "leave this rank's host out, or free it of other work", excess
    found = _best_neighbour(plan, seconds)
    if part == "compute" and plan.request.hardware.cores is not None and excess > found[1]:
        return "OMP_NUM_THREADS: more threads for a rank, or fewer ranks on the cores", excess
    if part in ("waiting", "reduction") and found[1] < 0.2 * excess:
        return "the link between its ranks (no setting of this mesh saves a fifth of that)", excess
    return found


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


def _best_neighbour(plan: Plan, seconds: Mapping[str, tuple[float, float]]) -> tuple[str, float]:
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
    best = "none: no other value of one setting is planned to be faster", 0.0
    for choices in candidates.choices(request, candidates.flows(request, flow.mesh)):
        pairs = zip(words, words_of(*choices), strict=True)
        changed = [new for old, new in pairs if old != new]
        if len(changed) != 1 or choices[0].ep != flow.ep or choices[2].copies != now[2].copies:
            continue
        setting = candidates.setting_of(request, *choices)
        if all_fit(setting, request.hardware):
            gain = before - corrected(step_time(setting, request.hardware).parts)
            best = max(best, (changed[0], gain), key=lambda pair: pair[1])
    return best


def sentence(explanation: Explanation) -> str:
    """Return the part with the largest excess, and the setting to change, in words."""
    first = f"no part exceeds its plan by {100 * LEAST_EXCESS:.0f} % of the planned step"
    if explanation.part:
        rank = "" if explanation.rank is None else f" (rank {explanation.rank})"
        first = f"largest excess: {explanation.part}{rank}, {three(explanation.excess)} s"
    gain = f", about {three(explanation.gain)} s a step" if explanation.gain > 0 else ""
    return f"{first}; setting to change: {explanation.setting}{gain}"


def show(explanation: Explanation, plan: Plan, out: Console) -> None:
    """Print the parts side by side, the one with the largest excess, and the setting to change."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("seconds of a step", "measured", "plan", "excess"):
        table.add_column(column, justify="left" if column.startswith("seconds") else "right")
    for name, (measured, planned) in explanation.seconds.items():
        cells = (measured, planned, measured - planned)
        table.add_row(name, *("–" if abs(cell) < 5e-7 else three(cell) for cell in cells))
    out.print(table)
    terminal.say(out, f"\nplanned step: {three(plan.time.seconds)} s; {sentence(explanation)}")
