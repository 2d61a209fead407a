"""Seconds of a step: the simulated schedule, with the cost of each action."""

from collections.abc import Mapping
from dataclasses import dataclass
from operator import add, mul, sub

from parallel3d.base.errors import ConfigError
from parallel3d.config.hardware import Hardware
from parallel3d.plan.layers.placement import most_in_flight
from parallel3d.plan.setting import Setting
from parallel3d.plan.time.cost import ActionCosts, SecondsByPart, costs_of
from parallel3d.plan.time.makespan import CoordinateEnd, ends
from parallel3d.plan.time.operators import Curves, curves_for
from parallel3d.schedule.schedule import Action, Op, Spans, add_sharding, idle_fraction, simulate
from parallel3d.schedule.schedules import load, make_schedule, splits_backward

TIMES = ("compute", "bubble", "tensor", "pipeline", "data", "offload", "optimizer")


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, and their parts on the busiest pipeline coordinate.

    - `parts`: by the names of TIMES. "pipeline": seconds that sends between stages add. "bubble":
      all other waits.
    - `bubble`: the idle fraction of all coordinates, defined as in schedule.bubble.
    """

    seconds: float
    parts: Mapping[str, float]
    bubble: float = 0.0


def step_time(setting: Setting, hardware: Hardware, curves: Curves | None = None) -> StepTime:
    """Return the time of a step.

    Raises ConfigError if the schedule cannot run or the hardware lacks a figure.
    """
    check(setting)
    costs = costs_of(setting, hardware, curves or curves_for(hardware))
    passes = _ends(setting, costs)
    seconds = pipeline = _step(costs, passes)
    pipeline -= (
        _step(costs, _ends(setting, costs, sends=False)) if any(costs.sends.seconds) else seconds
    )
    # The extrapolation of long schedules can fall some thousandths below the lower bound.
    seconds, pipeline = max(seconds, _bound(costs, setting)), max(0.0, pipeline)
    busiest = max(_busy(costs, setting.num_microbatches), key=sum)
    parts = {**busiest._asdict(), "pipeline": pipeline}
    parts["bubble"] = max(0.0, seconds - sum(parts.values()))
    parts = {name: parts[name] for name in TIMES}
    return StepTime(sum(parts.values()), parts, _bubble(costs, setting, passes))


def step_spans(setting: Setting, hardware: Hardware, curves: Curves | None = None) -> Spans:
    """Return the span of each action of the step, with ZeRO's GATHERs and REDUCEs.

    The optimizer is left out. A coordinate's reductions are divided evenly among its stages.
    """
    costs = costs_of(setting, hardware, curves or curves_for(hardware))
    sizes = setting.pp, setting.num_microbatches, setting.stages_per_rank
    schedule = make_schedule(setting.schedule, *sizes)
    shards, weights = setting.dp * setting.cp > 1, setting.weights
    reduces = setting.reduces_once and shards
    if reduces or setting.holds_weights:
        weights = weights if setting.holds_weights else "per_microbatch"
        schedule = add_sharding(schedule, weights, reduces)
    place = schedule.pp_coord_of_stage

    def cost(action: Action) -> float:
        if action.op is not Op.REDUCE:
            return costs.seconds(action)
        own = costs.layout.coord_class_of[place[action.stage]]
        return (sum(costs.reduce[own]) - costs.hideable[own]) / setting.stages_per_rank

    return simulate(schedule, cost)


def check(setting: Setting) -> None:
    """Raise ConfigError if the schedule cannot run with the setting's ranks and microbatches."""
    sizes = setting.pp, setting.num_microbatches, setting.stages_per_rank
    if reason := load(setting.schedule).invalid(*sizes):
        raise ConfigError(f"schedule {setting.schedule!r}: {reason}")


def _ends(setting: Setting, costs: ActionCosts, sends: bool = True) -> list[CoordinateEnd]:
    sizes = setting.pp, setting.num_microbatches, setting.stages_per_rank
    return ends(setting.schedule, *sizes, costs.seconds, sends)


