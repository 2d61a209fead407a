"""Rules between the training settings, and those of batch, data and learning rate."""

from collections.abc import Iterator
from math import gcd
from typing import Any

from parallel3d.base.section import ABSENT, Problem
from parallel3d.config import arithmetic
from parallel3d.config.data import DataConfig
from parallel3d.config.deepspeed import ZeroConfig
from parallel3d.config.mesh_checks import unrunnable
from parallel3d.config.parallel3d_block import (
    CheckpointConfig,
    LrScheduleConfig,
    MeshConfig,
    PipelineConfig,
    TrainConfig,
)
from parallel3d.model.config import ModelConfig
from parallel3d.model.recompute import SELECTIVE
from parallel3d.schedule import schedules


def check_noise_scale(
    train: TrainConfig,
    data: DataConfig,
    mesh: MeshConfig,
    pipeline: PipelineConfig,
    zero_optimization: ZeroConfig,
) -> Iterator[Problem]:
    """Check that each data-parallel rank has a whole gradient of its own, of random samples."""
    path = "parallel3d.train.noise_scale_every"
    every = train.noise_scale_every
    stage = zero_optimization.stage
    chosen = pipeline.gradient_reduction
    if every and mesh.dp == 1:
        yield Problem(
            path,
            every,
            "compares gradients of data-parallel ranks, and mesh.dp is 1",
            "use dp = 2 or more, or 0 here",
        )
    if every and mesh.ep > 1:
        yield Problem(
            path,
            every,
            f"needs each rank's own gradient, and ep={mesh.ep} ranks send each other their tokens",
            "use 0, or mesh.ep = 1",
        )
    if every and data.balance_microbatches:
        yield Problem(
            path,
            every,
            "needs ranks with random samples, but parallel3d.data.balance_microbatches deals them",
            "use balance_microbatches = false, or 0 here",
        )
    if every and not pipeline.reduces_once(stage):
        yield Problem(
            path,
            every,
            "needs gradients that are reduced once per step, not after each microbatch as with "
            f"zero_optimization.stage={stage} and gradient_reduction={chosen!r}",
            'set parallel3d.pipeline.gradient_reduction = "per_step", or 0 here',
        )


def check_tasks(train: TrainConfig, data: DataConfig) -> Iterator[Problem]:
    """Check that there is a tokenizer for the texts of tasks."""
    tasks = list(train.evaluate_tasks.tasks)
    if tasks and data.tokenizer == "none":
        yield Problem(
            "parallel3d.train.evaluate_tasks.tasks",
            tasks,
            'are texts, which need a tokenizer, and parallel3d.data.tokenizer is "none"',
            "remove it, or name another tokenizer: the one that made the ids",
        )


def check_compile(
    pipeline: PipelineConfig, train: TrainConfig, zero_optimization: ZeroConfig
) -> Iterator[Problem]:
    """Check that compiled blocks have all weights, and an undivided backward without parts."""
    path = "parallel3d.train.compile"
    remedy = 'use "pointwise"'
    blocks = train.compile == "block"
    parts = sorted(pipeline.activation_checkpointing.parts - SELECTIVE.parts)
    if blocks and zero_optimization.stage == 3:
        yield Problem(
            path,
            train.compile,
            "needs each block's weights before it runs, but ZeRO-3 gathers them while it runs",
            f"{remedy}, or zero_optimization.stage = 2",
        )
    if blocks and schedules.splits_backward(pipeline.schedule):
        yield Problem(
            path,
            train.compile,
            f"cannot split the backward, as schedule {pipeline.schedule!r} does",
            f"{remedy}, or another schedule",
        )
    if blocks and parts:
        yield Problem(
            path,
            train.compile,
            f"cannot recompute parts of a compiled block ({', '.join(parts)})",
            f'{remedy}, or activation_checkpointing "full"',
        )


def check_recomputation(
    train: TrainConfig, mesh: MeshConfig, model: ModelConfig
) -> Iterator[Problem]:
    """Check that a rank's layers can run on another rank with its tp group alone."""
    path = "parallel3d.train.check_bits.recompute_every"
    every = train.check_bits.recompute_every
    if not every:
        return
    for axis, size in (("cp", mesh.cp), ("ep", mesh.ep)):
        if size > 1:
            yield Problem(
                path,
                every,
                f"needs layers that only tp ranks share, but mesh.{axis} is {size}",
                f"use 0, or mesh.{axis} = 1",
            )
    if train.compile == "block":
        yield Problem(
            path,
            every,
            'needs the values inside a block, but train.compile is "block"',
            'use 0, or train.compile = "pointwise"',
        )
    if getattr(model, "router_aux_loss", None) == "pooled":
        yield Problem(
            path,
            every,
            'computes one layer at a time, but model.router_aux_loss is "pooled"',
            'use 0, or router_aux_loss = "microbatch"',
        )


