"""Rules between several settings of a config.

A check's parameters name the settings that it compares; it runs if all of them are valid.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from inspect import signature
from math import gcd
from typing import Any

from parallel3d.base.section import ABSENT, Problem
from parallel3d.config import arithmetic
from parallel3d.config.data import DataConfig
from parallel3d.config.deepspeed import Bf16Config, Fp16Config, OptimizerConfig, ZeroConfig
from parallel3d.config.model_checks import MODEL_CHECKS, join_with_or
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
    planned = settings.get("mesh") == PLAN  # checks of the mesh wait until it is planned
    settings = {k: v for k, v in settings.items() if k != "mesh" or not planned} | {
        "is_planned": planned
    }
    for check in CHECKS:
        names = _signature(check).parameters
        if settings.keys() >= names.keys():
            problems += check(**{name: settings[name] for name in names})
    return problems


def _check_layers(
    mesh: MeshConfig, pipeline: PipelineConfig, model: ModelConfig
) -> Iterator[Problem]:
    num_layers = model.num_hidden_layers + 2
    per_rank = pipeline.stages_per_rank
    if mesh.pp * per_rank > num_layers:
        layers = f"the {num_layers} layers (blocks, embedding and head)"
        if mesh.pp > num_layers or per_rank == 1:
            rule, remedy = f"is more stages than {layers}", f"use pp = {num_layers} or less"
            yield Problem("parallel3d.mesh.pp", mesh.pp, rule, remedy)
        else:
            rule = f"makes {mesh.pp * per_rank} stages on pp={mesh.pp} ranks, more than {layers}"
            remedy = f"use {num_layers // mesh.pp} or less"
            yield Problem("parallel3d.pipeline.stages_per_rank", per_rank, rule, remedy)


def _check_schedule(
    mesh: MeshConfig,
    pipeline: PipelineConfig,
    train_batch_size: int | None,
    gradient_accumulation_steps: int | None,
) -> Iterator[Problem]:
    """Check that the schedule can run with the config's sizes, if they are known."""
    if gradient_accumulation_steps is None and train_batch_size is not None:
        return  # accumulation depends on dp
    sizes = mesh.pp, gradient_accumulation_steps or 1, pipeline.stages_per_rank
    if reason := schedules.why_not(pipeline.schedule, *sizes):
        names = ("pp", "microbatches", "stages_per_rank")
        sizes_text = ", ".join(f"{name}={size}" for name, size in zip(names, sizes, strict=True))
        rule, _, remedy = reason.partition("; ")
        remedy = remedy or "use another schedule"
        rule = f"cannot run with {sizes_text}" if rule in sizes_text else f"cannot run: {rule}"
        yield Problem("parallel3d.pipeline.schedule", pipeline.schedule, rule, remedy)


def _check_reduction(pipeline: PipelineConfig, zero_optimization: ZeroConfig) -> Iterator[Problem]:
    """Check that a schedule with split backwards reduces gradients once a step."""
    chosen = pipeline.gradient_reduction
    if schedules.splits_backward(pipeline.schedule) and not reduces_once(
        zero_optimization.stage, chosen
    ):
        automatic = f"means per_microbatch at ZeRO-{zero_optimization.stage}, which "
        rule = (
            f"{automatic if chosen == 'auto' else ''}does not work with schedule "
            f"{pipeline.schedule!r}: it accumulates weight gradients until the step"
        )
        yield Problem("parallel3d.pipeline.gradient_reduction", chosen, rule, 'use "per_step"')


def _check_noise_scale(
    train: TrainConfig, data: DataConfig, mesh: MeshConfig, pipeline: PipelineConfig,
    zero_optimization: ZeroConfig,
) -> Iterator[Problem]:  # fmt: skip
    """Check that each data-parallel rank has a whole gradient of its own, of random samples."""
    path, every = "parallel3d.train.noise_scale_every", train.noise_scale_every
    if every and mesh.dp == 1:
        rule = "compares gradients of data-parallel ranks, and mesh.dp is 1"
        yield Problem(path, every, rule, "use dp = 2 or more, or 0 here")
    if every and mesh.ep > 1:
        rule = (
            f"needs each rank's own gradient, and ep={mesh.ep} ranks send each other their tokens"
        )
        yield Problem(path, every, rule, "use 0, or mesh.ep = 1")
    if every and data.balance_microbatches:
        rule = (
            "needs ranks with random samples, but parallel3d.data.balance_microbatches deals them"
        )
        yield Problem(path, every, rule, "use balance_microbatches = false, or 0 here")
    stage, chosen = zero_optimization.stage, pipeline.gradient_reduction
    if every and not reduces_once(stage, chosen):
        rule = (
            "needs gradients that are reduced once per step, not after each microbatch as with "
            f"zero_optimization.stage={stage} and gradient_reduction={chosen!r}"
        )
        remedy = 'set parallel3d.pipeline.gradient_reduction = "per_step", or 0 here'
        yield Problem(path, every, rule, remedy)


