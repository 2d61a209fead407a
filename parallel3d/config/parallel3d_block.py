"""The "parallel3d" block: mesh, pipeline, model, data, training and where a run is written."""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, Strict, WrapValidator

from parallel3d import models
from parallel3d.base.section import Choice, PathText, Section
from parallel3d.config import hardware
from parallel3d.config.data import DataConfig
from parallel3d.config.folders import ModelFolders, ScheduleFolders
from parallel3d.config.monitors import Trackers
from parallel3d.schedule import schedules
from parallel3d.schedule.sharding import Weights

Positive = Annotated[int, Field(gt=0)]
_LONGEST_NAME = 100  # characters; file systems take 255 bytes, of which "-2" or a suffix need some
PLAN: Literal["plan"] = "plan"  # in place of a mesh: the planner's first row
# A block that a message gives to be pasted where it is missing.
_SIZES = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
EXAMPLE = {
    "model": {"family": "gpt"} | _SIZES,
    "data": {"sequence_length": 128},
    "train": {"steps": 100},
}
Fixable = Literal[
    "zero_stage", "offload", "micro_batch", "schedule", "recompute", "gradient_reduction", "weights"
]
FAMILY = Choice("family", "model family", models.families, models.config_class)
# pp and tp cannot be derived from the number of processes, so their "auto" means 1.
OneIfAuto = Annotated[Positive, BeforeValidator(lambda value: 1 if value == "auto" else value)]


def _known_schedule(name: str) -> str:
    if name not in schedules.names():
        known = ", ".join(schedules.names())
        raise ValueError(f"names no file in parallel3d/schedule/schedules; use one of: {known}")
    return name


def _plain_name(name: str) -> str:
    """A name that is one folder everywhere, no option on a command line, and no lock's."""
    fits = 0 < len(name.strip()) <= len(name) <= _LONGEST_NAME
    fits = fits and len(name.encode(errors="replace")) <= 2 * _LONGEST_NAME
    strange = not name.isprintable() or name in (".", "..") or name.endswith(".lock")
    if not fits or strange or not re.match(r"[^-/\\][^/\\]*$", name):
        raise ValueError(
            "must be a plain name; write one with letters or digits, as in run-1: no / and \\, "
            "no - in front, nothing invisible, no .lock at the end, "
            f"{_LONGEST_NAME} characters ({2 * _LONGEST_NAME} bytes) at most"
        )
    return name


def _known_hardware(name: str) -> str:
    known = hardware.names()
    if name not in ("auto", *known):
        raise ValueError(f'is not described in configs/hardware; use "auto", {", ".join(known)}')
    return name


def _mesh_or_plan(value: Any, _: Any) -> Any:
    """A mesh, or the word "plan"; not left to the union, whose errors do not name the setting."""
    return (
        value if value == PLAN or isinstance(value, Section) else MeshConfig.model_validate(value)
    )


class MeshConfig(Section):
    """How many ranks each axis of the mesh has; their product is the number of processes."""

    pp: OneIfAuto = 1
    """Pipeline-parallel ranks; "auto" means 1."""
    dp: Positive | Literal["auto"] = "auto"
    """Data-parallel ranks; "auto" takes the processes that pp and tp leave."""
    tp: OneIfAuto = 1
    """Tensor-parallel ranks; "auto" means 1."""
    sequence_parallel: bool = False
    """Split activations between the blocks over tp, along the sequence (arXiv:2205.05198)."""

    def __str__(self) -> str:
        return f"pp={self.pp} x dp={self.dp} x tp={self.tp}"


class PipelineConfig(Section):
    """How microbatches flow through the stages."""

    schedule: Annotated[str, AfterValidator(_known_schedule)] = "gpipe"
    """The order of forwards and backwards: a file name in parallel3d/schedule/schedules."""
    stages_per_rank: Positive = 1
    """Stages that each pipeline rank holds; more than 1 for schedules that interleave them."""
    gradient_reduction: Literal["auto", "per_step", "per_microbatch"] = "auto"
    """Reduce gradients once a step, or after each microbatch (less memory, more traffic); "auto"
    means after each microbatch at ZeRO-2, and once a step at the other stages."""
    weights: Literal["auto", "per_microbatch", "per_pass", "per_step"] = "auto"
    """ZeRO-3: gather a stage's weights in each forward and backward (least memory); once for all
    its forwards and once for all its backwards ("per_pass": once, where these overlap or nothing
    else stands between them); or once a step. "auto": per_step if the planner finds room for it on
    the fullest device; else, and with offload_param, per_pass if there is room or it takes no more
    than per_microbatch; else that, also where the device's memory is not known."""
    scatter_activations: bool = False
    """Where all ranks of tp have the whole of what goes to the next stage (no sequence_parallel),
    each sends its part of it, and they gather the parts there: a tp-th of the bytes between nodes.
    """
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """"selective" computes the attention again in backward (arXiv:2205.05198), "full" the layer."""


