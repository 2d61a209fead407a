"""Correct the hardware's curves by one measured run: `parallel3d plan --from-run RUN`.

The measured parts of one mesh's step set the rate of computes, of collectives and of updates for
all other meshes of the same program and machine. Nothing else of the plan changes.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import sqrt

from parallel3d.config.hardware import Figure, Hardware
from parallel3d.plan.report.explain_run import Explanation
from parallel3d.plan.report.plan_table import three
from parallel3d.plan.search.plans import Plan
from parallel3d.plan.time.operators import curves_for

LEAST_SHARE = 0.1
"""The share of the planned step below which a part is too short to correct anything by it."""
# The curves that scale with each part. Rates fall by a factor by which overheads rise.
_RATES = {
    "compute": ("matmul", "flash", "traffic"),
    "reduction": ("link", "network"),
    "optimizer": ("optimizer",),
}
_OVERHEADS = {
    "compute": (
        "overhead_per_operator",
        "overhead_per_layer",
        "overhead_per_launch",
        "overhead_per_experts",
        "overhead_per_action",
        "overhead_per_gather",
    ),
    "reduction": (
        "latency",
        "overhead_per_collective",
        "overhead_per_crossing",
        "overhead_per_message",
    ),
    "optimizer": ("overhead_per_param", "overhead_per_step"),
}


@dataclass(frozen=True)
class Correction:
    """The factors by which parts of a measured step are believed to exceed their plan.

    - `factors`: by the names in _RATES; without those that are too short to tell.
    - `host_seconds`: the host's seconds of a step beside all parts, which the plan does not have.
    """

    factors: Mapping[str, float]
    host_seconds: float

    @property
    def words(self) -> str:
        """The correction in words."""
        each = [f"{name} {three(factor)} times" for name, factor in self.factors.items()]
        each.append(f"{three(self.host_seconds)} s of the host")
        return ", ".join(each)

    def applied(self, hardware: Hardware) -> Hardware:
        """Return the hardware with corrected curves and update rates."""
        curves = asdict(curves_for(hardware))
        for part, factor in self.factors.items():
            for name in _RATES[part]:
                curves[name] /= factor
            for name in _OVERHEADS[part]:
                curves[name] *= factor
        curves["overhead_per_step"] += self.host_seconds
        changes: dict[str, object] = {"curves": curves}
        update = self.factors.get("optimizer", 1.0)
        if hardware.adam_params:
            changes["adam_params"] = _slower(hardware.adam_params, update)
        if hardware.host:
            own = {"adam_params": _slower(hardware.host.adam_params, update)}
            changes["host"] = hardware.host.model_copy(update=own)
        return hardware.model_copy(update=changes)


def _slower(figure: Figure, times: float) -> Figure:
    return figure.model_copy(update={"value": figure.value / times})


def correction_of(plan: Plan, explanation: Explanation) -> Correction:
    """Return the correction that a run's measured parts are to its plan.

    Half of a factor (its square root) is of the machine, and half is of that run: each mesh is off
    by itself about as much as the machine is (docs/planner/validation.md). A slow rank and a slow
    loader are of that run, and correct nothing.
    """
    factors = {}
    for part in _RATES:
        measured, planned = explanation.seconds[part]
        if part == "reduction":  # no link is slow where gradients are copied to one buffer
            measured -= explanation.copying
            planned -= explanation.copying
        if measured > 0 and planned > LEAST_SHARE * plan.time.seconds:
            factors[part] = sqrt(measured / planned)
    return Correction(factors, max(0.0, explanation.seconds["rest"][0]))