def _step(costs: ActionCosts, ends: list[CoordinateEnd]) -> float:
    """Return the seconds of a step, from the times at which the coordinates' last actions end.

    No rank updates before all gradients exist. Waits between the last backwards hide reductions.
    """
    classes = costs.layout.coord_class_of
    begins = max(sum(parts) for parts in costs.before)
    reduced = max(
        end.seconds + sum(costs.reduce[c]) - min(end.waited, costs.hideable[c])
        for end, c in zip(ends, classes, strict=True)
    )
    return begins + reduced + max(sum(parts) for parts in costs.after)


def _bubble(costs: ActionCosts, setting: Setting, passes: list[CoordinateEnd]) -> float:
    layout = costs.layout
    stages = [stage for place in layout.coord_class_of for stage in layout.coords[place]]
    each = [sum(costs.forward[stage]) + sum(costs.backward[stage]) for stage in stages]
    busy = setting.num_microbatches * sum(each)
    return idle_fraction(busy, setting.pp, max(end.seconds for end in passes))


def _busy(costs: ActionCosts, num_microbatches: int) -> list[SecondsByPart]:
    """Return the busy seconds of each class of coordinates in a step, by kind of work."""
    busy = []
    for i, classes in enumerate(costs.layout.coords):
        total = costs.before[i].plus(costs.reduce[i]).plus(costs.after[i])
        for c in classes:
            total = total.plus(costs.forward[c].plus(costs.backward[c]), num_microbatches)
        busy.append(total)
    return busy


def lower_bound(setting: Setting, hardware: Hardware, curves: Curves | None = None) -> float:
    """Return a lower bound on the seconds of a step, without simulating its actions.

    It is never above `step_time` and is the largest of:

    - for each coordinate: the wait for the first microbatch, its own work, and the backwards of the
      stages before it;
    - for each coordinate: the time of a microbatch from its stage to the last one and back, times
      the microbatches, over the number that the schedule keeps in flight;
    - the time of a microbatch through all stages and back;
    - the step of a pipeline whose stages are all as fast as the fastest, whose bubble has a closed
      form.

    If backwards are split, other stages do not wait for the half that computes weight gradients.
    """
    return _bound(costs_of(setting, hardware, curves or curves_for(hardware)), setting)


def _bound(costs: ActionCosts, setting: Setting) -> float:
    layout, count = costs.layout, setting.num_microbatches
    sizes = layout.pp, count, setting.stages_per_rank
    forward, backward = [*map(sum, costs.forward)], [*map(sum, costs.backward)]
    both = [*map(add, forward, backward)]
    reducing = [*map(sum, costs.reduce)]
    sends = costs.sends.before
    way, around, back = both, both, 2
    if splits_backward(setting.schedule):
        way = [f + (full - f) / 2 for f, full in zip(forward, both, strict=True)]
        around, back = forward, 1
    held = most_in_flight(setting.schedule, *sizes) if sends[-1] else ()
    reduced = 0.0
    for outer in layout.outer:
        work = count * sum([both[i] for i in layout.coords[outer.coord_class]])
        if held:
            trips = 0.0
            for stage, inside in zip(outer.home, outer.stages_from, strict=True):
                trips += sum(map(mul, inside, way)) + 2 * (sends[-1] - sends[stage])
            work = max(work, count * trips / held[outer.coord])
        work += sum(map(mul, outer.stages_before, around)) + back * sends[outer.home[0]]
        reduced = max(reduced, work + reducing[outer.coord_class])
    unhidden: float = min(map(sub, reducing, costs.hideable))
    through: float = sum(map(mul, layout.outer[0].stages_from[0], way)) + 2 * sends[-1]
    reduced = max(reduced, through + unhidden)
    fastest = min(forward)
    if layout.pp > 1 and fastest > 0:
        idle = load(setting.schedule).bubble(*sizes, min(backward) / fastest)
        busy = count * setting.stages_per_rank * (fastest + min(backward))
        reduced = max(reduced, busy / (1 - idle) + unhidden)
    return reduced + max(map(sum, costs.before)) + max(map(sum, costs.after))