def check_rewind(train: TrainConfig, checkpoint: CheckpointConfig) -> Iterator[Problem]:
    """Check that a run that may rewind has checkpoints."""
    has_none = not (checkpoint.every or checkpoint.at)
    rewinds = (
        ("on_nonfinite", train.on_nonfinite, "skip"),
        ("on_spike", train.on_spike, "skip"),
        ("check_bits.on_wrong", train.check_bits.on_wrong, "stop"),
    )
    for name, chosen, other in rewinds:
        if has_none and chosen == "rewind":
            yield Problem(
                f"parallel3d.train.{name}",
                "rewind",
                "needs checkpoints to rewind to, but checkpoint.every is 0",
                f'set checkpoint.every, or use "{other}"',
            )


def check_batch(
    train_batch_size: int | None,
    train_micro_batch_size_per_gpu: int | None,
    gradient_accumulation_steps: int | None,
    mesh: MeshConfig,
    train: TrainConfig,
) -> Iterator[Problem]:
    """Check that there is a batch or a micro batch, and that sizes that are all set agree."""
    micro = train_micro_batch_size_per_gpu or 0
    steps = gradient_accumulation_steps or 0
    batch = micro * steps * (0 if mesh.dp == "auto" else mesh.dp)  # 0: not all is known
    if not train_batch_size and not micro:
        yield Problem(
            arithmetic.MICRO,
            ABSENT,
            "is required",
            f"add it: samples per microbatch, on each data-parallel rank (or {arithmetic.BATCH})",
        )
    if train_batch_size and batch and train_batch_size != batch and train.batch_schedule:
        yield Problem(
            arithmetic.ACCUMULATION,
            steps,
            f"makes a step of {batch} samples, but parallel3d.train.batch_schedule begins with "
            f"{train_batch_size}",
            'use "auto"',
        )
    elif train_batch_size and batch and train_batch_size != batch:
        remedy = f'use {batch} or "auto"'
        if train_batch_size % (batch // steps) == 0:
            remedy = f'{remedy}, or "{arithmetic.ACCUMULATION}": "auto"'
        yield Problem(
            arithmetic.BATCH,
            train_batch_size,
            f"is not {arithmetic.MICRO}={micro} x {arithmetic.ACCUMULATION}={steps} "
            f"x dp={mesh.dp} = {batch}",
            remedy,
        )


def check_length(train: TrainConfig, data: DataConfig) -> Iterator[Problem]:
    """Check that exactly one setting says how long to train."""
    names = ("steps", "max_tokens", "epochs")
    lengths = {name: getattr(train, name) for name in names if getattr(train, name) is not None}
    if len(lengths) != 1:
        yield Problem(
            "parallel3d.train",
            lengths,
            f"sets both {' and '.join(lengths)}" if lengths else "does not set the run's length",
            f"set exactly one of {', '.join(names)}",
        )
    if train.epochs and data.counts_as_read:
        yield Problem(
            "parallel3d.train.epochs",
            train.epochs,
            'cannot be combined with data.count "as-read": the tokens of an epoch are not known',
            "use steps or max_tokens",
        )


def check_batch_schedule(
    train: TrainConfig, data: DataConfig, train_batch_size: int | None, scheduler: Any
) -> Iterator[Problem]:
    """Check the positions of batch_schedule, and the settings that it conflicts with."""
    if not train.batch_schedule:
        if train.batch_lr != "none":
            yield Problem(
                "parallel3d.train.batch_lr",
                train.batch_lr,
                "is not read without batch_schedule",
                "remove it, or add batch_schedule",
            )
        return
    phases = arithmetic.batch_phases(train, data)
    path = "parallel3d.train.batch_schedule"
    samples = [sample for sample, _ in phases]
    first = phases[0][1]
    if samples[0] != 0 or samples != sorted(set(samples)):
        yield Problem(
            path,
            train.batch_schedule,
            f"must begin with position 0 and go on with later samples, not {samples}",
            "write [[0, 64], [1000, 128]]",
        )
    if train_batch_size not in (None, first):
        yield Problem(
            arithmetic.BATCH,
            train_batch_size,
            f"is not the first size of {path}, {first}",
            f"use {first}, or remove it",
        )
    if scheduler is not None:
        yield Problem(
            "scheduler",
            scheduler.type,
            f"counts steps, which have several sizes with {path}",
            "use parallel3d.train.lr_schedule, which then counts samples",
        )


def check_batch_sizes(
    train: TrainConfig,
    mesh: MeshConfig,
    pipeline: PipelineConfig,
    train_micro_batch_size_per_gpu: int | None,
) -> Iterator[Problem]:
    """Check that this mesh can do every size of batch_schedule, if micro batch and dp are known."""
    micro = train_micro_batch_size_per_gpu
    path = "parallel3d.train.batch_schedule"
    if micro is None or mesh.dp == "auto":
        return
    share = micro * int(mesh.dp)
    sizes = [size for _, size in train.batch_schedule]
    if wrong := [size for size in sizes if size % share]:
        yield Problem(
            path,
            ", ".join(map(str, wrong)),
            f"is not a multiple of {arithmetic.MICRO}={micro} x dp={mesh.dp} = {share}",
            f"use multiples of {share}, or a micro batch x dp that divides "
            f"{', '.join(map(str, sizes))}: at most {gcd(*sizes)}",
        )
        return
    for size in sizes[1:]:  # the first is checked with the schedule
        yield from unrunnable(path, size, mesh.pp, size // share, pipeline)


def check_lr_schedule(train: TrainConfig, data: DataConfig) -> Iterator[Problem]:
    """Check that the decay is read, and ends with the run."""
    schedule = train.lr_schedule
    path = "parallel3d.train.lr_schedule.decay_steps"
    decay = schedule.decay_steps
    warmup = schedule.warmup_steps
    steps = arithmetic.lr_steps(train, data)
    is_read = schedule.type == "wsd"
    if decay and not is_read:
        yield Problem(
            path, decay, f'is not read by type "{schedule.type}"', 'remove it, or use type "wsd"'
        )
    if steps is None:
        return
    rest = steps - warmup
    if decay and is_read and decay > rest:
        yield Problem(
            path,
            decay,
            f"plus warmup_steps={warmup} exceeds the run's {steps} steps",
            f"use at most {rest}" if rest > 0 else f"let the two add up to at most {steps}",
        )


def check_scheduler(scheduler: Any, train: TrainConfig) -> Iterator[Problem]:
    """Check that DeepSpeed's scheduler is the only one, and its warm-up ends with its steps."""
    if scheduler is None:
        return
    warmup = scheduler.params.warmup_num_steps
    total = getattr(scheduler.params, "total_num_steps", None)
    if train.lr_schedule != LrScheduleConfig():
        yield Problem(
            "scheduler",
            scheduler.type,
            "conflicts with parallel3d.train.lr_schedule: both set the learning rate",
            "remove one of them",
        )
    if isinstance(total, int) and total < warmup:
        yield Problem(
            "scheduler.params.total_num_steps",
            total,
            f"is less than warmup_num_steps={warmup}",
            f"use {warmup} or more, or a shorter warm-up",
        )


def check_profile(train: TrainConfig, mesh: MeshConfig) -> Iterator[Problem]:
    """Check that the profiled ranks and steps exist."""
    profile = train.profile
    steps = train.steps or 0
    size = mesh.sizes.ranks
    if profile is None:
        return
    ranks = () if isinstance(profile.ranks, str) or mesh.dp == "auto" else profile.ranks
    last = max(ranks, default=0)
    end = profile.start + profile.steps
    if last >= size:
        yield Problem(
            "parallel3d.train.profile.ranks",
            [*ranks],
            f"names rank {last}, and the mesh has {size}",
            f"use ranks from 0 to {size - 1}",
        )
    if steps and end > steps:
        yield Problem(
            "parallel3d.train.profile",
            profile.model_dump(include={"start", "steps"}),
            f"ends at step {end}, after the run's {steps} steps",
            (
                f"use steps = {steps - profile.start} or less, or an earlier start"
                if profile.start < steps
                else f"use start = {max(0, steps - profile.steps)} or less"
            ),
        )
