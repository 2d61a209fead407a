"""Rules between several settings of a config.

A check's parameters name the settings that it compares; it runs if all of them are valid.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from inspect import signature
from math import gcd
from typing import Any

from parallel3d.base.section import ABSENT, Problem, problems_where
from parallel3d.config import arithmetic
from parallel3d.config.data import DataConfig
from parallel3d.config.deepspeed import Bf16Config, Fp16Config, OptimizerConfig, ZeroConfig
from parallel3d.config.model_checks import MODEL_CHECKS
from parallel3d.config.parallel3d_block import (
    PLAN,
    CheckpointConfig,
    LrScheduleConfig,
    MeshConfig,
    PipelineConfig,
    PlanConfig,
    TrainConfig,
    reduces_once,
)
from parallel3d.model import optimizers
from parallel3d.model.config import ModelConfig
from parallel3d.model.parametrization import parametrization_of
from parallel3d.model.recompute import parts_of
from parallel3d.model.spec import MASTER_BYTES
from parallel3d.schedule import schedules

_LEAST_ON_NVME = 2**18  # elements; DeepSpeed keeps less than 1 MiB in host memory
_signature = cache(signature)  # the planner checks thousands of meshes


def find_problems(settings: Mapping[str, object]) -> list[Problem]:
    """Return a problem for each rule that the settings break.

    Args:
        settings: valid settings of both blocks by name, such as "mesh" and "bf16".
    """
    problems: list[Problem] = []
    settings = {**settings, "is_planned": settings.get("mesh") == PLAN}
    if settings["is_planned"]:
        del settings["mesh"]  # checks of the mesh wait until it is planned
    for check in CHECKS:
        names = _signature(check).parameters
        if settings.keys() >= names.keys():
            problems += check(**{name: settings[name] for name in names})
    return problems


def _check_layers(
    mesh: MeshConfig, pipeline: PipelineConfig, model: ModelConfig
) -> Iterator[Problem]:
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


def _check_schedule(
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
    yield from _unrunnable(path, pipeline.schedule, mesh.pp, steps, pipeline)


def _unrunnable(
    path: str, value: object, pp: int, microbatches: int, pipeline: PipelineConfig
) -> Iterator[Problem]:
    """Yield why the schedule cannot run with so many microbatches, which a setting chooses."""
    sizes = pp, microbatches, pipeline.stages_per_rank
    if reason := schedules.why_not(pipeline.schedule, *sizes):
        shown = "pp={}, microbatches={}, stages_per_rank={}".format(*sizes)
        rule, _, remedy = reason.partition("; ")
        rule = f"cannot run {pipeline.schedule!r} with {shown}: {rule}"
        yield Problem(path, value, rule, remedy or "use another schedule")


def _check_reduction(pipeline: PipelineConfig, zero_optimization: ZeroConfig) -> Iterator[Problem]:
    """Check that a schedule with split backwards reduces gradients once a step."""
    stage = zero_optimization.stage
    chosen = pipeline.gradient_reduction
    means = f"means per_microbatch at ZeRO-{stage}, which " if chosen == "auto" else ""
    if schedules.splits_backward(pipeline.schedule) and not reduces_once(stage, chosen):
        yield Problem(
            "parallel3d.pipeline.gradient_reduction",
            chosen,
            f"{means}does not work with schedule {pipeline.schedule!r}: it accumulates weight "
            "gradients until the step",
            'use "per_step"',
        )


def _check_noise_scale(
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
    if every and not reduces_once(stage, chosen):
        yield Problem(
            path,
            every,
            "needs gradients that are reduced once per step, not after each microbatch as with "
            f"zero_optimization.stage={stage} and gradient_reduction={chosen!r}",
            'set parallel3d.pipeline.gradient_reduction = "per_step", or 0 here',
        )


def _check_compile(
    pipeline: PipelineConfig, train: TrainConfig, zero_optimization: ZeroConfig
) -> Iterator[Problem]:
    """Check that compiled blocks have all weights, and an undivided backward without parts."""
    path = "parallel3d.train.compile"
    remedy = 'use "pointwise"'
    blocks = train.compile == "block"
    parts = sorted(parts_of(pipeline.activation_checkpointing) - {"core_attn"})
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


def _check_rewind(train: TrainConfig, checkpoint: CheckpointConfig) -> Iterator[Problem]:
    """Check that a run that may rewind has checkpoints."""
    has_none = not (checkpoint.every or checkpoint.at)
    rewinds = {name: (getattr(train, name), "skip") for name in ("on_nonfinite", "on_spike")}
    rewinds["check_bits.on_wrong"] = (train.check_bits.on_wrong, "stop")
    yield from problems_where(
        *(
            (
                has_none and chosen == "rewind",
                f"parallel3d.train.{name}",
                "rewind",
                "needs checkpoints to rewind to, but checkpoint.every is 0",
                f'set checkpoint.every, or use "{other}"',
            )
            for name, (chosen, other) in rewinds.items()
        )
    )


def _check_recomputation(
    train: TrainConfig, mesh: MeshConfig, model: ModelConfig
) -> Iterator[Problem]:
    """Check that a rank's layers can run on another rank with its tp group alone."""
    path = "parallel3d.train.check_bits.recompute_every"
    every = train.check_bits.recompute_every
    yield from problems_where(
        *(
            (
                every and size > 1,
                path,
                every,
                f"needs layers that only tp ranks share, but mesh.{axis} is {size}",
                f"use 0, or mesh.{axis} = 1",
            )
            for axis, size in (("cp", mesh.cp), ("ep", mesh.ep))
        ),
        (
            every and train.compile == "block",
            path,
            every,
            'needs the values inside a block, but train.compile is "block"',
            'use 0, or train.compile = "pointwise"',
        ),
        (
            every and getattr(model, "router_aux_loss", None) == "pooled",
            path,
            every,
            'computes one layer at a time, but model.router_aux_loss is "pooled"',
            'use 0, or router_aux_loss = "microbatch"',
        ),
    )