def _check_compile(
    pipeline: PipelineConfig, train: TrainConfig, zero_optimization: ZeroConfig
) -> Iterator[Problem]:
    """Check that compiled blocks have all weights, and an undivided backward without parts."""
    if train.compile != "block":
        return
    path, remedy = "parallel3d.train.compile", 'use "pointwise"'
    if zero_optimization.stage == 3:
        rule = "needs each block's weights before it runs, but ZeRO-3 gathers them while it runs"
        yield Problem(path, train.compile, rule, f"{remedy}, or zero_optimization.stage = 2")
    if schedules.splits_backward(pipeline.schedule):
        rule = f"cannot split the backward, as schedule {pipeline.schedule!r} does"
        yield Problem(path, train.compile, rule, f"{remedy}, or another schedule")
    if parts := sorted(parts_of(pipeline.activation_checkpointing) - {"core_attn"}):
        rule = f"cannot recompute parts of a compiled block ({', '.join(parts)})"
        yield Problem(path, train.compile, rule, f'{remedy}, or activation_checkpointing "full"')


def _check_rewind(train: TrainConfig, checkpoint: CheckpointConfig) -> Iterator[Problem]:
    for name in ("on_nonfinite", "on_spike"):
        if getattr(train, name) == "rewind" and not (checkpoint.every or checkpoint.at):
            rule = "needs checkpoints to rewind to, but checkpoint.every is 0"
            remedy = 'set checkpoint.every, or use "skip"'
            yield Problem(f"parallel3d.train.{name}", "rewind", rule, remedy)
    if train.check_bits.on_wrong == "rewind" and not (checkpoint.every or checkpoint.at):
        rule = "needs checkpoints to rewind to, but checkpoint.every is 0"
        remedy = 'set checkpoint.every, or use "stop"'
        yield Problem("parallel3d.train.check_bits.on_wrong", "rewind", rule, remedy)


def _check_recomputation(
    train: TrainConfig, mesh: MeshConfig, model: ModelConfig
) -> Iterator[Problem]:
    """Check that a rank's layers can run on another rank with its tp group alone."""
    path, every = "parallel3d.train.check_bits.recompute_every", train.check_bits.recompute_every
    for axis in ("cp", "ep"):
        if every and (size := getattr(mesh, axis)) > 1:
            rule = f"needs layers that only tp ranks share, but mesh.{axis} is {size}"
            yield Problem(path, every, rule, f"use 0, or mesh.{axis} = 1")
    if every and train.compile == "block":
        rule = 'needs the values inside a block, but train.compile is "block"'
        yield Problem(path, every, rule, 'use 0, or train.compile = "pointwise"')
    if every and getattr(model, "router_aux_loss", None) == "pooled":
        rule = 'computes one layer at a time, but model.router_aux_loss is "pooled"'
        yield Problem(path, every, rule, 'use 0, or router_aux_loss = "microbatch"')


def _check_batch(
    train_batch_size: int | None,
    train_micro_batch_size_per_gpu: int | None,
    gradient_accumulation_steps: int | None,
    mesh: MeshConfig,
) -> Iterator[Problem]:
    micro, steps = train_micro_batch_size_per_gpu, gradient_accumulation_steps
    if train_batch_size is None and micro is None:
        samples = "samples per microbatch, on each data-parallel rank"
        remedy = f"add it: {samples} (or {arithmetic.BATCH})"
        yield Problem(arithmetic.MICRO, ABSENT, "is required", remedy)
    if None in (train_batch_size, micro, steps) or mesh.dp == "auto":
        return
    assert train_batch_size and micro and steps
    batch = micro * steps * int(mesh.dp)
    if train_batch_size != batch:
        rule = (
            f"is not train_micro_batch_size_per_gpu={micro} x gradient_accumulation_steps={steps}"
            f" x dp={mesh.dp} = {batch}"
        )
        remedy = f'use {batch} or "auto"'
        per_pass = micro * int(mesh.dp)
        if train_batch_size % per_pass == 0:
            remedy += f", or gradient_accumulation_steps = {train_batch_size // per_pass}"
        yield Problem("train_batch_size", train_batch_size, rule, remedy)


