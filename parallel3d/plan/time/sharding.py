"""Seconds of ZeRO's collectives, of offload, and of the optimizer's update.

Volumes follow arXiv:1910.02054, section 7: an all-reduce of gradients without ZeRO; a
reduce-scatter and an all-gather of new weights at ZeRO-1 and 2; all-gathers for each pass, or once
or twice per step, at ZeRO-3.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from parallel3d.base.mesh_sizes import MeshSizes
from parallel3d.config.hardware import Host
from parallel3d.model import optimizers
from parallel3d.model.matrices import imbalance, matrices_of, newton_schulz_cost
from parallel3d.model.spec import MASTER_BYTES
from parallel3d.plan.layers.placement import Counts, LayerKinds, StageClasses, stage_classes_of
from parallel3d.plan.layers.weight_counts import (
    WeightSizes,
    partial,
    tied_elsewhere,
    together,
    weights_of,
)
from parallel3d.plan.layers.windows import windows_of
from parallel3d.plan.setting import Device, Setting, Workload, ZeroState
from parallel3d.plan.time.network import Kind, RankGroup, collective_seconds, group_of
from parallel3d.plan.time.operators import Machine, bandwidth_of, matmul_flops, refuse

_NO_OFFLOAD = "plan without offload"
_FP32_SHARE = 1 / 16
"""FLOP/s of fp32 over those of half precision, where only the latter are known: those of an A100's
data sheet, 19.5 of 312 TFLOP/s (H100 SXM: 67 of 989)."""


class Sharding(NamedTuple):
    """The part of a setting that determines what its data-parallel ranks move and update.

    - `persistence`: elements of the largest parameter that ZeRO-3 keeps whole.
    - `gathers` [stages of a coordinate]: gathers per step; () if every pass gathers.
    """

    workload: Workload
    mesh: MeshSizes
    ep: int
    sequence_parallel: bool
    state: ZeroState
    shards: int
    persistence: int
    gathers: tuple[int, ...]

    @classmethod
    def of(cls, setting: Setting) -> "Sharding":
        """Return the sharding of a setting."""
        flow = setting.flow
        return cls(
            setting.workload,
            flow.mesh,
            flow.ep,
            flow.sequence_parallel,
            setting.state,
            setting.shards,
            setting.persistence,
            _gathers(setting) if setting.state.holds_weights else (),
        )


def _gathers(setting: Setting) -> tuple[int, ...]:
    weights = setting.state.weights
    stages_per_rank = setting.order.stages_per_rank
    if weights == "per_step" or stages_per_rank == 1:
        return (1,) * stages_per_rank
    pp = setting.mesh.pp
    times = [windows_of(setting.actions, weights, coord).times for coord in range(pp)]
    return tuple(map(max, zip(*times, strict=True)))


class StageTransfers(NamedTuple):
    """Seconds of a stage's transfers per microbatch, or of one GATHER, without overlap.

    - `gather`: the stage's weights, in each forward and backward.
    - `fetch`: their shards, from the host.
    - `overhead`: host time for each parameter, or for each layer of a GATHER.
    - `reduce`: gradients, in a backward. `store`: their shards, to the host.
    - `accumulate`: adding gradients to those of other microbatches, which is not a transfer.
    """

    gather_seconds: float
    fetch_seconds: float
    overhead_seconds: float
    reduce_seconds: float
    store_seconds: float
    accumulate_seconds: float


class OncePerStep(NamedTuple):
    """Seconds of a coordinate's transfers and updates that happen once per step.

    - `gather_before`, `fetch_before`: all GATHERs of the step, if weights stay gathered, and the
      offloaded shards for them.
    - `gather_later`: the part of them that is issued one window ahead.
    - `gather_least`: all weights in one message, as at ZeRO-1.
    - `gather_after`: the new weights.
    - `program_before`: host time of all GATHERs.
    - `reduce`: gradients.
    - `tensor`: sums of partial gradients over the tp ranks.
    - `tied`: the sum of a tied weight's two gradients.
    - `optimizer`: the update. `offload`: what it moves to and from the host.
    - `flatten`: the part of `optimizer` that copies gradients to one buffer.
    """

    gather_before_seconds: float
    fetch_before_seconds: float
    reduce_seconds: float
    tensor_seconds: float
    tied_seconds: float
    gather_after_seconds: float
    optimizer_seconds: float
    offload_seconds: float
    program_before_seconds: float
    gather_later_seconds: float
    gather_least_seconds: float
    flatten_seconds: float


Transfers = tuple[tuple[StageTransfers, ...], tuple[OncePerStep, ...]]


@lru_cache(maxsize=65536)
def transfers_of(layout: StageClasses, sharding: Sharding, machine: Machine) -> Transfers:
    """Return transfers per microbatch by class of stages, and per step by class of coordinates."""
    stages = tuple(_stage(layout.model, held, sharding, machine) for held in layout.stages)
    return stages, tuple(
        _coord(layout, classes, [stages[c] for c in classes], sharding, machine)
        for classes in layout.coords
    )


class MatrixWork(NamedTuple):
    """A coordinate's exchange of whole matrices and the work on them, in a step.

    - `sent_bytes`: by all its ranks, to homes and back. `imbalance`: the busiest home's work
      relative to the mean.
    """

    sent_bytes: float = 0.0
    exchange_seconds: float = 0.0
    product_seconds: float = 0.0
    imbalance: float = 1.0

    @property
    def seconds(self) -> float:
        """Seconds that the step takes longer."""
        return self.exchange_seconds + self.product_seconds


def matrix_work(
    model: LayerKinds, held: Counts, sharding: Sharding, machine: Machine
) -> MatrixWork:
    """Return what an optimizer of whole matrices adds; nothing for one that works by elements."""
    work = sharding.workload.newton_schulz
    hardware = machine.hardware
    curves = machine.curves
    mesh = sharding.mesh
    if work is None:
        return MatrixWork()
    shapes: list[tuple[int, int]] = []
    for kind, count in enumerate(held):
        shapes += matrices_of(model.kinds[kind].params, work.per_head) * count
    costs = tuple(newton_schulz_cost(*shape) for shape in shapes)
    homes = mesh.dp * mesh.tp // sharding.state.copies
    uneven = imbalance(costs, homes)
    total_flops = sum(work.flops(cost, min(s)) for cost, s in zip(costs, shapes, strict=True))
    flops = total_flops / homes * uneven
    elements = sum(rows * columns for rows, columns in shapes)
    # Each rank's shard goes to the homes, and comes back; without ZeRO to all replicas, of which
    # experts have fewer.
    returned = elements
    if not sharding.state.zero_stage:
        experts = 0
        for kind, count in enumerate(held):
            for spec in model.kinds[kind].params:
                if spec.role == "hidden" and "experts" in spec.cut_over:
                    experts += count * spec.numel
        returned = (elements - experts) * mesh.dp + experts * mesh.dp // sharding.ep
    group = group_of(homes, 1, mesh.ranks, hardware)
    exchange = sum(
        collective_seconds("all_gather", MASTER_BYTES * n / homes, *group, hardware, curves)
        for n in (elements, returned)
    )
    has_rate = work.precision in {*hardware.matmul_flops, *hardware.peak_flops}
    precision = work.precision if has_rate else sharding.workload.precision
    rate = matmul_flops(hardware, precision, curves)
    if work.precision == "fp32" and not has_rate:
        rate *= _FP32_SHARE
    products = flops / rate
    sent = MASTER_BYTES * (elements + returned) if homes > 1 else 0
    return MatrixWork(sent, exchange, products, uneven)


def slowest_matrix_work(setting: Setting, machine: Machine) -> MatrixWork:
    """Return the matrix work of the pipeline coordinate on which it takes longest."""
    layout = stage_classes_of(setting)
    works = []
    for classes in layout.coords:
        of_stages = [layout.stages[stage_class] for stage_class in classes]
        held = tuple(map(sum, zip(*of_stages, strict=True)))
        works.append(matrix_work(layout.model, held, Sharding.of(setting), machine))
    return max(works, key=lambda work: work.seconds)


class _HeldWeights:
    """The weights of some layers on one tensor-parallel rank, and the seconds to move them."""

    def __init__(
        self, model: LayerKinds, held: Counts, sharding: Sharding, machine: Machine
    ) -> None:
        mesh = sharding.mesh
        zero3 = sharding.state.zero_stage == 3
        small = sharding.persistence if zero3 else 0
        self._layers = weights_of(model, held, mesh.tp, small, sharding.ep)
        self.total = together(self._layers)
        self._sharding = sharding
        self._machine = machine
        self._one_ring = zero3 and machine.software.one_ring
        shards = sharding.shards
        tp = mesh.tp
        copies = mesh.dp * mesh.cp // shards
        devices = mesh.ranks
        self._shards = group_of(shards, tp, devices, machine.hardware)
        self._across = group_of(copies, tp * shards, devices, machine.hardware)
        ep = sharding.ep  # cp ranks, which are nearer, are replicas of the same experts, too
        self._experts = group_of(shards // ep, tp * ep, devices, machine.hardware)

    def collective(
        self, kind: Kind, num_bytes: float, group: RankGroup | None = None, one_ring: bool = False
    ) -> float:
        """Return the seconds of a collective, by default of the ranks that share the state."""
        hardware = self._machine.hardware
        curves = self._machine.curves
        ranks = group or self._shards
        return collective_seconds(kind, num_bytes, *ranks, hardware, curves, one_ring=one_ring)

    def gather(self, size: int) -> float:
        """Return the seconds to gather the weights layer by layer, `size` bytes per element."""
        return sum(count * self._both("all_gather", one, size) for count, one in self._layers)

    def _both(self, kind: Kind, sizes: WeightSizes, size: float) -> float:
        """Return the seconds of a collective of what is sharded: experts have other ranks."""
        others = (sizes.gathered - sizes.experts) * size
        seconds = self.collective(kind, others, one_ring=self._one_ring)
        if sizes.experts:
            experts = sizes.experts * size
            seconds += self.collective(kind, experts, self._experts, one_ring=self._one_ring)
        return seconds

    @property
    def num_gathers(self) -> int:
        """Number of collectives that gather the weights: one per layer and group of ranks."""
        num = 0
        for count, one in self._layers:
            if one.gathered:
                num += 2 * count if one.experts else count
        return num

    def reduce(self, over_copies: bool = True) -> float:
        """Return the seconds to reduce the gradients, bucket by bucket.

        If the ranks that share the state are not all replicas, they reduce first, and then each
        reduces its shard with its counterparts, if it does so at once (`over_copies`).
        """
        kind: Kind = "reduce_scatter" if self._sharding.state.zero_stage else "all_reduce"
        num_buckets = max(1, round(self.total.params / self._machine.software.bucket))
        size = self._machine.software.reduction_bytes / num_buckets
        seconds = self._both(kind, self.total._replace(small=0), size)
        if over_copies:
            seconds += self.sum_over_copies(size)
        return num_buckets * seconds

    def sum_over_copies(self, size: float) -> float:
        """Return the seconds to sum this rank's shards over their copies, `size` bytes an element.

        An expert's shard is one of fewer ranks.
        """
        own = self.total.params + (self._sharding.ep - 1) * self.total.experts
        moved = own * size / self._sharding.shards
        return self.collective("all_reduce", moved, self._across, self._one_ring)


def _stage(model: LayerKinds, held: Counts, sharding: Sharding, machine: Machine) -> StageTransfers:
    software = machine.software
    curves = machine.curves
    weights = _HeldWeights(model, held, sharding, machine)
    sizes = weights.total
    shards = sharding.shards
    state = sharding.state
    size = sharding.workload.bytes_per_element
    gather = fetch = overhead = reduce = store = 0.0
    num_accumulated: float = sizes.params
    if state.zero_stage == 3:
        gather = weights.gather(size)
        fetch = fetch_seconds(sizes.params / shards * size, state.offload_param, machine)
        handled = sizes.num_params - (0 if software.handles_small else sizes.num_small)
        apart = curves.overhead_per_message if shards > 1 else 0.0
        overhead = weights.num_gathers if sharding.gathers else handled
        overhead *= curves.overhead_per_gather + apart
    if not state.reduces_once:
        reduce = weights.reduce(over_copies=not state.sums_copies_late)
        if state.offload_optimizer != "none" and state.zero_stage >= 1:
            store = to_host_seconds(sizes.params / shards * software.gradient_bytes, machine)
        if state.zero_stage >= 2:
            num_accumulated /= shards
    added = _touch(2 * num_accumulated * software.gradient_bytes, sharding, machine, curves.traffic)
    if software.fuses_accumulation:
        added *= curves.fused
    return StageTransfers(gather, fetch, overhead, reduce, store, added)


def _coord(
    layout: StageClasses,
    classes: tuple[int, ...],
    moves: Sequence[StageTransfers],
    sharding: Sharding,
    machine: Machine,
) -> OncePerStep:
    model = layout.model
    software = machine.software
    curves = machine.curves
    hardware = machine.hardware
    held = tuple(sum(counts) for counts in zip(*(layout.stages[c] for c in classes), strict=True))
    weights = _HeldWeights(model, held, sharding, machine)
    sizes = weights.total
    state = sharding.state
    tp = sharding.mesh.tp
    num_devices = sharding.mesh.ranks
    work = sharding.workload
    size = work.bytes_per_element
    held_alone = sizes.params + (sharding.ep - 1) * sizes.experts  # if ep ranks had all experts
    own = held_alone / sharding.shards if state.zero_stage else sizes.params
    before = fetch = program = later = least = reduce = after = tensor = tied = 0.0
    for times, move in zip(sharding.gathers, moves, strict=False):
        later += times * move.gather_seconds - (0.0 if before else move.gather_seconds)
        before += times * move.gather_seconds
        program += times * move.overhead_seconds
        fetch += times * move.fetch_seconds
    if sharding.gathers:  # unsharded parameters are gathered once more after the update, together
        least = weights.collective("all_gather", sizes.params * size)
        after = weights.collective("all_gather", sizes.small * size)
    if state.reduces_once:
        reduce = weights.reduce()
    elif state.sums_copies_late:
        reduce = weights.sum_over_copies(software.reduction_bytes)
    if state.zero_stage in (1, 2):
        after = weights.collective("all_gather", sizes.params * size)
    split = sharding.sequence_parallel
    partials = sum(count * partial(model, kind, tp, split) for kind, count in enumerate(held))
    if partials:
        group = group_of(tp, 1, num_devices, hardware)
        tensor = weights.collective("all_reduce", partials * software.gradient_bytes, group)
    if (elements := tied_elsewhere(model, held, tp)) > 0:
        in_one_node = hardware.sharing(num_devices) == num_devices
        pair = RankGroup(2, 2 if in_one_node else 1)
        tied = weights.collective("all_reduce", elements * software.gradient_bytes, pair)
    optimizer = sizes.num_params * curves.overhead_per_param
    optimizer *= hardware.slowdown("overhead", num_devices)
    offload = 0.0
    flatten = 0.0
    if state.reduces_once:  # all gradients are read, and written to one buffer
        flat = 2 * sizes.params * software.gradient_bytes
        flatten = _touch(flat, sharding, machine, curves.optimizer)
        optimizer += flatten
    if state.offload_optimizer == "none":
        if hardware.adam_params:
            update = own * _relative_to_adam(work) / hardware.adam_params.value
            update *= hardware.slowdown("traffic", num_devices)
        else:
            # Besides the state, the gradient is read twice (for its norm) and the weight written.
            touched = own * (work.step_bytes + 2 * software.gradient_bytes + size)
            update = _touch(touched, sharding, machine, curves.optimizer)
            flops = own * optimizers.load(work.optimizer.type).STEP_FLOPS
            update = max(update, flops / matmul_flops(hardware, work.precision, curves))
        optimizer += update
    else:
        gradients = own * software.gradient_bytes if state.reduces_once else 0.0
        update, offload = update_seconds(
            own, state.offload_optimizer, gradients + own * size, machine, work
        )
        optimizer += update * hardware.slowdown("traffic", num_devices)
    optimizer += matrix_work(model, held, sharding, machine).seconds
    once = before, fetch, reduce, tensor, tied, after, optimizer, offload
    return OncePerStep(*once, program, later, least, flatten)


def _touch(num_bytes: float, sharding: Sharding, machine: Machine, share: float) -> float:
    """Return the seconds to read or write `num_bytes` of device memory."""
    slowdown = machine.hardware.slowdown("traffic", sharding.mesh.ranks)
    return num_bytes / (bandwidth_of(machine.hardware) * share) * slowdown


def _relative_to_adam(work: Workload) -> float:
    """Return an update's time over that of Adam, which calibration measures: both move bytes."""
    return work.step_bytes / optimizers.load("adamw").STEP_BYTES