def _check_batch(
    train_batch_size: int | None,
    train_micro_batch_size_per_gpu: int | None,
    gradient_accumulation_steps: int | None,
    mesh: MeshConfig,
) -> Iterator[Problem]:
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
    if train_batch_size and batch and train_batch_size != batch:
        yield Problem(
            arithmetic.BATCH,
            train_batch_size,
            f"is not {arithmetic.MICRO}={micro} x {arithmetic.ACCUMULATION}={steps} "
            f"x dp={mesh.dp} = {batch}",
            f'use {batch} or "auto"',
        )


def _check_fallbacks(mesh: MeshConfig) -> Iterator[Problem]:
    if mesh.fallbacks and mesh.dp == "auto":
        yield Problem(
            "parallel3d.mesh.dp",
            "auto",
            "fits any number of processes, and parallel3d.mesh.fallbacks are for all but one",
            "use a number, or remove fallbacks",
        )


def _check_plan(
    is_planned: bool,
    plan: PlanConfig,
    train_batch_size: int | None,
    train_micro_batch_size_per_gpu: int | None,
) -> Iterator[Problem]:
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


def _check_length(train: TrainConfig, data: DataConfig) -> Iterator[Problem]:
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


def _check_batch_schedule(
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
            getattr(scheduler, "type", None),
            f"counts steps, which have several sizes with {path}",
            "use parallel3d.train.lr_schedule, which then counts samples",
        )


