"""Seconds of a step: the simulated schedule, with the cost of each action.

A search compares many similar settings. So passes, transfers and sends are cached separately, by
what they depend on (passes.py, sharding.py), and combined here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from operator import add, mul, sub
from typing import NamedTuple

from parallel3d.config.hardware import Hardware
from parallel3d.plan.layers.placement import StageClasses, most_in_flight, stage_classes_of
from parallel3d.plan.setting import Setting
from parallel3d.plan.time.makespan import CoordinateEnd, ends, last_passes
from parallel3d.plan.time.network import (
    collective_seconds,
    crosses,
    group_of,
    send_seconds,
)
from parallel3d.plan.time.operators import Curves, Machine, curves_for, machine_of
from parallel3d.plan.time.passes import PassSeconds, stage_passes
from parallel3d.plan.time.sharding import OncePerStep, Sharding, StageTransfers, transfers_of
from parallel3d.schedule.schedule import Action, Op, Spans, idle_fraction, simulate
from parallel3d.schedule.schedules import check_sizes, load, make_schedule, splits_backward


class SecondsByPart(NamedTuple):
    """Seconds of a rank by kind of work. Only exposed transfers count."""

    compute: float = 0.0
    tensor: float = 0.0
    data: float = 0.0
    offload: float = 0.0
    optimizer: float = 0.0

    def plus(self, other: "SecondsByPart", times: float = 1.0) -> "SecondsByPart":
        """Return the sum of these seconds and `times` times the `other` ones."""
        return SecondsByPart(*(a + times * b for a, b in zip(self, other, strict=True)))


class SendSeconds(NamedTuple):
    """Seconds of the send behind each stage [stages - 1], and their sum `before` each [stages]."""

    seconds: tuple[float, ...]
    before: tuple[float, ...]


@dataclass(eq=False)
class ActionCosts:
    """Seconds of all work of a step, by class of stages and of coordinates.

    Per microbatch, [stage classes]: `forward`, `backward`.

    Once per step, [coordinate classes]:

    - `before` the first forward.
    - `reduce`: after the coordinate's last backward.
    - `hideable`: the part of `reduce` that waits between the last backwards can hide.
    - `after` the last backward of all coordinates.
    """

    layout: StageClasses
    forward: list[SecondsByPart]
    backward: list[SecondsByPart]
    sends: SendSeconds
    before: tuple[SecondsByPart, ...]
    reduce: tuple[SecondsByPart, ...]
    hideable: tuple[float, ...]
    after: tuple[SecondsByPart, ...]

    def seconds(self, action: Action) -> float:
        """Return the seconds of one action; a receive takes none."""
        op, stage, _ = action
        match op:
            case Op.F:
                return sum(self.forward[self.layout.class_of[stage]])
            case Op.B:
                return sum(self.backward[self.layout.class_of[stage]])
            case Op.I | Op.W:  # half of the products each
                return sum(self.backward[self.layout.class_of[stage]]) / 2
            case Op.SEND_F:
                return self.sends.seconds[stage]
            case Op.SEND_B:
                return self.sends.seconds[stage - 1]
            case _:
                return 0.0


def costs_of(setting: Setting, hardware: Hardware, curves: Curves) -> ActionCosts:
    """Return the seconds of all work of a step; ConfigError if the hardware lacks a figure."""
    machine = machine_of(hardware, setting.workload.software, curves)
    layout = stage_classes_of(setting)
    slowdown = hardware.slowdown("overhead", setting.mesh.ranks)
    by_stage, by_coord = transfers_of(layout, Sharding.of(setting), machine)
    forward = []
    backward = []
    ahead = []
    behind = []
    for (there, back), moves in zip(stage_passes(layout, setting, machine), by_stage, strict=True):
        if setting.state.holds_weights:  # gathered before all passes
            moves = moves._replace(gather_seconds=0.0, fetch_seconds=0.0, overhead_seconds=0.0)
        parts, free = _exposed(there, moves, False, machine, slowdown)
        forward.append(parts)
        ahead.append(free)
        parts, free = _exposed(back, moves, True, machine, slowdown)
        backward.append(parts)
        behind.append(free)
    in_a_row = last_passes(setting.actions)
    per_coord = []
    for classes, once in zip(layout.coords, by_coord, strict=True):
        free_ahead = in_a_row * sum([ahead[c] for c in classes])
        free_before_last = in_a_row * sum([ahead[c] for c in classes[:-1]])
        free_behind = in_a_row * sum([behind[c] for c in classes])
        per_coord.append(_once(once, free_ahead, free_before_last, free_behind, machine, slowdown))
    before, reduce, hideable, after = zip(*per_coord, strict=True)
    work = setting.workload
    _, dp, cp, tp = setting.mesh
    tokens = setting.flow.micro_batch * work.seq // cp
    num_bytes = tokens * work.hidden_size * work.bytes_per_element
    split = setting.flow.sequence_parallel
    sends = _sends(layout, num_bytes, tp, tp * cp * dp, split, machine)
    return ActionCosts(layout, forward, backward, sends, before, reduce, hideable, after)


def _exposed(
    own: PassSeconds, moves: StageTransfers, backward: bool, machine: Machine, slowdown: float
) -> tuple[SecondsByPart, float]:
    """Return a pass with its exposed transfers, and the compute seconds that hide nothing yet."""
    software = machine.software
    curves = machine.curves
    compute = own.compute + slowdown * (curves.overhead_per_action + moves.overhead_seconds)
    data = moves.gather_seconds
    offload = moves.fetch_seconds
    free = own.free
    hideable = data if software.overlaps_gather else 0.0
    if backward:
        compute += moves.accumulate_seconds
        data += moves.reduce_seconds
        offload += moves.store_seconds
        if software.overlaps_reduction:
            hideable += moves.reduce_seconds
    if hideable:
        hidden = min(free, curves.overlap * hideable)
        data = data - hidden
        free = free - hidden
    if offload and software.overlaps_offload:
        hidden = min(free, curves.overlap * offload)
        offload = offload - hidden
        free = free - hidden
    return SecondsByPart(compute, own.tensor, data, offload), free


def _once(
    once: OncePerStep,
    ahead: float,
    but_last: float,
    behind: float,
    machine: Machine,
    slowdown: float,
) -> tuple[SecondsByPart, SecondsByPart, float, SecondsByPart]:
    """Return the `before`, `reduce`, `hideable` and `after` of ActionCosts for a coordinate.

    - `ahead`: free compute seconds of the first forwards; `but_last`: without the last stage's.
    - `behind`: free compute seconds of the last backwards.

    A GATHER is issued one window ahead, unless the device is the program's own cores. The search
    relies on ZeRO-3 not being faster than ZeRO-1, which gathers all weights in one message.
    """
    software = machine.software
    curves = machine.curves
    reduce = once.reduce_seconds
    first = once.gather_before_seconds
    last = once.gather_after_seconds
    hideable = 0.0
    if software.overlaps_reduction:
        hidden = min(behind, curves.overlap * reduce)
        hideable = curves.overlap * reduce - hidden
        reduce -= hidden
    if software.overlaps_gather:  # the first weights are exposed, the others come behind computes
        first -= min(ahead, curves.overlap * first)
        last -= min(ahead, curves.overlap * last)
    elif machine.hardware.cores is None:
        hidden = min(but_last, curves.overlap * once.gather_later_seconds)
        first = max(first - hidden, min(first, once.gather_least_seconds - last))
    fixed = curves.overhead_per_step * slowdown
    return (
        SecondsByPart(
            once.program_before_seconds * slowdown, 0.0, first, once.fetch_before_seconds
        ),
        SecondsByPart(0.0, once.tensor_seconds, reduce + once.tied_seconds),
        hideable,
        SecondsByPart(0.0, 0.0, last, once.offload_seconds, once.optimizer_seconds + fixed),
    )


@lru_cache(maxsize=65536)
def _sends(
    layout: StageClasses, num_bytes: int, tp: int, stride: int, split: bool, machine: Machine
) -> SendSeconds:
    """Return the seconds of the sends between all stages.

    - `num_bytes`: of a message before it is split.
    - `stride`: devices of a pipeline coordinate.
    - `split`: True if sequence parallelism splits the message over the tp ranks.
    """
    hardware = machine.hardware
    curves = machine.curves
    devices = stride * layout.pp
    gather = 0.0
    if machine.software.scatters_sends and not split:
        group = group_of(tp, 1, devices, hardware)
        gather = collective_seconds("all_gather", num_bytes, *group, hardware, curves)
    if machine.software.scatters_sends or split:
        num_bytes //= tp
    seconds = []
    for here, there in layout.crossings:
        if here == there:
            seconds.append(0.0)
        else:
            leaves = crosses(stride, here, there, devices, hardware)
            message = send_seconds(num_bytes, leaves, hardware, curves)
            seen = 1 - curves.overlap if machine.software.overlaps_sends else 1.0
            seconds.append(seen * message + gather)  # the receiver gathers inside its own program
    return SendSeconds(tuple(seconds), tuple(accumulate(seconds, initial=0.0)))


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
    check_sizes(*setting.actions)
    costs = costs_of(setting, hardware, curves or curves_for(hardware))
    crowd = hardware.crowd(setting.mesh.ranks)
    passes = _ends(setting, costs, crowd)
    seconds = pipeline = _step(costs, passes)
    pipeline -= (
        _step(costs, _ends(setting, costs, crowd, sends=False))
        if any(costs.sends.seconds)
        else seconds
    )
    # The extrapolation of long schedules can fall some thousandths below the lower bound.
    seconds = max(seconds, _bound(costs, setting) / crowd)
    pipeline = max(0.0, pipeline)
    busiest = max(_busy(costs, setting.num_microbatches), key=sum)
    parts = {**busiest._asdict(), "pipeline": pipeline}
    if crowd > 1:  # the busiest rank has more than its share of the cores
        share = min(1.0, (seconds - pipeline) / sum(busiest))
        parts |= {name: share * value for name, value in busiest._asdict().items()}
    parts["bubble"] = max(0.0, seconds - sum(parts.values()))
    parts = {name: parts[name] for name in TIMES}
    return StepTime(sum(parts.values()), parts, _bubble(costs, setting, passes))


def step_spans(setting: Setting, hardware: Hardware, curves: Curves | None = None) -> Spans:
    """Return the span of each compute and message of the step."""
    costs = costs_of(setting, hardware, curves or curves_for(hardware))
    return simulate(make_schedule(*setting.actions), costs.seconds)


def _ends(
    setting: Setting, costs: ActionCosts, crowd: float, sends: bool = True
) -> list[CoordinateEnd]:
    """Return the ends of the passes; `crowd` processes share a core's time.

    Costs are those of processes that are all busy. An idle one leaves its share to the others: the
    passes take as long as with a core each, or as the work of all on the cores that there are.
    """
    passes = ends(setting.actions, costs.seconds, sends)
    if crowd == 1:
        return passes
    work = _work(costs, setting) / costs.layout.pp
    return [CoordinateEnd(max(end.seconds / crowd, work), end.waited / crowd) for end in passes]


def _work(costs: ActionCosts, setting: Setting) -> float:
    """Return the seconds of all coordinates' forwards and backwards."""
    layout = costs.layout
    each = []
    for coord_class in layout.coord_class_of:
        for stage_class in layout.coords[coord_class]:
            each.append(sum(costs.forward[stage_class]) + sum(costs.backward[stage_class]))
    return setting.num_microbatches * sum(each)


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
    return idle_fraction(_work(costs, setting), costs.layout.pp, max(end.seconds for end in passes))


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
    costs = costs_of(setting, hardware, curves or curves_for(hardware))
    return _bound(costs, setting) / hardware.crowd(setting.mesh.ranks)


