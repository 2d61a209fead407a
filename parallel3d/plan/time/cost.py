"""Seconds of each action of a setting by part, and of the work done once a step.

A search asks for many settings that differ in little: passes, transfers and sends are each cached
by what they depend on (passes.py, sharding.py), and combined here.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from parallel3d.config.hardware import Hardware
from parallel3d.plan.layers.placement import StageClasses, stage_classes_of
from parallel3d.plan.setting import Setting
from parallel3d.plan.time.makespan import last_passes
from parallel3d.plan.time.network import (
    collective_seconds,
    crosses,
    group_of,
    send_seconds,
    sharing,
)
from parallel3d.plan.time.operators import Curves, Machine, machine_of
from parallel3d.plan.time.passes import PassSeconds, stage_passes
from parallel3d.plan.time.sharding import OncePerStep, StageTransfers, transfers_of
from parallel3d.schedule.schedule import Action, Op


class SecondsByPart(NamedTuple):
    """Seconds of a rank by the kind of work; transfers count only where no compute hides them."""

    compute: float = 0.0
    tensor: float = 0.0
    data: float = 0.0
    offload: float = 0.0
    optimizer: float = 0.0

    def plus(self, other: "SecondsByPart", times: float = 1.0) -> "SecondsByPart":
        """The sum of these seconds and `times` times the `other` ones."""
        return SecondsByPart(*(a + times * b for a, b in zip(self, other, strict=True)))


class SendSeconds(NamedTuple):
    """Seconds of the send behind each stage [stages - 1], and their sum `before` each [stages]."""

    seconds: tuple[float, ...]
    before: tuple[float, ...]


@dataclass(eq=False)
class ActionCosts:
    """Seconds of everything that happens in a step, by class of stages and coordinates.

    `forward` and `backward` [stage classes]: of one microbatch. `before`, `reduce` and `after`
    [coordinate classes]: once a step, before the first forward, after the coordinate's last
    backward, and after the last backward of all coordinates.
    """

    layout: StageClasses
    forward: list[SecondsByPart]
    backward: list[SecondsByPart]
    sends: SendSeconds
    before: list[SecondsByPart]
    reduce: list[SecondsByPart]
    hideable: list[float]
    """[coordinate classes]: how much of `reduce` a wait between the last backwards hides."""
    after: list[SecondsByPart]
    gather: list[float]
    """[stage classes]: of a GATHER, all of which `before` has."""

    def seconds(self, action: Action) -> float:
        """Seconds of one action; a receive takes none."""
        op, stage, _ = action
        match op:
            case Op.F:
                return sum(self.forward[self.layout.class_of[stage]])
            case Op.B:
                return sum(self.backward[self.layout.class_of[stage]])
            case Op.I | Op.W:  # half of the products each
                return sum(self.backward[self.layout.class_of[stage]]) / 2
            case Op.GATHER:
                return self.gather[self.layout.class_of[stage]]
            case Op.SEND_F:
                return self.sends.seconds[stage]
            case Op.SEND_B:
                return self.sends.seconds[stage - 1]
            case _:
                return 0.0


def costs_of(setting: Setting, hardware: Hardware, curves: Curves) -> ActionCosts:
    """Return the seconds of all actions of a step; ConfigError if the hardware lacks a figure."""
    machine = machine_of(hardware, setting.software, curves)
    layout = stage_classes_of(setting)
    slowdown = hardware.slowdown("overhead", sharing(setting.devices, hardware))
    by_stage, by_coord = transfers_of(layout, setting, machine)
    forward, backward, ahead, behind = [], [], [], []
    for (there, back), moves in zip(stage_passes(layout, setting, machine), by_stage, strict=True):
        if setting.holds_weights:  # gathered before all passes
            moves = moves._replace(gather_seconds=0.0, fetch_seconds=0.0, overhead_seconds=0.0)
        parts, free = _exposed(there, moves, False, machine, slowdown)
        forward.append(parts)
        ahead.append(free)
        parts, free = _exposed(back, moves, True, machine, slowdown)
        backward.append(parts)
        behind.append(free)
    in_a_row = last_passes(setting.pp, setting.num_microbatches, setting.stages_per_rank)
    before, reduce, hideable, after = [], [], [], []
    for classes, once in zip(layout.coords, by_coord, strict=True):
        first, middle, more, last = _once(
            once, in_a_row * sum([ahead[c] for c in classes]),
            in_a_row * sum([ahead[c] for c in classes[:-1]]),
            in_a_row * sum([behind[c] for c in classes]), machine, slowdown,
        )  # fmt: skip
        before.append(first)
        reduce.append(middle)
        hideable.append(more)
        after.append(last)
    gather = [m.gather_seconds + slowdown * m.overhead_seconds for m in by_stage]
    num_bytes = setting.shape.tokens // setting.cp * setting.hidden_size * setting.bytes_per_element
    stride, split = setting.tp * setting.cp * setting.dp, setting.sequence_parallel
    sends = _sends(layout, num_bytes, setting.tp, stride, split, machine)
    return ActionCosts(layout, forward, backward, sends, before, reduce, hideable, after, gather)


def _exposed(
    own: PassSeconds, moves: StageTransfers, backward: bool, machine: Machine, slowdown: float
) -> tuple[SecondsByPart, float]:
    """A pass with the transfers that computes do not hide, and the compute seconds still free."""
    software, curves = machine.software, machine.curves
    compute = own.compute + slowdown * (curves.overhead_per_action + moves.overhead_seconds)
    data, offload, free = moves.gather_seconds, moves.fetch_seconds, own.free
    hideable = data if software.overlaps_gather else 0.0
    if backward:
        compute += moves.accumulate_seconds
        data += moves.reduce_seconds
        offload += moves.store_seconds
        if software.overlaps_reduction:
            hideable += moves.reduce_seconds
    if hideable:
        hidden = min(free, curves.overlap * hideable)
        data, free = data - hidden, free - hidden
    if offload and software.overlaps_offload:
        hidden = min(free, curves.overlap * offload)
        offload, free = offload - hidden, free - hidden
    return SecondsByPart(compute, own.tensor, data, offload), free


def _once(
    once: OncePerStep, ahead: float, but_last: float, behind: float, machine: Machine,
    slowdown: float,
) -> tuple[SecondsByPart, SecondsByPart, float, SecondsByPart]:  # fmt: skip
    """Seconds of a coordinate's work once a step: before, after its last backward, and after all.

    The third value is what a wait hides of the reduction. `ahead`, `but_last`, `behind`: free
    compute seconds of the first forwards, of those without the last stage, and of the last
    backwards. A GATHER goes a window ahead, except where a device is the program's own cores. The
    search needs that ZeRO-3 is not faster than ZeRO-1 with its one message.
    """
    software, curves = machine.software, machine.curves
    reduce, first, last = once.reduce_seconds, once.gather_before_seconds, once.gather_after_seconds
    hideable = 0.0
    if software.overlaps_reduction:
        hideable = curves.overlap * reduce - (hidden := min(behind, curves.overlap * reduce))
        reduce -= hidden
    if software.overlaps_gather:  # what comes first is waited for, the rest comes behind it
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
    """Return the seconds to send `num_bytes`, before any cut, between all stages.

    `stride`: devices of a pipeline coordinate. `split`: whether sequence parallelism cuts them.
    """
    hardware, curves = machine.hardware, machine.curves
    devices, gather = stride * layout.pp, 0.0
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
            seconds.append(seen * message + gather)  # it comes in the receiver's program
    return SendSeconds(tuple(seconds), tuple(accumulate(seconds, initial=0.0)))