def _check_batch_sizes(
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
        yield from _unrunnable(path, size, mesh.pp, size // share, pipeline)


def _check_lr_schedule(train: TrainConfig, data: DataConfig) -> Iterator[Problem]:
    schedule = train.lr_schedule
    path = "parallel3d.train.lr_schedule.decay_steps"
    decay = schedule.decay_steps
    warmup = schedule.warmup_steps
    steps = arithmetic.lr_steps(train, data)
    is_read = schedule.type == "wsd"
    rest = (steps or 0) - warmup
    if decay and not is_read:
        yield Problem(
            path, decay, f'is not read by type "{schedule.type}"', 'remove it, or use type "wsd"'
        )
    if decay and is_read and steps is not None and decay > rest:
        yield Problem(
            path,
            decay,
            f"plus warmup_steps={warmup} exceeds the run's {steps} steps",
            f"use at most {rest}" if rest > 0 else f"use {steps} or less for both",
        )


def _check_scheduler(scheduler: Any, train: TrainConfig) -> Iterator[Problem]:
    params = getattr(scheduler, "params", None)
    type_name = getattr(scheduler, "type", None)
    total = getattr(params, "total_num_steps", None)
    warmup = getattr(params, "warmup_num_steps", 0)
    if scheduler is not None and train.lr_schedule != LrScheduleConfig():
        yield Problem(
            "scheduler",
            type_name,
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


def _check_profile(train: TrainConfig, mesh: MeshConfig) -> Iterator[Problem]:
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


def _check_precision(bf16: Bf16Config, fp16: Fp16Config) -> Iterator[Problem]:
    if bf16.enabled and fp16.enabled:
        yield Problem(
            "fp16.enabled",
            True,
            "cannot be combined with bf16.enabled",
            "disable one of them (bf16 needs no loss scale)",
        )


def _check_communication_type(
    bf16: Bf16Config, communication_data_type: str | None
) -> Iterator[Problem]:
    if communication_data_type == "bf16" and not bf16.enabled:
        yield Problem(
            "communication_data_type",
            "bf16",
            "would round gradients that are not bf16",
            "use fp32, or set bf16.enabled = true",
        )


def _check_offload(zero_optimization: ZeroConfig) -> Iterator[Problem]:
    zero = zero_optimization
    path = "zero_optimization"
    param = zero.offload_param.device
    optimizer = zero.offload_optimizer.device
    rule = "requires nvme_path"
    remedy = 'add "nvme_path": "/local/nvme" to '
    if optimizer == "nvme" and not zero.offload_optimizer.nvme_path:
        yield Problem(
            f"{path}.offload_optimizer.device", "nvme", rule, f"{remedy}offload_optimizer"
        )
    if param == "nvme" and not zero.offload_param.nvme_path:
        yield Problem(f"{path}.offload_param.device", "nvme", rule, f"{remedy}offload_param")
    if param != "none" and zero.stage != 3:
        yield Problem(
            f"{path}.offload_param.device",
            param,
            f"requires sharded parameters (stage 3), but stage is {zero.stage}",
            "use stage 3, or remove it",
        )
    if optimizer == "nvme" and zero.stage != 3:
        yield Problem(
            f"{path}.offload_optimizer.device",
            optimizer,
            f"requires stage 3, but stage is {zero.stage}",
            'use stage 3, or device "cpu"',
        )


def _check_nvme(optimizer: OptimizerConfig, zero_optimization: ZeroConfig) -> Iterator[Problem]:
    """Refuse combinations of NVMe settings in which DeepSpeed fails or goes wrong."""
    zero = zero_optimization
    path = "zero_optimization"
    threshold = zero.stage3_param_persistence_threshold
    offload = zero.offload_optimizer
    on_nvme = zero.offload_param.device == "nvme"
    # The swapper reads master, gradient and states into one buffer each.
    states = (optimizers.kinds(optimizer.file, role) for role in (optimizers.MATRIX, None))
    each = max(4, *(1 + len(kinds) for kinds in states))
    needed = each * (1 + offload.pipeline_read + offload.pipeline_write)
    what = "pipeline_read or pipeline_write" if needed > each else f"the state of {optimizer.type}"
    if on_nvme and threshold > _LEAST_ON_NVME:
        yield Problem(
            f"{path}.stage3_param_persistence_threshold",
            threshold,
            "would keep parameters unsharded that offload_param puts on NVMe",
            f"use at most {_LEAST_ON_NVME}",
        )
    if offload.device == "nvme" and offload.buffer_count < needed:
        yield Problem(
            f"{path}.offload_optimizer.buffer_count",
            offload.buffer_count,
            f"is too few buffers for {what}",
            f"use {needed} or more, or disable pipeline_read and pipeline_write",
        )


def _check_optimizer(
    optimizer: OptimizerConfig, zero_optimization: ZeroConfig, model: ModelConfig
) -> Iterator[Problem]:
    """Refuse what the engine, DeepSpeed or a checkpoint cannot do with an optimizer."""
    file = optimizers.load(optimizer.file)
    name = optimizer.type
    params = optimizer.params
    device = zero_optimization.offload_optimizer.device
    kind = parametrization_of(model).type
    usable = ("none", *file.OFFLOADS)
    yield from problems_where(
        (
            device not in usable,
            "zero_optimization.offload_optimizer.device",
            device,
            f"cannot hold the state of {name}",
            "use " + " or ".join(f'"{place}"' for place in usable),
        ),
        (
            kind not in file.PARAMETRIZATIONS,
            "parallel3d.model.parametrization.type",
            kind,
            f"sets learning rates that do not transfer with {name}",
            'use "standard", or optimizer.type = "AdamW"',
        ),
        (
            kind == "mup" and getattr(params, "width_power", 1.0) is None,
            "optimizer.params.scale",
            getattr(params, "scale", None),
            "has no learning rate that transfers over the width, as muP needs",
            'use "spectral" or "match_rms_adamw"',
        ),
        *(
            (
                state.num_bytes != MASTER_BYTES,
                "optimizer.type",
                name,
                f"keeps {state.name} in {state.num_bytes} bytes an element",
                "keep it in fp32 (4 bytes), as checkpoints and DeepSpeed's swap buffers do",
            )
            for state in file.STATE
        ),
    )


CHECKS: tuple[Callable[..., Iterator[Problem]], ...] = (
    *MODEL_CHECKS,
    _check_layers,
    _check_schedule,
    _check_reduction,
    _check_noise_scale,
    _check_compile,
    _check_recomputation,
    _check_rewind,
    _check_batch,
    _check_fallbacks,
    _check_plan,
    _check_length,
    _check_batch_schedule,
    _check_batch_sizes,
    _check_lr_schedule,
    _check_scheduler,
    _check_profile,
    _check_precision,
    _check_communication_type,
    _check_offload,
    _check_nvme,
    _check_optimizer,
)