def _check_fallbacks(mesh: MeshConfig) -> Iterator[Problem]:
    if mesh.fallbacks and mesh.dp == "auto":
        rule = "fits any number of processes, and parallel3d.mesh.fallbacks are for all but one"
        yield Problem("parallel3d.mesh.dp", "auto", rule, "use a number, or remove fallbacks")


def _check_plan(
    is_planned: bool,
    plan: PlanConfig,
    train_batch_size: int | None,
    train_micro_batch_size_per_gpu: int | None,
) -> Iterator[Problem]:
    if not is_planned and plan.fix:
        rule, remedy = 'is for mesh "plan" only', 'remove it, or write "mesh": "plan"'
        yield Problem("parallel3d.plan.fix", plan.fix, rule, remedy)
    if is_planned and train_batch_size is None:
        rule = 'is required with mesh "plan", which chooses dp and the micro batch for it'
        yield Problem(arithmetic.BATCH, ABSENT, rule, "add it: samples per step")
    if "micro_batch" in plan.fix and train_micro_batch_size_per_gpu is None:
        rule = "is required, because parallel3d.plan.fix names micro_batch"
        yield Problem(arithmetic.MICRO, ABSENT, rule, "add it: samples per microbatch and rank")


def _check_length(train: TrainConfig, data: DataConfig) -> Iterator[Problem]:
    names = ("steps", "max_tokens", "epochs")
    lengths = {name: getattr(train, name) for name in names if getattr(train, name) is not None}
    if len(lengths) != 1:
        rule = f"sets both {' and '.join(lengths)}" if lengths else "does not set the run's length"
        remedy = f"set exactly one of {', '.join(names)}"
        yield Problem("parallel3d.train", lengths, rule, remedy)
    if train.epochs and data.counts_as_read:
        yield Problem(
            "parallel3d.train.epochs", train.epochs,
            'cannot be combined with data.count "as-read": the tokens of an epoch are not known',
            "use steps or max_tokens",
        )  # fmt: skip


def _check_batch_schedule(
    train: TrainConfig, data: DataConfig, train_batch_size: int | None, scheduler: Any
) -> Iterator[Problem]:
    """Check the positions of batch_schedule, and the settings that it conflicts with."""
    if not train.batch_schedule:
        if train.batch_lr != "none":
            rule, remedy = "is not read without batch_schedule", "remove it, or add batch_schedule"
            yield Problem("parallel3d.train.batch_lr", train.batch_lr, rule, remedy)
        return
    phases, path = arithmetic.batch_phases(train, data), "parallel3d.train.batch_schedule"
    samples, first = [sample for sample, _ in phases], phases[0][1]
    if samples[0] != 0 or samples != sorted(set(samples)):
        rule = f"must begin with position 0 and go on with later samples, not {samples}"
        yield Problem(path, train.batch_schedule, rule, "write [[0, 64], [1000, 128]]")
    if train_batch_size not in (None, first):
        rule = f"is not the first size of {path}, {first}"
        yield Problem(arithmetic.BATCH, train_batch_size, rule, f"use {first}, or remove it")
    if scheduler is not None:
        rule = f"counts steps, which have several sizes with {path}"
        remedy = "use parallel3d.train.lr_schedule, which then counts samples"
        yield Problem("scheduler", scheduler.type, rule, remedy)


