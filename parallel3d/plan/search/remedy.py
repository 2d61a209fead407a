"""Check whether a setting fits, and find the smallest change that makes it fit."""

from bisect import bisect_left
from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count

from parallel3d.base.mesh_sizes import MeshSizes
from parallel3d.config.hardware import Hardware
from parallel3d.model.recompute import MODES, strength
from parallel3d.plan.layers.placement import blocks_in_stages
from parallel3d.plan.memory.peak import Memory, exceeds, per_rank
from parallel3d.plan.search import candidates
from parallel3d.plan.search.candidates import Choices, Flow, Order, ZeroState
from parallel3d.plan.search.plans import Plan, Request
from parallel3d.plan.setting import Setting
from parallel3d.plan.time.step import step_time
from parallel3d.schedule.sharding import Weights

MOST_CHANGES = 400  # the most settings tried for a remedy


def room_of(hardware: Hardware) -> tuple[int, int]:
    """Return the bytes of memory of one device, and of its share of the host."""
    host = hardware.host
    return int(hardware.memory_bytes.value), int(host.memory_bytes.value) if host else 0


def fits(memory: Memory, hardware: Hardware) -> bool:
    """Return True if device and host have room for a rank's memory."""
    device, host = room_of(hardware)
    return memory.total <= device and memory.host <= host


def _reason(memory: Memory, hardware: Hardware) -> str:
    """Return what exceeds device or host memory, by how much, and the largest part of it.

    The text is empty if the rank fits.
    """
    device, host = room_of(hardware)
    reasons = []
    if (over := memory.total - device) > 0:
        part = max(memory.parts, key=lambda name: memory.parts[name])
        reasons.append(
            f"device memory: {over:,} bytes over ({gib(memory.total)} of {gib(device)} GiB on "
            f"pp rank {memory.pp_coord}, {gib(memory.parts[part])} of them {part})"
        )
    if (over := memory.host - host) > 0:
        reasons.append(
            f"host memory: {over:,} bytes over ({gib(memory.host)} of {gib(host)} GiB "
            "for each device)"
        )
    return "; ".join(reasons)


def gib(num_bytes: float) -> str:
    """Return a number of bytes as text in GiB: 123, 12.3, 0.123."""
    size = num_bytes / 2**30
    return f"{size:.0f}" if size >= 100 else f"{size:.1f}" if size >= 1 else f"{size:.3f}"


def all_fit(setting: Setting, hardware: Hardware) -> bool:
    """Return True if all ranks fit. The first is looked at first: it most often decides."""
    room = room_of(hardware)
    return not any(exceeds(setting, coord, hardware, room) for coord in range(setting.pp))


def with_fewest_in_full(setting: Setting, hardware: Hardware, least: int = 0) -> Setting:
    """Return a setting that fits with as few layers as fit, from `least` on, recomputed in full.

    If none need be, its recomputation is "none".
    """
    ways = ["none" if n == 0 else f"full:{n}" for n in range(least, max(blocks_in_stages(setting)))]

    enough = bisect_left(ways, True, key=lambda way: all_fit(setting.but(recompute=way), hardware))
    return setting.but(recompute=ways[enough]) if enough < len(ways) else setting


def worst(setting: Setting, hardware: Hardware) -> Memory:
    """Return the memory of the decisive rank: the fullest, or one that exceeds host memory."""
    ranks, (device, host) = per_rank(setting, hardware), room_of(hardware)
    memory = max(ranks, key=lambda m: m.total)
    if memory.host and memory.total <= device:
        return max(ranks, key=lambda m: (m.host > host, m.total))
    return memory


def evaluate(request: Request, setting: Setting) -> Plan:
    """Return the plan of one setting, with a remedy if it does not fit."""
    hardware = request.hardware
    memory = worst(setting, hardware)
    time, remedy = step_time(setting, hardware), ""
    if reason := _reason(memory, hardware):
        change = smallest_change(request, candidates.choices_of(setting))
        remedy = change[0] if change else "no change nearby makes it fit; use more devices"
    return Plan(request, setting, memory, time, reason, remedy)


def smallest_change(request: Request, start: Choices) -> tuple[str, Choices] | None:
    """Return the cheapest change that makes a setting fit, in words, and the changed choices.

    A change of several choices costs their sum (`_nearby`). Returns None if none of MOST_CHANGES
    fits.
    """
    meshes, serial = frozenset(candidates.meshes(request)), count()
    heap = [(0, next(serial), start)]
    seen, tried = {start}, 0
    while heap and tried < MOST_CHANGES:
        cost, _, choices = heappop(heap)
        if choices != start:
            tried += 1
            setting = candidates.setting_of(request, *choices)
            if all_fit(setting, request.hardware):
                if choices[0].recompute == "full" != start[0].recompute:
                    choices = candidates.choices_of(with_fewest_in_full(setting, request.hardware))
                pairs = zip(_words(*start), _words(*choices), strict=True)
                return " + ".join(new for old, new in pairs if new != old), choices
        for extra, changed in _nearby(request, *choices):
            if changed not in seen and _is_allowed(request, meshes, *changed):
                seen.add(changed)
                heappush(heap, (cost + extra, next(serial), changed))
    return None


