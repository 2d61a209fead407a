"""Arithmetic of mesh, batch and steps, and schedules fitted to the number of steps."""

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from itertools import pairwise
from math import gcd
from typing import Any

from parallel3d.base.counts import read_count
from parallel3d.base.mesh_sizes import MeshSizes
from parallel3d.base.section import Problem
from parallel3d.config.data import DataConfig
from parallel3d.config.parallel3d_block import MeshConfig, TrainConfig
from parallel3d.config.scheduler import TOTAL_STEPS

BATCH = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"
LAWS = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}  # train.batch_lr: exponent of the batch's growth


def data_parallel_size(mesh: MeshConfig, world_size: int) -> int:
    """Return world_size / (pp x cp x tp).

    Raises ConfigError if that is not an integer, or not dp.
    """
    others = mesh.pp * mesh.cp * mesh.tp
    ranks = mesh.sizes.ranks
    sizes = mesh.sizes.of_a_replica
    product = " x ".join(f"{axis}={size}" for axis, size in sizes.items())
    if world_size % others:
        raise Problem(
            "parallel3d.mesh",
            mesh.model_dump(),
            f"{product} = {others} does not divide {world_size} processes",
            f"start {max(1, world_size // others) * others} processes, or choose a "
            f"{' x '.join(sizes)} that divides {world_size}",
        ).error()
    if mesh.dp not in ("auto", world_size // others):
        raise Problem(
            "parallel3d.mesh.dp",
            mesh.dp,
            f"{mesh} is {ranks} ranks, but there are {world_size} processes",
            f'start {ranks} processes, or set dp to {world_size // others} or "auto"',
        ).error()
    return world_size // others


def num_shards(mesh: MeshConfig, dp: int, host_size: int) -> tuple[int | None, list[str]]:
    """Return mesh.dp_shards as a number, and notes; None if it is not set.

    "node" means the most neighbours along dp of whom no group lies on two hosts of `host_size`
    ranks. Raises ConfigError if the ranks of one dp coordinate do.
    """
    if mesh.dp_shards != "node":
        return mesh.dp_shards, []
    inner = mesh.cp * mesh.tp
    if host_size % inner:
        raise Problem(
            "parallel3d.mesh.dp_shards",
            "node",
            f"a host has {host_size} ranks, not a multiple of cp x tp = {inner}",
            "use a number, or a cp and tp that divide the ranks of a host",
        ).error()
    shards = gcd(host_size // inner, dp)
    of_a_host = "1 rank" if host_size == 1 else f"{host_size} ranks"
    return shards, [f"parallel3d.mesh.dp_shards: node = {shards} (a host has {of_a_host})"]


def fallback(mesh: MeshConfig, world_size: int) -> MeshSizes | None:
    """Return the first of mesh.fallbacks with `world_size` ranks; None if the mesh has as many.

    Raises ConfigError if none has. A mesh without fallbacks is for `data_parallel_size` to check.
    """
    if not mesh.fallbacks or (own := mesh.sizes).ranks == world_size:
        return None
    meshes = [MeshSizes.parse(text) for text in mesh.fallbacks]
    if fitting := [sizes for sizes in meshes if sizes.ranks == world_size]:
        return fitting[0]
    numbers = ", ".join(map(str, sorted({sizes.ranks for sizes in (own, *meshes)})))
    raise Problem(
        "parallel3d.mesh.fallbacks",
        mesh.fallbacks,
        f"has no mesh of {world_size} ranks, and {own} has {own.ranks}",
        f"add a mesh for {world_size} processes, or start one of these numbers: {numbers}",
    ).error()


def block_tokens(length: int, cp: int) -> int:
    """Return the size of the blocks of tokens in which samples of `length` are dealt to cp ranks.

    It is 128, the tile of attention kernels, or less in short samples: so that each rank has at
    least four blocks.
    """
    tokens = 128
    while tokens > 1 and length < 4 * cp * tokens:
        tokens //= 2
    return tokens


def batch_sizes(
    batch: int | None, micro: int | None, accumulation: int | None, dp: int
) -> tuple[int, int, int]:
    """Return batch (micro batch x accumulation x dp), micro batch and accumulation.

    Missing sizes are computed from the others; accumulation is 1 if only one size is set. Raises
    ConfigError if the batch is not divisible.
    """
    if batch is None:
        assert micro is not None, "the checks require a batch or a micro batch size"
        accumulation = accumulation or 1
        return micro * accumulation * dp, micro, accumulation
    divides = batch % dp == 0
    if micro is None:
        accumulation = accumulation or 1
        others = [ACCUMULATION] if divides else []
        factors = f"{ACCUMULATION}={accumulation} x dp={dp}"
        micro = _share(batch, accumulation * dp, factors, others)
    elif accumulation is None:
        others = [BATCH, MICRO] if divides else [BATCH]
        accumulation = _share(batch, micro * dp, f"{MICRO}={micro} x dp={dp}", others)
    return batch, micro, accumulation


def _share(batch: int, parts: int, factors: str, others: Iterable[str]) -> int:
    """Return batch / parts; raise ConfigError if the batch is not divisible.

    - `factors`: `parts` in words.
    - `others`: sizes that could be "auto", so that this batch, or one near it, is divisible.
    """
    if batch % parts:
        alternatives = [f"use {_multiples_near(batch, parts)}"]
        alternatives += [f'"{name}": "auto"' for name in others]
        raise Problem(
            BATCH,
            batch,
            f"is not a multiple of {factors} = {parts}",
            ", or ".join(alternatives),
        ).error()
    return batch // parts


def _multiples_near(batch: int, parts: int) -> str:
    """Return the multiples of `parts` below and above a batch, in words."""
    below = batch // parts * parts
    return f"{below} or {below + parts}" if below else str(parts)


def kept_sizes(
    batch: int, micro: int, dp: int, is_runnable: Callable[[int], bool]
) -> tuple[int, int]:
    """Return micro batch and accumulation of a batch that a run keeps on another mesh.

    The micro batch stays if it can, and otherwise is the largest smaller one that can run.

    - `is_runnable`: True if the schedule can run with a number of microbatches.

    Raises ConfigError if there is none.
    """
    if batch % dp:
        sizes = ", ".join(str(size) for size in range(1, batch + 1) if batch % size == 0)
        raise Problem(
            BATCH,
            batch,
            f"of the run that resumes, is not a multiple of dp={dp}",
            f"use a dp of {sizes}, or ask for --{BATCH} {_multiples_near(batch, micro * dp)}",
        ).error()
    share = batch // dp
    for size in range(min(micro, share), 0, -1):
        if share % size == 0 and is_runnable(share // size):
            return size, share // size
    raise Problem(
        BATCH,
        batch,
        f"of the run that resumes, is {share} samples a step for each of dp={dp} ranks, with which "
        "the schedule cannot run",
        f"use a smaller dp or pp, or ask for a larger --{BATCH}",
    ).error()


def batch_phases(train: TrainConfig, data: DataConfig) -> tuple[tuple[int, int], ...]:
    """Return (first sample, samples per step) of each entry of train.batch_schedule."""
    return phases_of(train.batch_schedule, data.sequence_length)


def phases_of(schedule: Iterable[tuple[Any, int]], length: int) -> tuple[tuple[int, int], ...]:
    """Return (first sample, samples per step) of each entry of a batch_schedule.

    - `length`: tokens per sample.
    """
    return tuple(
        (-(-read_count(at, "tokens") // length) if isinstance(at, str) else at, size)
        for at, size in schedule
    )


def batch_at(phases: Iterable[tuple[int, int]], sample: int) -> int:
    """Return the samples of the step that begins at a sample."""
    return [size for first, size in phases if first <= sample][-1]


def samples_of_steps(phases: Sequence[tuple[int, int]], steps: int) -> int:
    """Return the samples in a run's first `steps` steps; `phases` are those of `batch_phases`."""
    sample = 0
    for (_, size), (until, _) in pairwise(phases):
        # The step that reaches the next phase still has this phase's size.
        count = min(steps, max(0, -(-(until - sample) // size)))
        sample = sample + count * size
        steps = steps - count
    return sample + steps * phases[-1][1]


def lr_steps(train: TrainConfig, data: DataConfig) -> int | None:
    """Return the run's length as lr_schedule counts it: with batch_schedule in steps of the first
    batch; None if it is not known.
    """
    phases = batch_phases(train, data)
    if not phases or train.steps is None:
        return train.steps
    return samples_of_steps(phases, train.steps) // phases[0][1]


def lr_factor(train: TrainConfig, size: int) -> float:
    """Return the factor of train.batch_lr for a batch of `size` samples."""
    return float((size / train.batch_schedule[0][1]) ** LAWS[train.batch_lr])


def describe_batches(train: TrainConfig, data: DataConfig) -> str:
    """Return train.batch_schedule in words: sizes, first samples, rates and steps."""
    sizes = [
        f"{size:,} from sample {first:,} (learning rate x {lr_factor(train, size):.4g})"
        for first, size in batch_phases(train, data)
    ]
    length = f"; {train.steps:,} steps" if train.steps else ""
    return f"parallel3d.train.batch_schedule: samples per step {', '.join(sizes)}{length}"


def samples_of_epochs(epochs: float, samples: int, batch: int) -> int:
    """Return the whole samples in `epochs` passes over `samples`.

    Raises ConfigError if they are less than one step, of `batch` samples.
    """
    # Exact fractions, because 0.29 x 100 is 28.999999999999996 in floats.
    num_samples = int(Fraction(str(epochs)) * samples)
    if num_samples < batch:
        raise Problem(
            "parallel3d.train.epochs",
            epochs,
            f"is {num_samples} samples of the corpus's {samples}, less than one step of {batch}",
            "use more epochs or a smaller batch",
        ).error()
    return num_samples


def fit(
    train: TrainConfig, scheduler: Any, data: DataConfig
) -> tuple[TrainConfig, object, list[str]]:
    """Return `train` and DeepSpeed's `scheduler` fitted to train.steps, with notes on changes.

    A warm-up longer than the run is cut to the run, or to the start of the decay. total_num_steps
    = "auto" becomes the run's steps. Without steps, both are returned as they are.
    """
    steps = lr_steps(train, data)
    notes = []
    if steps is None:
        return train, scheduler, []
    schedule = train.lr_schedule
    if schedule.warmup_steps > steps:
        decay = schedule.decay_steps or 0
        shortened = steps - decay if decay < steps else steps
        notes.append(
            f"parallel3d.train.lr_schedule.warmup_steps: {schedule.warmup_steps} exceeds the run's "
            f"{steps} steps; the warm-up is cut to {shortened}"
        )
        schedule = schedule.model_copy(update={"warmup_steps": shortened})
        train = train.model_copy(update={"lr_schedule": schedule})
    if scheduler is not None and getattr(scheduler.params, TOTAL_STEPS, None) == "auto":
        params = scheduler.params.model_copy(update={TOTAL_STEPS: steps})
        scheduler = scheduler.model_copy(update={"params": params})
    return train, scheduler, notes
