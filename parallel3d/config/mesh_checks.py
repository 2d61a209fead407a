"""Rules between the mesh, the pipeline and the planner."""

from collections.abc import Iterator

from parallel3d.base.section import ABSENT, Problem
from parallel3d.config import arithmetic
from parallel3d.config.deepspeed import ZeroConfig
from parallel3d.config.model_checks import divisors_of, join_with_or
from parallel3d.config.parallel3d_block import (
    MeshConfig,
    PipelineConfig,
    PlanConfig,
)
from parallel3d.model.config import ModelConfig
from parallel3d.schedule import schedules


def check_layers(
    mesh: MeshConfig, pipeline: PipelineConfig, model: ModelConfig
) -> Iterator[Problem]:
    """Check that there are no more stages than layers."""
    most = model.num_hidden_layers + 2
    per_rank = pipeline.stages_per_rank
    if mesh.pp * per_rank > most:
        yield Problem(
            "parallel3d.mesh.pp",
            mesh.pp,
            f"makes {mesh.pp * per_rank} stages with pipeline.stages_per_rank={per_rank}, more "
            f"than the {most} layers (blocks, embedding and head)",
            f"use at most {most} stages",
        )


def check_schedule(
    mesh: MeshConfig,
    pipeline: PipelineConfig,
    train_batch_size: int | None,
    gradient_accumulation_steps: int | None,
) -> Iterator[Problem]:
    """Check that the schedule can run with the config's sizes, if they are known."""
    if gradient_accumulation_steps is None and train_batch_size is not None:
        return  # accumulation depends on dp
    path = "parallel3d.pipeline.schedule"
    steps = gradient_accumulation_steps or 1
    yield from unrunnable(path, pipeline.schedule, mesh.pp, steps, pipeline)


def unrunnable(
    path: str, value: object, pp: int, microbatches: int, pipeline: PipelineConfig
) -> Iterator[Problem]:
    """Yield why the schedule cannot run with so many microbatches, which a setting chooses."""
    sizes = pp, microbatches, pipeline.stages_per_rank
    if reason := schedules.why_not(pipeline.schedule, *sizes):
        shown = "pp={}, microbatches={}, stages_per_rank={}".format(*sizes)
        rule, _, remedy = reason.partition("; ")
        rule = f"cannot run {pipeline.schedule!r} with {shown}: {rule}"
        yield Problem(path, value, rule, remedy or "use another schedule")


def check_reduction(pipeline: PipelineConfig, zero_optimization: ZeroConfig) -> Iterator[Problem]:
    """Check that a schedule with split backwards reduces gradients once a step."""
    stage = zero_optimization.stage
    chosen = pipeline.gradient_reduction
    means = f"means per_microbatch at ZeRO-{stage}, which " if chosen == "auto" else ""
    if schedules.splits_backward(pipeline.schedule) and not pipeline.reduces_once(stage):
        yield Problem(
            "parallel3d.pipeline.gradient_reduction",
            chosen,
            f"{means}does not work with schedule {pipeline.schedule!r}: it accumulates weight "
            "gradients until the step",
            'use "per_step"',
        )


def check_copies(mesh: MeshConfig, zero_optimization: ZeroConfig) -> Iterator[Problem]:
    """Check that dp divides into copies of what ZeRO shards, each with all experts."""
    path = "parallel3d.mesh.dp_shards"
    shards = mesh.dp_shards
    if shards is None:
        return
    if zero_optimization.stage == 0:
        yield Problem(
            path,
            shards,
            "says over how many ranks ZeRO shards, and zero_optimization.stage is 0: every rank "
            "holds all states",
            "use stage 1, 2 or 3, or null here",
        )
    if zero_optimization.stage in (1, 2) and not zero_optimization.contiguous_gradients:
        yield Problem(
            "zero_optimization.contiguous_gradients",
            False,
            "with parallel3d.mesh.dp_shards a rank sums its part of a buffer of gradients",
            "use true, or dp_shards = null",
        )
    if shards == "node":
        return
    allowed = []
    if mesh.dp != "auto":
        allowed = [n for n in divisors_of(mesh.dp) if n % mesh.ep == 0]
    if mesh.dp != "auto" and shards not in allowed:
        multiple = f" and is not a multiple of mesh.ep={mesh.ep}" if shards % mesh.ep else ""
        rule = f"does not divide mesh.dp={mesh.dp}{multiple}"
        if mesh.dp % shards == 0:
            rule = f"is not a multiple of mesh.ep={mesh.ep}"
        remedy = "use a mesh.ep that divides mesh.dp, or null here"
        if allowed:
            remedy = f"use {join_with_or(allowed)}"
        yield Problem(path, shards, rule, remedy)
    elif shards % mesh.ep:
        rule = f"is not a multiple of mesh.ep={mesh.ep}"
        yield Problem(path, shards, rule, f"use {shards // mesh.ep * mesh.ep + mesh.ep}")


def check_fallbacks(mesh: MeshConfig) -> Iterator[Problem]:
    """Check that a mesh with fallbacks has a number for dp."""
    if mesh.fallbacks and mesh.dp == "auto":
        yield Problem(
            "parallel3d.mesh.dp",
            "auto",
            "fits any number of processes, and parallel3d.mesh.fallbacks are for all but one",
            "use a number, or remove fallbacks",
        )


def check_plan(
    is_planned: bool,
    plan: PlanConfig,
    train_batch_size: int | None,
    train_micro_batch_size_per_gpu: int | None,
) -> Iterator[Problem]:
    """Check that the settings of a planned mesh are there, and those of another mesh are not."""
    if not is_planned and plan.fix:
        yield Problem(
            "parallel3d.plan.fix",
            plan.fix,
            'is for mesh "plan" only',
            'remove it, or write "mesh": "plan"',
        )
    if is_planned and train_batch_size is None:
        yield Problem(
            arithmetic.BATCH,
            ABSENT,
            'is required with mesh "plan", which chooses dp and the micro batch for it',
            "add it: samples per step",
        )
    if "micro_batch" in plan.fix and train_micro_batch_size_per_gpu is None:
        yield Problem(
            arithmetic.MICRO,
            ABSENT,
            "is required, because parallel3d.plan.fix names micro_batch",
            "add it: samples per microbatch and rank",
        )
