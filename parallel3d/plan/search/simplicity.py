"""The order of equally fast plans, simplest first."""

from typing import Any

from parallel3d.plan.search import candidates
from parallel3d.plan.search.plans import Plan


def simplicity(plan: Plan) -> tuple[Any, ...]:
    """Sort key of equally fast plans: fewer stages, less offload, smaller tp, and so on, first."""
    s = plan.setting
    flow, order, state = candidates.choices_of(s)
    return (
        s.pp * s.stages_per_rank,
        state,
        s.tp,
        s.sequence_parallel,
        candidates.RECOMPUTES.index(s.recompute),
        plan.memory.total,
        order,
        flow.micro_batch,
    )