def _check_batch_sizes(
    train: TrainConfig,
    mesh: MeshConfig,
    pipeline: PipelineConfig,
    train_micro_batch_size_per_gpu: int | None,
) -> Iterator[Problem]:
    """Check that this mesh can do every size of batch_schedule, if micro batch and dp are known."""
    micro, path = train_micro_batch_size_per_gpu, "parallel3d.train.batch_schedule"
    if micro is None or mesh.dp == "auto":
        return
    share, sizes = micro * int(mesh.dp), [size for _, size in train.batch_schedule]
    if wrong := [size for size in sizes if size % share]:
        rule = f"is not a multiple of {arithmetic.MICRO}={micro} x dp={mesh.dp} = {share}"
        near = [max(1, wrong[0] // share) * share, wrong[0] // share * share + share]
        remedy = (
            f"use multiples of {share} ({join_with_or(sorted(set(near)))}), or a micro batch x dp"
        )
        remedy += f" that divides {', '.join(map(str, sizes))}: at most {gcd(*sizes)}"
        yield Problem(path, ", ".join(map(str, wrong)), rule, remedy)
        return
    for size in sizes[1:]:  # the first is checked with the schedule
        numbers = mesh.pp, size // share, pipeline.stages_per_rank
        if reason := schedules.why_not(pipeline.schedule, *numbers):
            rule, _, remedy = reason.partition("; ")
            count = f"is {size // share} microbatches"
            rule = f"{count}, with which {pipeline.schedule!r} cannot run: {rule}"
            yield Problem(path, size, rule, remedy or "use another size or pipeline.schedule")
            return


def _check_lr_schedule(train: TrainConfig, data: DataConfig) -> Iterator[Problem]:
    schedule, path = train.lr_schedule, "parallel3d.train.lr_schedule"
    decay = schedule.decay_steps
    if decay is not None and schedule.type != "wsd":
        rule = f'is not read by type "{schedule.type}"'
        yield Problem(f"{path}.decay_steps", decay, rule, 'remove it, or use type "wsd"')
    elif decay is not None and (steps := arithmetic.lr_steps(train, data)) is not None:
        warmup = schedule.warmup_steps
        if warmup + decay > steps:
            rule = f"plus warmup_steps={warmup} exceeds the run's {steps} steps"
            rest = steps - warmup
            remedy = f"use at most {rest}" if rest > 0 else f"use {steps} or less for both"
            yield Problem(f"{path}.decay_steps", decay, rule, remedy)


def _check_scheduler(scheduler: Any, train: TrainConfig) -> Iterator[Problem]:
    if scheduler is None:
        return
    if train.lr_schedule != LrScheduleConfig():
        rule = "conflicts with parallel3d.train.lr_schedule: both set the learning rate"
        yield Problem("scheduler", scheduler.type, rule, "remove one of them")
    total = getattr(scheduler.params, "total_num_steps", None)
    warmup = getattr(scheduler.params, "warmup_num_steps", 0)
    if isinstance(total, int) and total < warmup:
        rule = f"is less than warmup_num_steps={warmup}"
        remedy = f"use {warmup} or more, or a shorter warm-up"
        yield Problem("scheduler.params.total_num_steps", total, rule, remedy)


def _check_profile(train: TrainConfig, mesh: MeshConfig) -> Iterator[Problem]:
    profile, steps = train.profile, train.steps
    if profile and not isinstance(profile.ranks, str) and mesh.dp != "auto":
        size = mesh.sizes.ranks
        if (last := max(profile.ranks)) >= size:
            rule = f"names rank {last}, and the mesh has {size}"
            remedy = f"use ranks from 0 to {size - 1}"
            yield Problem("parallel3d.train.profile.ranks", [*profile.ranks], rule, remedy)
    if profile and steps and profile.start + profile.steps > steps:
        rule = f"ends at step {profile.start + profile.steps}, after the run's {steps} steps"
        if profile.start < steps:
            remedy = f"use steps = {steps - profile.start} or less, or an earlier start"
        else:
            remedy = f"use start = {max(0, steps - profile.steps)} or less"
        value = profile.model_dump(include={"start", "steps"})
        yield Problem("parallel3d.train.profile", value, rule, remedy)


def _check_precision(bf16: Bf16Config, fp16: Fp16Config) -> Iterator[Problem]:
    if bf16.enabled and fp16.enabled:
        remedy = "disable one of them (bf16 needs no loss scale)"
        yield Problem("fp16.enabled", True, "cannot be combined with bf16.enabled", remedy)


def _check_communication_type(
    bf16: Bf16Config, communication_data_type: str | None
) -> Iterator[Problem]:
    if communication_data_type == "bf16" and not bf16.enabled:
        rule = "would round gradients that are not bf16"
        remedy = "use fp32, or set bf16.enabled = true"
        yield Problem("communication_data_type", communication_data_type, rule, remedy)


def _check_offload(zero_optimization: ZeroConfig) -> Iterator[Problem]:
    zero, path = zero_optimization, "zero_optimization"
    for name in ("offload_optimizer", "offload_param"):
        section = getattr(zero, name)
        if section.device == "nvme" and not section.nvme_path:
            remedy = f'add "nvme_path": "/local/nvme" to {name}'
            yield Problem(f"{path}.{name}.device", "nvme", "requires nvme_path", remedy)
    param, optimizer = zero.offload_param.device, zero.offload_optimizer.device
    if param != "none" and zero.stage != 3:
        rule = f"requires sharded parameters (stage 3), but stage is {zero.stage}"
        yield Problem(f"{path}.offload_param.device", param, rule, "use stage 3, or remove it")
    if optimizer == "nvme" and zero.stage != 3:
        rule = f"requires stage 3, but stage is {zero.stage}"
        remedy = 'use stage 3, or device "cpu"'
        yield Problem(f"{path}.offload_optimizer.device", optimizer, rule, remedy)


def _check_nvme(optimizer: OptimizerConfig, zero_optimization: ZeroConfig) -> Iterator[Problem]:
    """Refuse combinations of NVMe settings in which DeepSpeed fails or goes wrong."""
    zero, path, block = zero_optimization, "zero_optimization", "offload_optimizer"
    threshold, offload = zero.stage3_param_persistence_threshold, zero.offload_optimizer
    if zero.offload_param.device == "nvme" and threshold > _LEAST_ON_NVME:
        rule = "would keep parameters unsharded that offload_param puts on NVMe"
        remedy = f"use at most {_LEAST_ON_NVME}"
        yield Problem(f"{path}.stage3_param_persistence_threshold", threshold, rule, remedy)
    if zero.offload_param.device == "nvme" and offload.fast_init:
        rule = "would start from wrong weights, because offload_param puts parameters on NVMe"
        yield Problem(f"{path}.{block}.fast_init", True, rule, "remove it")
    if offload.device != "nvme":
        return
    # The swapper reads master, gradient and states into one buffer each.
    states = (optimizers.kinds(optimizer.file, role) for role in (optimizers.MATRIX, None))
    each = max(4, *(1 + len(kinds) for kinds in states))
    needed = each * (1 + offload.pipeline_read + offload.pipeline_write)
    if offload.buffer_count < needed:
        what = (
            "pipeline_read or pipeline_write" if needed > each else f"the state of {optimizer.type}"
        )
        rule = f"is too few buffers for {what}"
        remedy = f"use {needed} or more, or disable pipeline_read and pipeline_write"
        yield Problem(f"{path}.{block}.buffer_count", offload.buffer_count, rule, remedy)


def _check_optimizer(
    optimizer: OptimizerConfig, zero_optimization: ZeroConfig, model: ModelConfig
) -> Iterator[Problem]:
    """Refuse what the engine, DeepSpeed or a checkpoint cannot do with an optimizer."""
    file, name = optimizers.load(optimizer.file), optimizer.type
    device, kind = zero_optimization.offload_optimizer.device, parametrization_of(model).type
    usable = " or ".join(f'"{place}"' for place in ("none", *file.OFFLOADS))
    rules = [
        (device not in ("none", *file.OFFLOADS), Problem(
            "zero_optimization.offload_optimizer.device", device,
            f"cannot hold the state of {name}", f"use {usable}",
        )),
        (kind not in file.PARAMETRIZATIONS, Problem(
            "parallel3d.model.parametrization.type", kind,
            f"sets learning rates that do not transfer with {name}",
            'use "standard", or optimizer.type = "AdamW"',
        )),
        (kind == "mup" and getattr(optimizer.params, "width_power", 1.0) is None, Problem(
            "optimizer.params.scale", getattr(optimizer.params, "scale", None),
            "has no learning rate that transfers over the width, as muP needs",
            'use "spectral" or "match_rms_adamw"',
        )),
        (device != "none" and getattr(optimizer.params, "torch_adam", False), Problem(
            "optimizer.params.torch_adam", True,
            "cannot be combined with offload_optimizer, which uses DeepSpeed's Adam on the host",
            "remove one of them",
        )),
        *((state.num_bytes != MASTER_BYTES, Problem(
            "optimizer.type", name, f"keeps {state.name} in {state.num_bytes} bytes an element",
            "keep it in fp32 (4 bytes), as checkpoints and DeepSpeed's swap buffers do",
        )) for state in file.STATE),
    ]  # fmt: skip
    yield from (problem for is_broken, problem in rules if is_broken)


CHECKS: tuple[Callable[..., Iterator[Problem]], ...] = (
    *MODEL_CHECKS, _check_layers, _check_schedule, _check_reduction, _check_noise_scale,
    _check_compile, _check_recomputation, _check_rewind, _check_batch, _check_fallbacks,
    _check_plan, _check_length, _check_batch_schedule, _check_batch_sizes, _check_lr_schedule,
    _check_scheduler, _check_profile, _check_precision, _check_communication_type,
    _check_offload, _check_nvme, _check_optimizer,
)  # fmt: skip
