"""The "parallel3d" block: mesh, pipeline, model, data, training and output."""

import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    PlainValidator,
    Strict,
    WrapValidator,
)

from parallel3d import models
from parallel3d.base.counts import read_count
from parallel3d.base.mesh_sizes import MeshSizes
from parallel3d.base.paths import expand_path
from parallel3d.base.section import (
    Choice,
    Count,
    FolderText,
    Items,
    Natural,
    NaturalCount,
    Positive,
    PositiveCount,
    Problem,
    Section,
    Share,
    Strings,
    Tokens,
)
from parallel3d.config import hardware
from parallel3d.config.data import DataConfig
from parallel3d.config.folders import ModelFolders, OptimizerFolders, ScheduleFolders
from parallel3d.config.monitors import Trackers
from parallel3d.config.published import Published
from parallel3d.model import recompute
from parallel3d.model.recompute import Recompute
from parallel3d.schedule import schedules
from parallel3d.schedule.sharding import Weights

# A config and its JSON have the text of the value.
Recomputation = Annotated[
    Recompute, PlainValidator(recompute.parse), PlainSerializer(str, return_type=str)
]
_LONGEST_NAME = 100  # characters; file systems allow 255 bytes, which must also hold suffixes
PLAN: Literal["plan"] = "plan"  # in place of a mesh: the first row of the planner
# Shown in the message where the block is missing, so that it can be pasted.
EXAMPLE = {
    "model": {
        "family": "gpt",
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    },
    "data": {"sequence_length": 128},
    "train": {"steps": 100},
}
Fixable = Literal[
    "zero_stage", "offload", "micro_batch", "schedule", "recompute", "gradient_reduction", "weights"
]
FAMILY = Choice("family", "model family", models.families, models.config_class)
# pp, cp and tp cannot be derived from the number of processes, so their "auto" means 1.
OneIfAuto = Annotated[Positive, BeforeValidator(lambda value: 1 if value == "auto" else value)]


def _known_schedule(name: str) -> str:
    if name not in schedules.names():
        raise ValueError(f"is not a schedule; use one of: {', '.join(schedules.names())}")
    return name


def _known_sizes(text: str) -> str:
    try:
        MeshSizes.parse(text)
    except ValueError:
        raise ValueError("must be the sizes of a mesh; write pp x dp x tp, as in 2x2x1") from None
    return text


def _plain_name(name: str) -> str:
    """Return the name if it is a folder's name on every system, no option and no lock file."""
    is_short = max(2 * len(name), len(name.encode(errors="replace"))) <= 2 * _LONGEST_NAME
    is_plain = re.fullmatch(r"[^-/\\][^/\\]*", name) and name.strip(" .") and name.isprintable()
    if not is_short or not is_plain or name.endswith(".lock"):
        raise ValueError(
            "must be a plain name; use letters and digits, as in run-1: no / or \\, no - at the "
            "start, no invisible characters, no .lock at the end, at most "
            f"{_LONGEST_NAME} characters ({2 * _LONGEST_NAME} bytes)"
        )
    return name


def _known_hardware(name: str) -> str:
    if name.endswith(".json"):
        return expand_path(name)  # read where it is used: a run's config goes to other machines
    if name != "auto":
        hardware.file_of(name)
    return name


def _is_none(value: object) -> bool:
    return value is None


def _mesh_or_plan(value: object, _: object) -> object:
    """Return a mesh or "plan"; pydantic's errors for the union would not name the setting."""
    return (
        value if value == PLAN or isinstance(value, Section) else MeshConfig.model_validate(value)
    )


