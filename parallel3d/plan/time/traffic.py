"""Bytes that ZeRO's collectives move in a step, inside a copy of the shards and over the copies."""

from typing import NamedTuple

from parallel3d.plan.layers.placement import stage_classes_of
from parallel3d.plan.layers.weight_counts import together, weights_of
from parallel3d.plan.setting import Setting
from parallel3d.plan.time.sharding import Sharding


class ShardTraffic(NamedTuple):
    """Bytes of a rank in a step: those that gathers return, and those that reductions are given.

    For P elements of `element` bytes and gradients of b, on s ranks: ZeRO-1 and 2 gather P·element
    once, ZeRO-3 so many times as its weights are gathered; P·b are reduced, and b·P/s (for
    experts, which s/ep ranks shard, ep times as much) are summed over the copies.
    """

    gathered: float
    reduced: float
    summed: float


def shard_traffic(setting: Setting) -> ShardTraffic:
    """Return the bytes of a rank of the pipeline coordinate that moves most."""
    layout = stage_classes_of(setting)
    sharding = Sharding.of(setting)
    work = setting.workload
    state = setting.state
    microbatches = setting.num_microbatches
    reductions = 1 if state.reduces_once else microbatches
    sums = 1 if state.zero_stage == 3 else reductions
    small = sharding.persistence if state.zero_stage == 3 else 0
    moves = setting.shards > 1
    moves_experts = setting.shards > sharding.ep
    times: tuple[int, ...] = (2 * microbatches,) * setting.order.stages_per_rank
    if state.zero_stage < 3:
        times = (1,) * setting.order.stages_per_rank
    elif sharding.gathers:
        times = sharding.gathers
    most = ShardTraffic(0.0, 0.0, 0.0)
    for classes in layout.coords:
        gathered = elements = shard = 0.0
        for often, stage_class in zip(times, classes, strict=True):
            held = layout.stages[stage_class]
            sizes = together(weights_of(layout.model, held, setting.mesh.tp, small, sharding.ep))
            still = 0 if moves_experts else sizes.experts  # one rank of a copy has all of them
            if moves:
                gathered += often * (sizes.gathered - still) * work.bytes_per_element
                elements += sizes.params - still
            shard += (sizes.params + (sharding.ep - 1) * sizes.experts) / setting.shards
        size = work.software.reduction_bytes
        summed = sums * shard * size if state.copies > 1 else 0.0
        most = max(most, ShardTraffic(gathered, reductions * elements * size, summed))
    return most
