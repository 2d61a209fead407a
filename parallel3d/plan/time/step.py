"""Seconds of a step: the schedule's own list, with each action at its cost."""

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
    """Seconds of a step, and its parts by the names of TIMES, of the busiest pipeline coordinate.

    "pipeline": seconds that sends between stages add. "bubble": all other waits. `bubble`: the idle
    fraction of all coordinates, as schedule.bubble finds it.
    """

    seconds: float
    parts: Mapping[str, float]
    bubble: float = 0.0


def step_time(setting: Setting, hardware: Hardware, curves: Curves | None = None) -> StepTime:
    """The time of a step; ConfigError for a schedule that cannot run, or a figure not known."""
    check(setting)
    costs = costs_of(setting, hardware, curves or curves_for(hardware))
    passes = _ends(setting, costs)
    seconds = pipeline = _step(costs, passes)
    pipeline -= (
        _step(costs, _ends(setting, costs, sends=False)) if any(costs.sends.seconds) else seconds
    )
    # A long list goes on in equal steps from a short one, which can be off by some thousandths.
    seconds, pipeline = max(seconds, _bound(costs, setting)), max(0.0, pipeline)
    busiest = max(_busy(costs, setting.num_microbatches), key=sum)
    parts = {**busiest._asdict(), "pipeline": pipeline}
    parts["bubble"] = max(0.0, seconds - sum(parts.values()))
    parts = {name: parts[name] for name in TIMES}
    return StepTime(sum(parts.values()), parts, _bubble(costs, setting, passes))


def step_spans(setting: Setting, hardware: Hardware, curves: Curves | None = None) -> Spans:
    """The span of each action of the step, with what ZeRO gathers and reduces by the program.

    The optimizer is not in it. A coordinate's reductions are shared out evenly among its stages.
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
    """Seconds of a step, from the times at which the coordinates' last actions end.

    No rank updates before all gradients exist. Waits between last backwards hide reductions.
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
    """Seconds of each class of coordinates in a step, by kind of work."""
    busy = []
    for i, classes in enumerate(costs.layout.coords):
        total = costs.before[i].plus(costs.reduce[i]).plus(costs.after[i])
        for c in classes:
            total = total.plus(costs.forward[c].plus(costs.backward[c]), num_microbatches)
        busy.append(total)
    return busy


def lower_bound(setting: Setting, hardware: Hardware, curves: Curves | None = None) -> float:
    """Lower bound on the seconds of a step, never above `step_time`, found without its actions.

    Each coordinate waits for the first microbatch, does its work, and the stages before it do
    theirs. It holds no more microbatches at once than the schedule lets it, each for a whole way to
    the last stage and back. No stage beats the fastest, whose bubble has a closed form. Where
    backwards are split, nobody waits for the weights' half.
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
        way = [f + (whole - f) / 2 for f, whole in zip(forward, both, strict=True)]
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
    fastest = min(forward)
    if layout.pp > 1 and fastest > 0:
        idle = load(setting.schedule).bubble(*sizes, min(backward) / fastest)
        busy = count * setting.stages_per_rank * (fastest + min(backward))
        reduced = max(reduced, busy / (1 - idle) + min(map(sub, reducing, costs.hideable)))
    return reduced + max(map(sum, costs.before)) + max(map(sum, costs.after))