class MeshConfig(Section):
    """How many ranks each axis of the mesh has; their product is the number of processes."""

    pp: OneIfAuto = 1
    """Pipeline-parallel ranks; "auto" means 1."""
    dp: Positive | Literal["auto"] = "auto"
    """Data-parallel ranks; "auto" means the number of processes / (pp x cp x tp)."""
    cp: OneIfAuto = 1
    """Context-parallel ranks, which share the tokens of each sample; "auto" means 1."""
    tp: OneIfAuto = 1
    """Tensor-parallel ranks; "auto" means 1."""
    ep: Positive = 1
    """Expert-parallel ranks: so many consecutive dp ranks divide the experts of each layer among
    them, and send each other the tokens (docs/experts.md). Divides dp and num_experts."""
    dp_shards: Positive | Literal["node"] | None = Field(default=None, exclude_if=_is_none)
    """ZeRO shards over so many consecutive dp ranks (and their cp ranks); the other dp ranks hold
    copies of the shards (docs/hybrid-sharding.md). Divides dp, and is a multiple of ep. "node": the
    dp ranks of a host; null: all, which is plain ZeRO."""
    sequence_parallel: bool = False
    """Shard the activations outside attention and MLP over tp, along the sequence
    (arXiv:2205.05198)."""
    fallbacks: Items[Annotated[str, AfterValidator(_known_sizes)]] = ()
    """Meshes for other numbers of processes, such as ["2x2x1", "1x2x1"] (pp x dp x tp, or pp x dp x
    cp x tp): if torchrun starts a run with fewer or more hosts, it goes on with the first that has
    as many ranks, the same micro batch and the same batch (docs/several-nodes.md). dp must be a
    number."""

    @property
    def sizes(self) -> MeshSizes:
        """The mesh's sizes; "auto" counts as 1."""
        return MeshSizes(pp=self.pp, dp=1 if self.dp == "auto" else self.dp, cp=self.cp, tp=self.tp)

    @property
    def num_copies(self) -> int:
        """The copies of what ZeRO shards; 1 while "auto" or "node" leaves their number open."""
        if self.dp == "auto" or self.dp_shards is None or self.dp_shards == "node":
            return 1
        return self.dp // self.dp_shards

    @property
    def groups(self) -> dict[str, Any]:
        """The arguments of `Mesh`, once all of them are known."""
        return {**self.sizes._asdict(), "ep": self.ep, "dp_shards": self.dp_shards}

    def __str__(self) -> str:
        axes = [*self.sizes.shown, *(["ep"] if self.ep > 1 else [])]
        axes += [] if self.dp_shards is None else ["dp_shards"]
        return " x ".join(f"{axis}={getattr(self, axis)}" for axis in axes)


class PipelineConfig(Section):
    """How microbatches pass through the pipeline's stages."""

    schedule: Annotated[str, AfterValidator(_known_schedule)] = "gpipe"
    """The order of forwards and backwards: "gpipe", "one_f_one_b", "interleaved", ...
    (docs/schedules.md lists them)."""
    stages_per_rank: Positive = 1
    """Stages per pipeline rank; more than 1 requires an interleaved schedule."""
    gradient_reduction: Literal["auto", "per_step", "per_microbatch"] = "auto"
    """When gradients are reduced over dp: once per step, or after every microbatch (less memory,
    more traffic). "auto" is per_microbatch at ZeRO-2 without mesh.dp_shards, and per_step else;
    with `weights` "auto", per_microbatch where only that fits, or the planner finds it faster."""
    weights: Literal["auto", "per_microbatch", "per_pass", "per_step"] = "auto"
    """ZeRO-3: how long a stage's weights stay gathered. "per_microbatch" gathers them for each
    forward and backward (least memory); "per_pass" once for all forwards and once for all backwards
    (once in all where these interleave); "per_step" once per step. "auto" is the planner's fastest
    that fits on the fullest device (on CPUs: the longest that fits in a rank's share of free host
    memory; never per_step with offload_param), and per_microbatch on unknown devices."""
    activation_checkpointing: Recomputation = recompute.NONE
    """Recompute in the backward: "selective" the attention (arXiv:2205.05198), "mlp" the MLP up to
    its last product, "full" the whole layer, {"full": 3} the first 3 layers of each stage; or a
    list of "layernorm", "core_attn", "mlp_act", "mlp". Also written "full:3" and
    "core_attn+mlp_act" (docs/long-context.md)."""
    offload_activations: Literal["none", "cpu"] = "none"
    """"cpu": the activations that layers save wait in host memory from forward to backward. On a
    GPU the copies run beside the computes."""

    @property
    def gathered_weights(self) -> Weights:
        """How long ZeRO-3's weights stay gathered; "auto" counts as its fallback."""
        return "per_microbatch" if self.weights == "auto" else self.weights

    def reduces_once(self, zero_stage: int) -> bool:
        """True if gradients are reduced once a step, rather than after each microbatch.

        ZeRO-0 always reduces once per step, because reducing earlier would not save memory there.
        """
        chosen = self.gradient_reduction
        if chosen == "auto":
            chosen = "per_microbatch" if zero_stage == 2 else "per_step"
        return zero_stage == 0 or chosen == "per_step"


class PlanConfig(Section):
    """Limits for the planner with mesh "plan", and its assumptions."""

    fix: Items[Fixable] = ()
    """Settings that the planner must not change. It chooses the rest: mesh, micro batch, schedule
    (with stages_per_rank), gradient_reduction, weights, activation_checkpointing ("recompute"),
    ZeRO stage, offload and sequence parallelism."""
    ep_imbalance: float = Field(default=1.1, ge=1)
    """With mesh.ep, the tokens that the busiest rank's experts get relative to the mean; 1.0 means
    even loads. metrics.jsonl has the measured loads."""


