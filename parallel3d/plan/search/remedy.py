"""Evaluate one setting, and find the smallest change that makes it fit."""

from collections.abc import Iterator
from heapq import nsmallest

from parallel3d.plan.memory.room import all_fit, reason_of, worst
from parallel3d.plan.request import Request
from parallel3d.plan.search import candidates
from parallel3d.plan.search.plans import Plan
from parallel3d.plan.setting import Choices, Flow, Order, Setting, ZeroState
from parallel3d.plan.time.step import step_time

MOST_CHANGES = 400  # the most settings tried for a remedy


def evaluate(request: Request, setting: Setting) -> Plan:
    """Return the plan of one setting, with a remedy if it does not fit."""
    hardware = request.hardware
    memory = worst(setting, hardware)
    time = step_time(setting, hardware)
    remedy = ""
    if reason := reason_of(memory, hardware):
        change = smallest_change(request, setting.choices)
        fewer = "fewer fixed choices, " if request.fixed else ""
        remedy = f"none on this mesh fits; use {fewer}another mesh or more devices"
        if change:
            remedy = change[0]
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