def _is_allowed(
    request: Request, meshes: frozenset[MeshSizes], flow: Flow, order: Order, state: ZeroState
) -> bool:
    flows = candidates.flows(request, flow.mesh)
    return (
        flow.mesh in meshes
        # The planner may choose other recomputation than the modes that it starts from.
        and (flow in flows or flow._replace(recompute="none") in flows)
        and order in candidates.orders(request, flow)
        and candidates.has_state(request, flow.mesh, state)
        and candidates.go_together(order, state)
    )


def _nearby(
    request: Request, flow: Flow, order: Order, state: ZeroState
) -> Iterator[tuple[int, Choices]]:
    """Yield the choices one change away, each with its cost, from 1 (free) to 10 (slow).

    - 1: sequence parallelism, another schedule, shorter gathers.
    - 2: selective recomputation, the next ZeRO stage, a smaller micro batch.
    - 3: recomputation of the MLP.
    - 4: full recomputation, twice the tp or the cp.
    - 5: twice the pp.
    - 6: the optimizer to the host; 9 to NVMe.
    - 7: parameters to the host; 10 to NVMe.
    """
    mesh = flow.mesh
    if mesh.tp > 1 and not flow.sequence_parallel:
        yield 1, (flow._replace(sequence_parallel=True), order, state)
    for other in candidates.orders(request, flow):
        if other.stages_per_rank <= order.stages_per_rank and other != order:
            yield 1, (flow, other, state)
    for less in candidates.shorter_gathers(request, order, state)[:1]:
        yield 1, (flow, order, less)
    for recompute in MODES[strength(flow.recompute) + 1 :]:
        yield 1 + strength(recompute), (flow._replace(recompute=recompute), order, state)
    for near in candidates.states(request, mesh):
        higher = near.zero_stage - state.zero_stage
        if near[3:5] == state[3:5] and (higher > 0 or (not higher and state.reduces_once)):
            yield 2 * max(1, higher), (flow, order, near)
    smaller = [f.micro_batch for f in candidates.flows(request, mesh)]
    smaller = [size for size in smaller if size < flow.micro_batch]
    if smaller:
        yield 2, (flow._replace(micro_batch=max(smaller)), order, state)
    for cost, wider in (
        (4, mesh._replace(dp=mesh.dp // 2, tp=mesh.tp * 2)),
        (4, mesh._replace(dp=mesh.dp // 2, cp=mesh.cp * 2)),
        (5, mesh._replace(pp=mesh.pp * 2, dp=mesh.dp // 2)),
        (5, mesh._replace(pp=mesh.pp * 2, tp=mesh.tp // 2)),
    ):
        if wider.ranks == request.devices:
            for allowed in (state, _on(request, wider, state)):
                yield cost, (flow._replace(mesh=wider), order, allowed)
    for near in candidates.states(request, mesh):
        more = near.num_offloads - state.num_offloads
        if near[1:3] == state[1:3] and more == 1:
            cost = 6 if near.offload_optimizer != state.offload_optimizer else 7
            if state.weights in candidates.ways(request, near.zero_stage, near.offload_param):
                near = near._replace(weights=state.weights)
            yield cost + 3 * ("nvme" in near[3:5]), (flow, order, near)


def _on(request: Request, mesh: MeshSizes, state: ZeroState) -> ZeroState:
    """Return the state, or the next higher one that `mesh` allows."""
    return next((s for s in candidates.states(request, mesh) if s[1:] >= state[1:]), state)


def _words(flow: Flow, order: Order, state: ZeroState) -> tuple[str, ...]:
    """Return one text for each choice that a remedy may change."""
    several = f" x{order.stages_per_rank}" if order.stages_per_rank > 1 else ""
    each = "" if state.reduces_once else " reduced per microbatch"
    return (
        *(f"{axis} {size}" for axis, size in flow.mesh._asdict().items()),
        "sequence parallel" if flow.sequence_parallel else "",
        f"schedule {order.schedule}{several}", f"recompute {flow.recompute}",
        f"ZeRO-{state.zero_stage}{each}",
        f"weights {state.weights if state.zero_stage == 3 else candidates.WEIGHTS[0]}",
        f"micro batch {flow.micro_batch}", f"optimizer on {state.offload_optimizer}",
        f"parameters on {state.offload_param}",
    )  # fmt: skip


def choose_weights(setting: Setting, hardware: Hardware) -> tuple[Weights, Memory]:
    """Return the fastest `weights` choice that fits, and the memory of its fullest rank.

    If none fits, return the one of "per_pass" and "per_microbatch" that needs less memory.
    """
    tried: dict[Weights, Memory] = {}
    for way in candidates.gathered_longest(setting.offload_param):
        memory = tried[way] = worst(setting.but(weights=way), hardware)
        if fits(memory, hardware):
            return way, memory
    least = min([*tried][-2:], key=lambda way: tried[way].total)
    return least, tried[least]