class LrScheduleConfig(Section):
    """The learning rate over the run, as a fraction of optimizer.params.lr.

    With train.batch_schedule a step counts by its samples: warm-up, decay and the run's length are
    measured in steps of the first batch, so the curve is a function of the tokens, whichever of
    steps, max_tokens and epochs limits the run.
    """

    type: Literal["constant", "cosine", "linear", "wsd"] = "constant"
    """Shape after the warm-up: "constant"; or decay to min_ratio at the last step by half a cosine,
    linearly, or ("wsd": warm-up, stable, decay) as 1 - sqrt over the last decay_steps."""
    warmup_steps: NaturalCount = 0
    """Steps of linear warm-up. In a shorter run the warm-up is cut to the run's length (or to the
    start of the decay), with a note. With train.batch_schedule: steps of the first batch."""
    min_ratio: Share = 0.1
    """Final learning rate of "cosine", "linear" and "wsd", as a fraction of the peak."""
    decay_steps: Count | None = Field(default=None, gt=0)
    """Steps over which "wsd" decays; null means a fifth of the run. With train.batch_schedule:
    steps of the first batch."""


Ranks = Annotated[Items[Natural], Field(min_length=1)]


class ProfileConfig(Section):
    """Which steps to profile."""

    start: NaturalCount
    """First step to profile, counted from 0."""
    steps: PositiveCount = 1
    """Number of steps to profile."""
    ranks: Literal["auto", "all"] | Ranks = "auto"
    """Ranks that are profiled: a list of ranks, "all", or "auto" for one of each pipeline and
    tensor coordinate (those of dp 0)."""


class TasksConfig(Section):
    """When to score a run on tasks, which needs the extra `tasks` (docs/after-training.md)."""

    every: NaturalCount = 0
    """Steps between scores; 0 scores only after the last step."""
    tasks: Strings = ()
    """Names of tasks of lm_eval, and task files (.yaml); without any nothing is scored."""

    def _problems(self) -> Iterable[Problem]:
        if self.every and not self.tasks:
            yield Problem("tasks", [], "is empty", 'name tasks, such as ["arc_easy", "mine.yaml"]')


class CheckBitsConfig(Section):
    """When to compare the bits of what several ranks hold."""

    every: NaturalCount = 0
    """Steps between comparisons; 0 compares nothing. Data-parallel replicas (the weights, at ZeRO-0
    also masters and moments), parameters that tp does not cut, tied weights and the gradient norm
    must be the same, and messages between stages must arrive as they were sent; else the run stops
    and names the ranks. On GPUs also set train.deterministic, without which tensor-parallel copies
    may round unlike."""
    recompute_every: NaturalCount = 0
    """Steps between recomputations; 0 computes nothing again. One microbatch of each rank is
    computed again on another rank, from the masters' weights, and compared bit for bit (on GPUs
    only with train.deterministic, else within what rounding explains). It names the wrong rank,
    layer and microbatch also at dp = 1 and under ZeRO-3. Takes as long as one microbatch more."""
    on_wrong: Literal["stop", "rewind"] = "stop"
    """After wrong bits: "stop" all ranks, or "rewind" once to the newest checkpoint that is not
    after the last comparison without a difference, and train the same batches again. Either way
    later checkpoints are set aside."""


class EmaConfig(Section):
    """The exponential moving average of the weights."""

    decay: float = Field(default=0.999, ge=0, lt=1)
    """After a step the average is decay x average + (1 - decay) x weights. It starts at the
    weights before the first step."""
    every: PositiveCount = 1
    """Steps from one update of the average to the next. Skipped steps do not update it."""


def _known_position(position: object) -> object:
    if isinstance(position, str) and position.rstrip("s").endswith("token"):
        read_count(position, "tokens")
        return position
    return read_count(position)


# A number of samples, or a text with a number of tokens: "2M tokens".
_Position = Annotated[int | str, BeforeValidator(_known_position)]
_Batch = Annotated[tuple[_Position, PositiveCount], Strict(False)]


