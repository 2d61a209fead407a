"""Lower bound on the first pipeline rank's memory: a cheap test that rules out most settings.

The first rank has the most microbatches in flight. The bound is never above what
plan/memory/peak.py finds for that rank; a test compares them.
"""

from functools import lru_cache
from typing import NamedTuple

from parallel3d.config.hardware import Hardware
from parallel3d.plan.layers.placement import LayerKinds, cost_of, model_of, stages_of, stages_on
from parallel3d.plan.memory.peak import is_cpu, margin
from parallel3d.plan.memory.states import sizes, states
from parallel3d.plan.search.candidates import Order
from parallel3d.plan.setting import Setting
from parallel3d.schedule.schedules import load


class HeldBytes(NamedTuple):
    """Bytes that the first rank holds whatever its microbatches.

    `device`: on the device; `gradients`: on the device besides, where forwards and backwards
    alternate; `host`: of its share of the host.
    """

    device: int
    gradients: int
    host: int


class InFlightBytes(NamedTuple):
    """Bytes of the first rank's microbatches in flight, at most.

    `alternates`: whether a forward follows a backward while that many are in flight.
    """

    device: int
    alternates: bool


def total(held_bytes: HeldBytes, in_flight: InFlightBytes, hardware: Hardware) -> int:
    """Lower bound on the device bytes of the first rank."""
    tensors = (
        held_bytes.device + in_flight.device + (held_bytes.gradients if in_flight.alternates else 0)
    )
    return tensors + margin(tensors, hardware)


def held_on_first(setting: Setting, hardware: Hardware) -> HeldBytes:
    """Bytes of the first rank's weights, optimizer states, buffers and gradients."""
    model, num_stages = model_of(setting.layers), setting.pp * setting.stages_per_rank
    cuts = stages_of(model, num_stages, setting.shape.seq)
    home = stages_on(setting.schedule, setting.pp, setting.stages_per_rank)[0]
    size = sizes(
        model,
        tuple(cuts[s] for s in home),
        setting.tp,
        setting.buffers.stage3_param_persistence_threshold,
    )
    held = states(setting, size, is_cpu(hardware))
    shard = held.shard if held.standing else 0
    gradients = held.whole if held.whole > 0 else held.shard - shard
    device = held.weights + held.optimizer + held.buffers + shard
    return HeldBytes(device, gradients, held.host)


def saved_of_kinds(setting: Setting, hardware: Hardware) -> tuple[int, ...]:
    """For each kind of layer, the bytes that one microbatch leaves in flight in one layer."""
    model, shape, software = model_of(setting.layers), setting.shape, setting.software
    split, mode = setting.sequence_parallel, setting.recompute
    classic, fused = software.attention == "classic", not is_cpu(hardware)
    return tuple(
        cost_of(model, kind, shape, setting.tp, split, mode).saved.bytes(
            setting.bytes_per_element, classic, fused
        )
        for kind in range(len(model.kinds))
    )


def in_flight_on_first(
    base: Setting, saved: tuple[int, ...], pp: int, num_microbatches: int, order: Order
) -> InFlightBytes:
    """Bytes that the first rank's microbatches in flight hold, with `saved` bytes per kind.

    Where a rank has several stages, each microbatch is counted in the stage that saves least.
    """
    per_rank, name = order
    model = model_of(base.layers)
    least = min(
        sum(count * saved[kind] for kind, count in counts)
        for counts in _first(model, base, pp, per_rank, name)
    )
    most = _most(name, pp, num_microbatches, per_rank)
    return InFlightBytes(least * most, most < num_microbatches * per_rank)


@lru_cache(maxsize=16384)
def _most(name: str, pp: int, num_microbatches: int, stages_per_rank: int) -> int:
    return load(name).peak_in_flight(pp, num_microbatches, stages_per_rank)[0]


_firsts: dict[tuple[int, int, int, int, str], tuple[tuple[tuple[int, int], ...], ...]] = {}


def _first(
    model: LayerKinds, base: Setting, pp: int, per_rank: int, name: str
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """For each stage of the first rank, the (kind, number) of its layers."""
    key = id(model), base.shape.seq, pp, per_rank, name
    if key not in _firsts:
        cuts = stages_of(model, pp * per_rank, base.shape.seq)
        found = []
        for stage in stages_on(name, pp, per_rank)[0]:
            kinds = [model.kind_of[i] for i in cuts[stage]]
            found.append(tuple((kind, kinds.count(kind)) for kind in set(kinds)))
        _firsts[key] = tuple(found)
    return _firsts[key]
