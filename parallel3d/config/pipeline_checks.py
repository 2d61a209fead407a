"""Rules between a config's pipeline section and the rest."""

from collections.abc import Iterator

from parallel3d.base.section import Problem
from parallel3d.config.deepspeed import ZeroConfig
from parallel3d.config.parallel3d_block import MeshConfig, PipelineConfig, TrainConfig, reduces_once
from parallel3d.schedule import schedules


def check_schedule(
    mesh: MeshConfig,
    pipeline: PipelineConfig,
    train_batch_size: int | None,
    gradient_accumulation_steps: int | None,
) -> Iterator[Problem]:
    """Check that the schedule can be run with the config's sizes, as far as they are known."""
    if gradient_accumulation_steps is None and train_batch_size is not None:
        return  # follows from dp
    sizes = mesh.pp, gradient_accumulation_steps or 1, pipeline.stages_per_rank
    if reason := schedules.why_not(pipeline.schedule, *sizes):
        names = ("pp", "microbatches", "stages_per_rank")
        given = ", ".join(f"{name}={size}" for name, size in zip(names, sizes, strict=True))
        rule, _, remedy = reason.partition("; ")
        remedy = remedy or "use another schedule"
        rule = f"cannot run with {given}" if rule in given else f"cannot run: {rule}"
        yield Problem("parallel3d.pipeline.schedule", pipeline.schedule, rule, remedy)


def check_reduction(pipeline: PipelineConfig, zero_optimization: ZeroConfig) -> Iterator[Problem]:
    """Check that a schedule with split backwards reduces gradients once a step."""
    chosen = pipeline.gradient_reduction
    if schedules.splits_backward(pipeline.schedule) and not reduces_once(
        zero_optimization.stage, chosen
    ):
        rule = f"is after each microbatch at ZeRO-{zero_optimization.stage}, but "
        rule = (
            f"{rule if chosen == 'auto' else ''}schedule {pipeline.schedule!r} makes weight "
            "gradients apart, which add up until the step"
        )
        yield Problem("parallel3d.pipeline.gradient_reduction", chosen, rule, 'use "per_step"')


def check_compile(
    pipeline: PipelineConfig, train: TrainConfig, zero_optimization: ZeroConfig
) -> Iterator[Problem]:
    """A compiled block has its weights, and makes their gradients in its backward."""
    if train.compile != "block":
        return
    path, remedy = "parallel3d.train.compile", 'use "pointwise"'
    if zero_optimization.stage == 3:
        rule = "needs each block's weights, which ZeRO-3 gathers while it runs"
        yield Problem(path, train.compile, rule, f"{remedy}, or zero_optimization.stage = 2")
    if schedules.splits_backward(pipeline.schedule):
        rule = f"cannot make weight gradients apart, as schedule {pipeline.schedule!r} does"
        yield Problem(path, train.compile, rule, f"{remedy}, or another schedule")