class TrainConfig(Section):
    """How long to train, and when to evaluate."""

    steps: PositiveCount | None = None
    """Length of the run in optimizer steps; set exactly one of steps, max_tokens and epochs."""
    max_tokens: Annotated[Tokens, Field(gt=0)] | None = None
    """Length of the run in tokens, rounded down to whole steps."""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """Length of the run in passes over the training data, rounded down to whole steps."""
    profile: ProfileConfig | None = None
    """Steps for which to write a profiler trace; null disables profiling."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of initial weights, dropout and the order of samples."""
    lr_schedule: LrScheduleConfig = LrScheduleConfig()
    """Learning-rate schedule."""
    batch_schedule: Items[_Batch] = ()
    """Samples per step that change during the run: [[0, 64], ["2M tokens", 128]] starts with 64 and
    takes 128 from the first step that begins after 2 million tokens. A position is a number of
    samples, or text with a number of tokens (samples x sequence_length). The micro batch stays and
    the accumulation follows, so each size must be a multiple of micro batch x dp. train_batch_size
    is the first size. Positions count consumed samples, so a run resumes on any mesh."""
    batch_lr: Literal["none", "sqrt", "linear"] = "none"
    """Factor on the learning rate with batch_schedule, by a step's batch relative to the first one:
    1, its square root, or the ratio itself."""
    evaluate_every: NaturalCount = 0
    """Steps between evaluations on held-out text; 0 evaluates only after the last step."""
    noise_scale_every: NaturalCount = 0
    """Steps between measurements of the gradient noise scale (`gradient_noise` in metrics.jsonl);
    0 measures nothing. Needs dp of 2 or more, and gradients that are reduced once per step."""
    layer_history: NaturalCount = 50
    """Last steps of which each layer's gradient norm, update and largest output are kept on the
    device. A spike, a bad step or a request to save writes them to layers/step-N.json and names the
    layer that left its own range first (docs/after-training.md); 0 keeps none."""
    evaluate_samples: PositiveCount = 64
    """Held-out samples per evaluation."""
    ema: EmaConfig | None = Field(default=None, exclude_if=_is_none)
    """Keep an exponential moving average of the weights, in fp32 and sharded like the master
    weights, where those are (4 bytes a parameter over the shards); null keeps none. It is evaluated
    beside the weights (`held_out_loss_ema` in metrics.jsonl) and exported by `convert export --ema`
    (docs/after-training.md)."""
    evaluate_tasks: TasksConfig = TasksConfig()
    """Scores on tasks of the library lm_eval."""
    stop_after: PositiveCount | None = None
    """Save and stop after this step. The learning-rate schedule still spans the full run."""
    on_nonfinite: Literal["stop", "skip", "rewind"] = "stop"
    """If a loss or the gradient norm of a step is not finite: "stop" the run; "skip" the update of
    this batch; or "rewind" to the newest checkpoint and go on after this batch, so that the batches
    since the checkpoint are skipped. Overflows of fp16 only lower its loss scale."""
    on_spike: Literal["ignore", "stop", "skip", "rewind"] = "ignore"
    """The same if the loss or the gradient norm spikes: it lies more than spike_score robust
    standard deviations (1.4826 x the median absolute deviation) above the median of the last 128
    trained steps. The first 16 steps cannot spike."""
    spike_score: float = Field(default=8.0, gt=0)
    """Robust standard deviations above the median that make a spike."""
    max_skips: PositiveCount = 10
    """Most batches that may be skipped and rewound in a run; one more bad batch stops it."""
    check_bits: CheckBitsConfig = CheckBitsConfig()
    """Comparison of what several ranks hold."""
    digest_every: NaturalCount = 0
    """Steps between digests of the training state, in digests.jsonl; 0 writes none. `parallel3d
    runs diff` compares those of two runs, which may have different meshes."""
    timeout_seconds: NaturalCount = Field(default=300, le=10**9)
    """Seconds that a rank waits for another, after the first step, before the run fails and names
    that rank. 0 disables the timeout (useful with a debugger). Dead or stopped ranks still end the
    run."""
    compile: Literal["auto", "none", "pointwise", "block"] = "auto"
    """Compile with torch.compile during the first step and the first evaluation: "pointwise" the
    norms, rotary positions, activation functions and the loss; "block" whole transformer blocks
    (not with ZeRO-3 or schedules that split the backward, such as zero_bubble). "auto" is
    "pointwise" on CUDA devices where Triton compiles, and "none" else."""
    overlap: bool = True
    """Overlap the collectives of tensor parallelism with matrix products in the backward. Does not
    change results. With sequence_parallel, false saves the memory of one layer input and its
    gradient."""
    overlap_update: bool = False
    """ZeRO-3 with an offloaded optimizer: copy updated weights to the device while the host updates
    the next ones, through 128 MiB of page-locked memory. Does not change results."""
    tf32: bool = False
    """Multiply fp32 matrices in TF32 (10 mantissa bits) on devices that support it. Several times
    faster, but results no longer match a CPU within 1e-4. No effect in bf16 or fp16."""
    deterministic: bool = False
    """Use deterministic algorithms on GPUs, which a bitwise resume requires. Slower: attention
    accumulates gradients in a fixed order, without cuDNN's kernel. CPUs are always deterministic.
    """


