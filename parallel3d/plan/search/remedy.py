"""Check whether a setting fits, and find the smallest change that makes it fit."""

from collections.abc import Iterator
from heapq import nsmallest

from parallel3d.config.hardware import Hardware
from parallel3d.plan.memory.peak import Memory, exceeds, per_rank
from parallel3d.plan.request import Request
from parallel3d.plan.search import candidates
from parallel3d.plan.search.plans import Plan
from parallel3d.plan.setting import Choices, Flow, Order, Setting, ZeroState
from parallel3d.plan.time.step import step_time

MOST_CHANGES = 400  # the most settings tried for a remedy


def room_of(hardware: Hardware) -> tuple[int, int]:
    """Return the bytes of memory of one device, and of its share of the host."""
    host = hardware.host
    return int(hardware.memory_bytes.value), int(host.memory_bytes.value) if host else 0


def reason_of(memory: Memory, hardware: Hardware) -> str:
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
    if size >= 100:
        return f"{size:.0f}"
    return f"{size:.1f}" if size >= 1 else f"{size:.3f}"


def all_fit(setting: Setting, hardware: Hardware, room: tuple[int, int] | None = None) -> bool:
    """Return True if all ranks fit. The first is looked at first: it most often decides.

    - `room`: bytes of a device and of its host, if they are not those of the hardware.
    """
    room = room or room_of(hardware)
    return not any(exceeds(setting, coord, hardware, room) for coord in range(setting.mesh.pp))


def worst(setting: Setting, hardware: Hardware) -> Memory:
    """Return the memory of the decisive rank: the fullest, or one that exceeds host memory."""
    device, host = room_of(hardware)

    def lack(memory: Memory) -> tuple[int, bool, int]:
        return max(0, memory.total - device), memory.host > host, memory.total

    return max(per_rank(setting, hardware), key=lack)


def evaluate(request: Request, setting: Setting) -> Plan:
    """Return the plan of one setting, with a remedy if it does not fit."""
    hardware = request.hardware
    memory = worst(setting, hardware)
    time = step_time(setting, hardware)
    remedy = ""
    if reason := reason_of(memory, hardware):
        change = smallest_change(request, setting.choices)
        remedy = change[0] if change else "none on this mesh fits; use another mesh or more devices"
    return Plan(request, setting, memory, time, reason, remedy)


def smallest_change(request: Request, start: Choices) -> tuple[str, Choices] | None:
    """Return the cheapest change on the same mesh that makes a setting fit, and its outcome.

    The change is in words. Returns None if none of MOST_CHANGES fits.
    """
    words = words_of(*start)

    def cost(choices: Choices) -> tuple[int, int, Choices]:
        flow, _, state = choices
        changed = zip(_COSTS, words, words_of(*choices), strict=True)
        total = sum(cost for cost, old, new in changed if old != new)
        total += flow.recompute.strength + state.zero_stage + 3 * state.num_offloads
        return total, -flow.micro_batch, choices

    for choices in nsmallest(MOST_CHANGES, _leaner(request, *start), key=cost):
        if all_fit(candidates.setting_of(request, *choices), request.hardware):
            pairs = zip(words, words_of(*choices), strict=True)
            return " + ".join(new for old, new in pairs if new != old), choices
    return None


def _leaner(request: Request, flow: Flow, order: Order, state: ZeroState) -> Iterator[Choices]:
    """Yield choices on the same mesh that may need less memory."""
    flows = set()
    for near in candidates.flows(request, flow.mesh):
        if near.ep == flow.ep and near.micro_batch <= flow.micro_batch:
            flows.add(near._replace(recompute=flow.recompute))
            if near.recompute.strength >= flow.recompute.strength:
                flows.add(near)
    for near, other, zero in candidates.choices(request, flows):
        if (
            other.stages_per_rank <= order.stages_per_rank
            and zero.zero_stage >= state.zero_stage
            and zero.num_offloads >= state.num_offloads
            and zero.copies == state.copies
        ):
            yield near, other, zero


# The cost of changing each of `words_of`, besides more recomputation, ZeRO stages and offloads.
_COSTS = (1, 1, 2, 2, 1, 2, 6, 7)


def words_of(flow: Flow, order: Order, state: ZeroState) -> tuple[str, ...]:
    """Return one text for each choice that a remedy may change."""
    several = f" x{order.stages_per_rank}" if order.stages_per_rank > 1 else ""
    each = "" if state.reduces_once else " reduced per microbatch"
    return (
        "sequence parallel" if flow.sequence_parallel else "no sequence parallelism",
        f"schedule {order.schedule}{several}",
        f"recompute {flow.recompute}",
        f"ZeRO-{state.zero_stage}{each}",
        f"weights {state.weights if state.zero_stage == 3 else candidates.WEIGHTS[0]}",
        f"micro batch {flow.micro_batch}",
        f"optimizer on {state.offload_optimizer}",
        f"parameters on {state.offload_param}",
    )