def passes_bound(setting: Setting, hardware: Hardware, curves: Curves) -> float:
    """Return a lower bound on the seconds of a step's passes, without what happens once a step."""
    costs = costs_of(setting, hardware, curves)
    nothing = tuple([SecondsByPart()] * len(costs.before))
    passes = replace(costs, before=nothing, reduce=nothing, hideable=(0.0,), after=nothing)
    return _bound(passes, setting) / hardware.crowd(setting.mesh.ranks)


def _bound(costs: ActionCosts, setting: Setting) -> float:
    layout = costs.layout
    schedule, *sizes = setting.actions
    _, count, stages_per_rank = sizes
    forward = [*map(sum, costs.forward)]
    backward = [*map(sum, costs.backward)]
    both = [*map(add, forward, backward)]
    reducing = [*map(sum, costs.reduce)]
    sends = costs.sends.before
    way = both
    around = both
    back = 2
    if splits_backward(schedule):
        way = [f + (full - f) / 2 for f, full in zip(forward, both, strict=True)]
        around = forward
        back = 1
    held = most_in_flight(setting.actions) if sends[-1] else ()
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
        idle = load(schedule).bubble(*sizes, min(backward) / fastest)
        busy = count * stages_per_rank * (fastest + min(backward))
        reduced = max(reduced, busy / (1 - idle) + unhidden)
    return reduced + max(map(sum, costs.before)) + max(map(sum, costs.after))