def _resume_point(value: object) -> object:
    if isinstance(value, str) and re.fullmatch("[0-9]{1,18}", value):
        return int(value)
    is_step = type(value) is int and value >= 0
    is_name = isinstance(value, str) and value.strip() and not value.isdecimal()
    if is_step:
        return value
    if is_name:
        return expand_path(str(value))
    raise ValueError(
        'must be "auto", "none", a step, or the path of a checkpoint; write one of these'
    )


class CheckpointConfig(Section):
    """When to save the training state, and what to resume from."""

    every: NaturalCount = 200
    """Steps between checkpoints. The last step, and the step at which a run is stopped, are always
    saved; 0 saves only those."""
    keep: Count = Field(default=2, ge=2)
    """Number of newest checkpoints to keep; an older one is deleted after the newer ones are
    verified."""
    at: Items[PositiveCount] = ()
    """More steps to save after. These checkpoints are never deleted; other runs can start from them
    (checkpoint.resume)."""
    asynchronous: bool = True
    """Copy the state to host memory and write it while training continues; false makes training
    wait."""
    in_memory_every: NaturalCount = 0
    """Steps between copies of the state in the memory of each rank's host and of the next host,
    from which a run goes on after the loss of a process or a host; 0 keeps none. Two steps are
    kept, each of 12 bytes per parameter over all ranks; with several hosts, 24."""
    in_memory_folder: FolderText = Field(default="/dev/shm", min_length=1)
    """Folder of these copies on each host, in a file system in memory."""
    resume: Annotated[int | str, BeforeValidator(_resume_point)] = "auto"
    """Where to start: "auto" at the run's newest checkpoint that all ranks can verify, if there is
    one; "none" at step 0, in a new folder; or at a step of this run, or the path of a checkpoint.
    """


class OutputConfig(Section):
    """Output of a run, in <directory>/<name>/."""

    directory: FolderText = Field(default="runs", min_length=1)
    """Folder of all runs, relative to the working directory. All nodes must share it."""
    name: Annotated[str, AfterValidator(_plain_name)] = "auto"
    """Name of the run; an existing run is resumed. "auto" is the newest unfinished run of the same
    config, or else a new name. No / or \\, no - at the start, no .lock at the end, at most 100
    characters."""
    trackers: Trackers = ()
    """Trackers that receive the metrics besides metrics.jsonl, such as ["tensorboard", "wandb"].
    "tensorboard" and "csv" write to the run's folder. If a tracker fails, training continues
    without it."""
    tensorboard: bool = False
    """Same as adding "tensorboard" to the trackers."""
    save_weights: bool = True
    """Also write the trained weights as a folder that transformers loads."""
    hardware: Annotated[str, AfterValidator(_known_hardware)] = "auto"
    """Device whose peak FLOP/s define MFU: a name in configs/hardware, or "auto"."""
    published: Published | None = None
    """Special ids and generation settings of the model in `from_pretrained`, which training leaves
    as they are and an export has again. Filled in when the folder is read."""
    model_folders: ModelFolders = ()
    """Folders of your own model families, each a folder with spec.py and blocks.py
    (docs/add-a-model.md). For commands without a config, set PARALLEL3D_MODELS."""
    schedule_folders: ScheduleFolders = ()
    """Folders of your own schedules, each a file (docs/add-a-schedule.md). For commands without a
    config, set PARALLEL3D_SCHEDULES."""
    optimizer_folders: OptimizerFolders = ()
    """Folders of your own optimizers, each a file (docs/add-an-optimizer.md). For commands without
    a config, set PARALLEL3D_OPTIMIZERS."""


class Parallel3DConfig(Section):
    """The "parallel3d" block of a ds.json, which DeepSpeed ignores."""

    mesh: Annotated[MeshConfig | Literal["plan"], WrapValidator(_mesh_or_plan)] = MeshConfig()
    """Ranks per axis; or "plan" for the first row that `parallel3d plan` prints for this number of
    processes and train_batch_size."""
    plan: PlanConfig = PlanConfig()
    """Limits for the planner."""
    pipeline: PipelineConfig = PipelineConfig()
    """How microbatches pass through the pipeline's stages."""
    model: Annotated[Any, PlainValidator(FAMILY)]
    """The model family and its settings."""
    data: DataConfig
    """The corpus, its tokenizer, and how it is cut into samples."""
    train: TrainConfig
    """Length, seed, learning rate and evaluation."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saving and resuming."""
    run: OutputConfig = OutputConfig()
    """Name, folder and trackers of the run."""