def reduces_once(zero_stage: int, gradient_reduction: str) -> bool:
    """True if gradients are reduced once a step, rather than after each microbatch.

    At ZeRO-0 it is always once: where nothing is sharded, the other would save no memory.
    """
    automatic = "per_microbatch" if zero_stage == 2 else "per_step"
    chosen = automatic if gradient_reduction == "auto" else gradient_reduction
    return zero_stage == 0 or chosen == "per_step"


def gathered_for(weights: str) -> Weights:
    """Return for how long ZeRO-3's weights stay gathered; "auto" is taken for its fallback."""
    known: dict[str, Weights] = {"per_pass": "per_pass", "per_step": "per_step"}
    return known.get(weights, "per_microbatch")


class PlanConfig(Section):
    """What the planner may choose, where the mesh is "plan"."""

    fix: Annotated[tuple[Fixable, ...], Strict(False)] = ()
    """What stays as it is written here; all else is the planner's: mesh, micro batch, schedule and
    stages_per_rank, gradient_reduction, weights, activation_checkpointing ("recompute"), ZeRO
    stage, offload and sequence parallelism."""


class LrScheduleConfig(Section):
    """The learning rate of each step, as a fraction of optimizer.params.lr."""

    type: Literal["constant", "cosine", "linear", "wsd"] = "constant"
    """After the warm-up: stay, or go down to min_ratio at the last step: by half a cosine, in a
    line, or ("wsd") after a stable phase as 1 - sqrt over the last decay_steps."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises linearly from 0; where the run is shorter, it ends
    with the run (or where the decay begins), and says so."""
    min_ratio: float = Field(default=0.1, ge=0, le=1)
    """Where "cosine", "linear" and "wsd" end."""
    decay_steps: int | None = Field(default=None, gt=0)
    """Last steps over which "wsd" decays; null means a fifth of the run."""


Ranks = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Strict(False), Field(min_length=1)]


class ProfileConfig(Section):
    """Which steps to profile."""

    start: int = Field(ge=0)
    """The first step that is profiled, counted from 0."""
    steps: int = Field(default=1, gt=0)
    """How many steps are profiled."""
    ranks: Literal["auto", "all"] | Ranks = "auto"
    """Ranks that are profiled: a list of ranks, "all", or "auto" for one of each pipeline and
    tensor coordinate (those of dp 0)."""


class TrainConfig(Section):
    """How long to train, and when to evaluate."""

    steps: Positive | None = None
    """Optimizer steps; give this, max_tokens or epochs."""
    max_tokens: Positive | None = None
    """Tokens to train on: as many whole steps as fit."""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """Passes over the training part of the corpus: as many whole steps as fit."""
    profile: ProfileConfig | None = None
    """Steps to write a profiler trace of; null means none."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Fixes weights, dropout and the order of samples."""
    lr_schedule: LrScheduleConfig = LrScheduleConfig()
    """The learning rate over the steps."""
    evaluate_every: int = Field(default=0, ge=0)
    """Steps between held-out losses; 0 means only after the last step."""
    evaluate_samples: int = Field(default=64, gt=0)
    """Held-out samples in an evaluation."""
    stop_after: Positive | None = None
    """Save and stop after this step, as if asked to; learning rates stay planned for all steps."""
    timeout_seconds: int = Field(default=300, ge=0)
    """How long a rank waits for another before the run fails and names it; after the first step.
    0: for ever, as one wants it who holds a rank in a debugger; dead and stopped ranks still end
    the run."""
    compile: Literal["none", "pointwise", "block"] = "none"
    """What torch.compile makes kernels of, in the first step and the first evaluation: "pointwise":
    norms, rotary positions, activation functions and the loss, at every ZeRO stage; "block": whole
    blocks, for ZeRO-0 to 2 and schedules that do not make weight gradients apart."""
    overlap: bool = True
    """Run tensor parallelism's collectives of a backward under its matrix products. The same
    numbers; false takes less memory under sequence_parallel: one input and its gradient fewer."""
    overlap_update: bool = False
    """ZeRO-3 with its optimizer on the host: the new weights go to the device by parts, out of 128
    MiB of page-locked memory, while the host goes on with the update. The same numbers."""
    tf32: bool = False
    """Multiply fp32 matrices as TF32, with 10 bits of mantissa, where the device can: several times
    faster, no longer equal to a CPU within 1e-4. Nothing changes in bf16 or fp16."""
    deterministic: bool = False
    """Use algorithms that give the same bits each time, which a bitwise resume on GPUs needs.
    Slower: attention adds its gradients in a fixed order, without cuDNN's kernel. On CPUs the bits
    are the same without it."""


