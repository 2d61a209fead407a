"""Seconds of the forward and backward passes of layers and stages, without transfers."""

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from parallel3d.model.recompute import FULL, NONE, Recompute
from parallel3d.model.spec import Collective, LayerCost, Work
from parallel3d.plan.layers.placement import LayerKinds, StageClasses, cost_of
from parallel3d.plan.setting import RankShare, Setting
from parallel3d.plan.time.network import (
    Kind,
    all_to_all_seconds,
    collective_seconds,
    group_of,
    send_seconds,
)
from parallel3d.plan.time.operators import Machine, traffic_seconds, work_seconds
from parallel3d.plan.time.sharding import to_host_seconds

# Host time of a layer with full recomputation over that without, beyond the repeated forward.
# Eager PyTorch takes 2.07 and 0.75 ms for a GPT block of toy size on a CPU; launching 140 and 105
# kernels on a GPU adds 5 us each: 2.8 and 1.3 ms.
CHECKPOINT = 1.6


class PassSeconds(NamedTuple):
    """Seconds of a microbatch's pass: operators, and exposed tensor-parallel collectives.

    - `free`: seconds of operators that hide no collective or transfer yet.
    """

    compute: float = 0.0
    tensor: float = 0.0
    free: float = 0.0

    def plus(self, other: "PassSeconds", times: float) -> "PassSeconds":
        """Return the sum of these seconds and `times` times the `other` ones."""
        return PassSeconds(*(a + times * b for a, b in zip(self, other, strict=True)))


_KEYS: tuple[Kind, ...] = "all_gather", "reduce_scatter"

# [kinds of layers or classes of stages]: forward, and backward with recomputation.
Passes = tuple[tuple[PassSeconds, PassSeconds], ...]


def stage_passes(layout: StageClasses, setting: Setting, machine: Machine) -> Passes:
    """Return the passes of each class of stages."""

    own = RankShare.of(setting)

    def layers(recompute: Recompute) -> Passes:
        share = setting.recomputed_share
        return _layers(layout.model, own, recompute, share, setting.mesh.ranks, machine)

    recompute = setting.flow.recompute
    if recompute.is_uniform:
        return _sums(layout, layers(recompute))
    return _sums(layout, layers(FULL), recompute, layers(NONE))


@lru_cache(maxsize=65536)
def _sums(
    layout: StageClasses, layers: Passes, recompute: Recompute = NONE, others: Passes = ()
) -> Passes:
    """Return the sums over the layers of each class; `others` are those after a stage's first."""
    both = []
    for own, counts in enumerate(layout.stages):
        there = back = PassSeconds()
        share = layout.share_in_full(recompute, own) if others else 1.0
        for kind, count in enumerate(counts):
            for passes, part in ((layers, share), (others, 1 - share)):
                if count and part:
                    forward, backward = passes[kind]
                    there = there.plus(forward, count * part)
                    back = back.plus(backward, count * part)
        both.append((there, back))
    return tuple(both)


@lru_cache(maxsize=65536)
def _layers(
    model: LayerKinds,
    own: RankShare,
    recompute: Recompute,
    recomputed_share: float,
    devices: int,
    machine: Machine,
) -> Passes:
    """Return the passes of each kind of layer."""
    crowd = machine.hardware.slowdown("overhead", devices)
    waits = 0.0  # on cores the fitted overhead has them
    if machine.software.waits_for_counts and machine.hardware.cores is None:
        waits = machine.curves.overhead_per_experts * crowd
    on_host = own.workload.offload_activations and machine.hardware.cores is None
    both = []
    for kind in range(len(model.kinds)):
        cost = cost_of(model, kind, own.shape, own.tp, own.sequence_parallel, recompute)
        if own.ep > 1:
            cost = replace(
                cost,
                forward=_of_owner(cost.forward, own.ep, own.workload.ep_imbalance),
                recomputed=_of_owner(cost.recomputed, own.ep, own.workload.ep_imbalance),
            )
        forward = _priced(cost.forward, cost.forward.collectives, own, devices, machine, _KEYS[:1])
        # A backward gathers keys and values once, whether or not it recomputes the attention.
        again = _priced(cost.recomputed, cost.recomputed.collectives, own, devices, machine, ())
        backward = _priced(
            cost.forward, cost.backward_collectives, own, devices, machine, _KEYS, backward=True
        )
        exchange = _exchange_seconds(model, kind, own, devices, machine)
        if exchange:
            forward = forward._replace(tensor=forward.tensor + exchange)
            backward = backward._replace(tensor=backward.tensor + exchange)
            if again.compute:
                again = again._replace(tensor=again.tensor + exchange)
        share = recomputed_share if again.compute else 0.0
        host = _host_seconds(cost, share, machine)
        there = _with_program(forward, host[0] * crowd, machine)
        back = _with_program(backward.plus(again, recomputed_share), host[1] * crowd, machine)
        if exchange and waits:
            there = there._replace(compute=there.compute + waits)
            back = back._replace(compute=back.compute + (2 + share) * waits)
        if on_host and kind not in model.ends:  # the copies may take longer than the computes
            copies = to_host_seconds(cost.saved.bytes(own.bytes_per_element), machine)
            there = there._replace(compute=max(there.compute, copies))
            back = back._replace(compute=max(back.compute, copies))
        both.append((there, back))
    return tuple(both)


