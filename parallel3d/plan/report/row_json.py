"""Rows of the planner's table as JSON."""

from parallel3d.base.reader import JsonObject
from parallel3d.plan.memory.peak import Memory
from parallel3d.plan.search.plans import Plan
from parallel3d.plan.setting import Setting


def plan_json(plan: Plan) -> JsonObject:
    """Return the plan's row in `parallel3d plan --json`. Its keys must not change."""
    flops = plan.request.flops
    again = flops.full + plan.recomputed_flops
    return {
        **choices_json(plan.setting, plan.memory),
        "fits": plan.fits,
        "reason": plan.reason,
        "remedy": plan.remedy,
        "step_seconds": plan.time.seconds,
        "time": dict(plan.time.parts),
        "bubble": plan.time.bubble,
        "tokens_per_second": plan.tokens_per_second,
        "model_tflops_per_device": plan.per_device(flops.full) / 1e12,
        "hardware_tflops_per_device": plan.per_device(again) / 1e12,
        "mfu_full": plan.mfu(flops.full),
        "mfu_causal": plan.mfu(flops.causal),
        "days": plan.days,
        "device_hours": plan.device_hours,
    }


def choices_json(setting: Setting, memory: Memory) -> JsonObject:
    """Return a setting's choices and the memory of its fullest rank as JSON."""
    flow = setting.flow
    state = setting.state
    return {
        **flow.mesh._asdict(),
        "ep": flow.ep,
        "dp_shards": flow.mesh.dp // state.copies if state.copies > 1 else None,
        "sequence_parallel": flow.sequence_parallel,
        "zero_stage": state.zero_stage,
        "gradient_reduction": "per_step" if state.reduces_once else "per_microbatch",
        "weights": state.weights if state.zero_stage == 3 else None,
        "offload": state.offload,
        "micro_batch": flow.micro_batch,
        "num_microbatches": setting.num_microbatches,
        "schedule": setting.order.schedule,
        "stages_per_rank": setting.order.stages_per_rank,
        "recompute": str(flow.recompute),
        "memory_bytes": {**memory.parts, "total": memory.total},
        "host_bytes": memory.host,
        "nvme_bytes": memory.nvme,
    }