def _resume_point(value: Any) -> Any:
    if value in ("auto", "none") or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    if isinstance(value, str) and value.strip():
        return int(value) if value.isdecimal() else value
    raise ValueError('is no place to resume from; use "auto", "none", a step, or a path')


class CheckpointConfig(Section):
    """When the training state is saved, and what a run starts from."""

    every: int = Field(default=200, ge=0)
    """Steps between two checkpoints; there is always one after the last step and when the run is
    stopped. 0: only then."""
    keep: int = Field(default=2, ge=2)
    """Newest checkpoints that are kept; an older one goes once the newer ones are verified."""
    at: Annotated[tuple[Positive, ...], Strict(False)] = ()
    """Steps after which there is a checkpoint too, which is kept besides: where other runs begin,
    by its path as their `resume`."""
    asynchronous: bool = True
    """Copy the state to host memory and write it while training goes on; false: training waits."""
    resume: Annotated[int | str, BeforeValidator(_resume_point)] = "auto"
    """"auto": the run's newest checkpoint that all ranks can verify, or a fresh start; "none": a
    fresh start in a new folder; a step of this run, or the path of a checkpoint: that one."""


class OutputConfig(Section):
    """Where a run is written: <directory>/<name>/."""

    directory: PathText = Field(default="runs", min_length=1)
    """Folder of all runs, relative to the working directory; one that all nodes share."""
    name: Annotated[str, AfterValidator(_plain_name)] = "auto"
    """Name of this run; one that exists is resumed. "auto": the newest unfinished run of the same
    config, else a new readable name. One folder: no / and \\, not . or .., no - in front, nothing
    invisible, no .lock at the end, 100 characters at most."""
    trackers: Trackers = ()
    """Where metrics go beside metrics.jsonl, as ["tensorboard", "wandb"]; "tensorboard" and "csv"
    write into the run's folder. A tracker that fails is dropped, and training goes on."""
    tensorboard: bool = False
    """The same as "tensorboard" among the trackers."""
    save_weights: bool = True
    """Write the trained weights as a folder that transformers loads."""
    hardware: Annotated[str, AfterValidator(_known_hardware)] = "auto"
    """Whose peak FLOP/s MFU is measured against: a name in configs/hardware, or "auto"."""
    model_folders: ModelFolders = ()
    """Folders with model families of your own, each of them a folder with spec.py and blocks.py
    (docs/add-a-model.md); PARALLEL3D_MODELS lists them for commands without a config."""
    schedule_folders: ScheduleFolders = ()
    """Folders with schedules of your own, each of them a file (docs/add-a-schedule.md);
    PARALLEL3D_SCHEDULES lists them for commands without a config."""


class Parallel3DConfig(Section):
    """The "parallel3d" block of a ds.json, which DeepSpeed ignores."""

    mesh: Annotated[MeshConfig | Literal["plan"], WrapValidator(_mesh_or_plan)] = MeshConfig()
    """"plan" takes the first row of launch/plan.py for so many processes, at train_batch_size."""
    plan: PlanConfig = PlanConfig()
    """What the planner may choose."""
    pipeline: PipelineConfig = PipelineConfig()
    """How microbatches flow through the stages."""
    model: Annotated[Any, PlainValidator(FAMILY)]
    """The model: its family, and that family's own settings."""
    data: DataConfig
    """The corpus."""
    train: TrainConfig
    """Length, seed, learning rate, evaluation."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saving and resuming."""
    run: OutputConfig = OutputConfig()
    """Where the run is written."""