def _exchange_seconds(
    model: LayerKinds, kind: int, own: RankShare, devices: int, machine: Machine
) -> float:
    """Return the seconds in which rows go to the owners of the experts and back; 0 without ep.

    The owners sort what comes by expert, and back: each row is read and written twice.
    """
    rows = model.kinds[kind].rows_per_token * own.shape.tokens
    if own.ep == 1 or not rows:
        return 0.0
    width = model.kinds[kind].config.hidden_size
    elements = rows * width * own.workload.ep_imbalance
    hardware = machine.hardware
    curves = machine.curves
    over = group_of(own.ep, own.tp * own.cp, devices, hardware)
    way = all_to_all_seconds(elements * own.bytes_per_element, over, hardware, curves)
    sorting = traffic_seconds(round(4 * elements), own.workload.precision, hardware, curves)
    return 2 * way + sorting * hardware.slowdown("traffic", devices)


def _of_owner(work: Work, ep: int, imbalance: float) -> Work:
    """Return the work of the rank with the most rows for its experts, whose products are groups."""
    products = []
    for product in work.matmuls:
        if product.batch > 1:
            groups = max(1, product.batch // ep)
            rows = product.m * product.batch * imbalance
            product = product._replace(m=round(rows / groups), batch=groups)
        products.append(product)
    return replace(work, matmuls=tuple(products))


def _host_seconds(cost: LayerCost, share: float, machine: Machine) -> tuple[float, float]:
    """Return the host's seconds of a forward and of a backward; `share` of it is recomputed."""
    layer = machine.curves.overhead_per_layer
    if machine.hardware.cores is not None:  # the overhead was fitted on this machine
        return layer, (2 + share) * layer
    launch = machine.curves.overhead_per_launch
    again = (*cost.backward_collectives, *cost.recomputed.collectives)
    wrapped = CHECKPOINT if share == 1 else 1.0
    return (
        wrapped * layer + launch * len(cost.forward.collectives),
        wrapped * (2 + share) * layer + launch * len(again),
    )


def _with_program(own: PassSeconds, program: float, machine: Machine) -> PassSeconds:
    """Return a pass with its host time, which overlaps with a device but not with cores."""
    waits = program
    if machine.hardware.cores is None:
        busy = own.compute + own.tensor
        power = machine.curves.host_overlap
        waits = (program**power + busy**power) ** (1 / power) - busy
    return PassSeconds(own.compute + waits, own.tensor, own.free + waits)


def _priced(
    work: Work,
    collectives: tuple[Collective, ...],
    own: RankShare,
    devices: int,
    machine: Machine,
    over_keys: tuple[Kind, ...],
    backward: bool = False,
) -> PassSeconds:
    """Return the seconds of one layer's computes and collectives; `over_keys` are those of cp."""
    hardware = machine.hardware
    curves = machine.curves
    software = machine.software
    precision = own.workload.precision
    seconds = work_seconds(work, precision, hardware, curves, software, devices, backward)
    group = group_of(own.tp, 1, devices, hardware)
    size = own.bytes_per_element
    tensor = sum(
        collective_seconds(c.kind, c.elements * size, *group, hardware, curves) for c in collectives
    )
    hidden = 0.0
    if software.overlaps_tensor and (backward or not software.exposes_forward):
        hidden = min(seconds.matmuls, curves.tensor_overlap * tensor)
    attention = seconds.attention
    cp = own.cp
    if work.attention and cp > 1:
        whole = work.attention._replace(seq=cp * work.attention.seq)
        # Queries attend to the keys of all cp ranks, as far as their window reaches.
        near, far = (a.keys * (1 - a.hidden) for a in (work.attention, whole))
        attention *= cp if whole.window is None else far / near
        # Keys and values, and in a backward their gradients.
        block = work.attention.key_elements * size
        over = group_of(cp, own.tp, devices, hardware)
        if software.passes_keys:
            ring = send_seconds(block, over.nodes > 1, hardware, curves) * (cp - 1)
            ring *= 2 if backward else 1
            tensor += ring
            hidden += min(attention, curves.overlap * ring)
        for kind in () if software.passes_keys else over_keys:
            tensor += collective_seconds(kind, cp * block, *over, hardware, curves)
    compute = seconds.matmuls + attention + seconds.traffic
    return PassSeconds(compute, tensor - hidden, compute - hidden)