def update_seconds(
    elements: float, device: Device, moved_bytes: float, machine: Machine, work: Workload
) -> tuple[float, float]:
    """Return the seconds of the host's update of `elements` elements, and of its transfers.

    - `moved_bytes`: of gradients and new weights. On "nvme" the state is read and written, too.
    """
    update = elements * _relative_to_adam(work) / host_of(machine).adam_params.value
    moved = to_host_seconds(moved_bytes, machine)
    if device == "nvme":
        moved += nvme_seconds(elements * work.state_bytes(), machine, writes=True)
    if machine.software.overlaps_offload:
        moved -= min(update, machine.curves.overlap * moved)
    return update, moved


def fetch_seconds(num_bytes: float, device: Device, machine: Machine) -> float:
    """Return the seconds until `num_bytes` of offloaded weights are on the device."""
    if device == "none":
        return 0.0
    disk = nvme_seconds(num_bytes, machine, writes=False) if device == "nvme" else 0.0
    return disk + to_host_seconds(num_bytes, machine)


def to_host_seconds(num_bytes: float, machine: Machine) -> float:
    """Return the seconds to move `num_bytes` between device and host, in either direction."""
    return num_bytes / (host_of(machine).device_bandwidth.value * machine.curves.host)


def nvme_seconds(num_bytes: float, machine: Machine, writes: bool) -> float:
    """Return the seconds to read `num_bytes` from NVMe, and also to write them if `writes`."""
    host = host_of(machine)
    if host.nvme_read is None or host.nvme_write is None:
        refuse(machine.hardware, "host.nvme_read or host.nvme_write", _NO_OFFLOAD)
    seconds = num_bytes / host.nvme_read.value
    seconds += num_bytes / host.nvme_write.value if writes else 0.0
    return seconds / machine.curves.host


def host_of(machine: Machine) -> Host:
    """Return the figures of the device's host; ConfigError if they are unknown."""
    return machine.hardware.host or refuse(machine.hardware, "host", _NO_OFFLOAD)
