"""The whole config of a run: what DeepSpeed's file holds, plus the "parallel3d" block."""

import json
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator, PrivateAttr, ValidationError

from parallel3d.base import explain, reader
from parallel3d.base.masking import mask_values
from parallel3d.base.section import Problem, Problems, Section, Size
from parallel3d.config import arithmetic, auto, checks, deepspeed, deepspeed_keys, parallel3d_block
from parallel3d.config.data import DataConfig
from parallel3d.config.deepspeed import (
    AioConfig,
    Bf16Config,
    Fp16Config,
    OptimizerConfig,
    ZeroConfig,
)
from parallel3d.config.monitors import (
    CometConfig,
    CommsLoggerConfig,
    CsvMonitorConfig,
    FlopsProfilerConfig,
    TensorBoardConfig,
    WandbConfig,
)
from parallel3d.config.normalise import apply_overrides, normalise
from parallel3d.config.parallel3d_block import (
    PLAN,
    CheckpointConfig,
    MeshConfig,
    OutputConfig,
    Parallel3DConfig,
    PipelineConfig,
    Positive,
    TrainConfig,
)
from parallel3d.config.scheduler import SCHEDULER

# Settings of the release before, with what to do without them; to be dropped in the next.
_REMOVED = {
    "parallel3d.train": {
        "check_layers": "was removed with the check of layers at the start; remove it, and run "
        "`parallel3d verify`, which compares them with one process"
    }
}
# What says where and how a run is written, how far this time, and how fast, not what is trained.
_APART = (
    *("steps_per_print", "wall_clock_breakdown", "flops_profiler", "comms_logger", "aio"),
    *("tensorboard", "csv_monitor", "wandb", "comet"),
    *(f"zero_optimization.offload_{what}.nvme_path" for what in ("optimizer", "param")),
    *(
        "parallel3d.run",
        "parallel3d.checkpoint",
        "parallel3d.pipeline.weights",
        "parallel3d.data.cache",
        "parallel3d.data.max_line_bytes",
        "parallel3d.data.workers",
        "parallel3d.data.read_ahead",
        "parallel3d.data.remote_cache_bytes",
    ),
    *(f"parallel3d.train.{name}" for name in ("stop_after", "timeout_seconds", "profile")),
)
PLACED = (
    *("zero_optimization", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    *("parallel3d.mesh", "parallel3d.plan", "parallel3d.pipeline"),
)
"""How a run is spread over devices and what is offloaded, which changes no number beyond rounding;
the global batch is train_batch_size."""


class RunConfig(Section):
    """One ds.json: DeepSpeed's keys with DeepSpeed's meaning, and the "parallel3d" block."""

    refused: ClassVar[Mapping[str, Mapping[str, str]]] = _REMOVED | deepspeed_keys.REASONS
    autos: ClassVar[Sequence[str]] = [rule.path for rule in auto.RULES]

    train_batch_size: Positive | None = None
    """Samples in a step: micro batch x accumulation x dp. Of the three, what is not given is
    computed from the others, as DeepSpeed does."""
    train_micro_batch_size_per_gpu: Positive | None = None
    """Samples in a microbatch, on each data-parallel rank."""
    gradient_accumulation_steps: Positive | None = None
    """Microbatches in a step, which are the microbatches of one pass through the pipeline."""
    gradient_clipping: float = Field(default=1.0, ge=0)
    """Largest global gradient norm; 0 turns clipping off. The default is DeepSpeed's."""
    steps_per_print: Annotated[Size, Field(gt=0)] = 10
    """Steps between two lines of progress where standard error is no terminal."""
    wall_clock_breakdown: bool = False
    """Print the parts of a step's time, every steps_per_print steps."""
    flops_profiler: FlopsProfilerConfig = FlopsProfilerConfig()
    """Print FLOPs after a step: parallel3d's own figures."""
    comms_logger: CommsLoggerConfig = CommsLoggerConfig()
    """Print calls and bytes of a step's communication, by group."""
    tensorboard: TensorBoardConfig = TensorBoardConfig()
    """TensorBoard, placed as DeepSpeed does; in the run's folder: parallel3d.run.trackers."""
    csv_monitor: CsvMonitorConfig = CsvMonitorConfig()
    """csv files, one a metric."""
    wandb: WandbConfig = WandbConfig()
    """Weights & Biases."""
    comet: CometConfig = CometConfig()
    """Comet."""
    bf16: Bf16Config = Bf16Config()
    """Training in bfloat16; without it, training is in fp32."""
    fp16: Fp16Config = Fp16Config()
    """Training in fp16 with a loss scale, where there is no bf16."""
    communication_data_type: Literal["fp32", "bf16"] | None = None
    """What gradients are averaged over dp in; null: fp32. "bf16", in bf16 training alone, halves
    the bytes; microbatches add up in fp32 before, and so does what is partial or tied."""
    aio: AioConfig = AioConfig()
    """Input and output of NVMe offload."""
    optimizer: OptimizerConfig = Field(
        examples=[deepspeed.EXAMPLE, "--optimizer.params.lr 3e-4 on the command line"]
    )
    """The optimizer and its parameters."""
    scheduler: Annotated[Any, PlainValidator(SCHEDULER)] = None
    """DeepSpeed's schedule of the learning rate, in place of parallel3d.train.lr_schedule."""
    zero_optimization: ZeroConfig = ZeroConfig(stage=0)
    """Sharding of the training state, and offload; without the block stage 0, as in DeepSpeed."""
    parallel3d: Parallel3DConfig = Field(examples=[parallel3d_block.EXAMPLE])
    """Everything that is not DeepSpeed's."""

    _notes: tuple[str, ...] = PrivateAttr(default=())
    _max_samples: int | None = PrivateAttr(default=None)  # what max_tokens or epochs come to

    @classmethod
    def from_json(cls, path: str, overrides: Sequence[str] = ()) -> "RunConfig":
        """The config in a file, or in configs/ under that name, with `--a.b value` set in it.

        Raises ConfigError that lists all that is wrong.
        """
        file = reader.find(path)
        raw = reader.read(file)
        notes = apply_overrides(raw, overrides)
        config = cls.from_dict(raw, source=str(file))
        return config.with_notes(*notes, *config.notes) if notes else config

    @classmethod
    def from_dict(cls, raw: dict[str, Any], source: str = "the config") -> "RunConfig":
        """The config that `raw`, the object of a ds.json, describes; raises ConfigError."""
        raw, notes = normalise(raw)
        try:
            config = cls.model_validate(raw)
        except ValidationError as error:
            problems = explain.problems_in(error, raw, cls)
            # What is sound by itself is compared all the same: all errors at once.
            problems += checks.find_problems(explain.sound_settings(raw, problems, cls))
            raise Problems(problems, source) from None
        config._notes = tuple(notes)
        return config._fitted()._checked(source=source)

    @property
    def notes(self) -> tuple[str, ...]:
        """What each "auto" of the file became, and what was planned, a line each."""
        return self._notes

    def with_notes(self, *notes: str) -> "RunConfig":
        """A copy of the config with these notes in place of its own."""
        config = self.model_copy()
        config._notes = notes
        return config

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of DeepSpeed's sections and of the "parallel3d" block, side by side."""
        return dict(self) | dict(self.parallel3d)

    @property
    def is_planned(self) -> bool:
        """Whether the mesh is "plan", which the planner has yet to fill."""
        return self.parallel3d.mesh == PLAN

    @property
    def mesh(self) -> MeshConfig:
        """Ranks per axis; raises ConfigError where the planner has yet to choose them."""
        if isinstance(self.parallel3d.mesh, MeshConfig):
            return self.parallel3d.mesh
        rule, remedy = "there is no mesh yet", "write the one that `parallel3d plan` puts first"
        raise Problems([Problem("parallel3d.mesh", PLAN, rule, remedy)])

    @property
    def pipeline(self) -> PipelineConfig:
        """How microbatches flow through the stages."""
        return self.parallel3d.pipeline

    @property
    def model(self) -> Any:
        """The model's settings: the `Config` of its family."""
        return self.parallel3d.model

    @property
    def data(self) -> DataConfig:
        """The corpus, its tokenizer, and how it is cut into samples."""
        return self.parallel3d.data

    @property
    def train(self) -> TrainConfig:
        """Length, seed, learning rate and evaluation of the run."""
        return self.parallel3d.train

    @property
    def checkpoint(self) -> CheckpointConfig:
        """When the run saves, and what it resumes from."""
        return self.parallel3d.checkpoint

    @property
    def run(self) -> OutputConfig:
        """Where the run is written."""
        return self.parallel3d.run

    @property
    def precision(self) -> Literal["fp32", "bf16", "fp16"]:
        """The type that parameters and activations have in training."""
        return "fp16" if self.fp16.enabled else "bf16" if self.bf16.enabled else "fp32"

    @property
    def micro_batch_size(self) -> int:
        """Samples in one microbatch of one data-parallel rank."""
        assert self.train_micro_batch_size_per_gpu, "resolve(world_size) comes first"
        return self.train_micro_batch_size_per_gpu

    @property
    def num_microbatches(self) -> int:
        """Microbatches that pass through the pipeline in one step."""
        assert self.gradient_accumulation_steps, "resolve(world_size) comes first"
        return self.gradient_accumulation_steps

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the run; the config must be resolved."""
        assert self.train.steps, "resolve(world_size) and with_corpus come first"
        return self.train.steps

    @property
    def global_batch_size(self) -> int:
        """Samples in one step of the whole mesh; the config must be resolved."""
        assert isinstance(self.mesh.dp, int), "resolve(world_size) comes first"
        return self.micro_batch_size * self.num_microbatches * self.mesh.dp

    @property
    def tokens_per_step(self) -> int:
        """Tokens in one step of the whole mesh; the config must be resolved."""
        return self.global_batch_size * self.data.sequence_length

    def resolve(self, world_size: int) -> "RunConfig":
        """Return the config with mesh, batch and steps of max_tokens for `world_size` ranks."""
        dp = arithmetic.data_parallel_size(self.mesh, world_size)
        config = self._with("mesh", dp=dp)._checked()
        batch, micro, accumulation = arithmetic.batch_sizes(
            config.train_batch_size,
            config.train_micro_batch_size_per_gpu,
            config.gradient_accumulation_steps,
            dp,
        )
        config = config.model_copy(
            update={
                "train_batch_size": batch,
                "train_micro_batch_size_per_gpu": micro,
                "gradient_accumulation_steps": accumulation,
            }
        )
        if config.train.max_tokens is not None:
            steps = arithmetic.steps_of_tokens(config.train.max_tokens, config.tokens_per_step)
            samples = config.train.max_tokens // config.data.sequence_length
            config = config._with("train", steps=steps, max_tokens=None)
            config._max_samples = samples
        return config._fitted()._checked()

    def with_corpus(self, vocab_size: int, num_train_tokens: int) -> "RunConfig":
        """Return this resolved config for a corpus: vocabulary and steps of the epochs known.

        Raises ConfigError if the model's vocabulary is smaller, or if the epochs make no step.
        """
        config = self.with_vocab_size(vocab_size)
        if config.train.epochs is not None:
            # Each sample also needs the token after its last one.
            samples = (num_train_tokens - 1) // config.data.sequence_length
            steps = arithmetic.steps_of_epochs(
                config.train.epochs, samples, config.global_batch_size
            )
            seen = arithmetic.samples_of_epochs(config.train.epochs, samples)
            config = config._with("train", steps=steps, epochs=None)
            config._max_samples = seen
        return config._fitted()._checked()

    def resumed(self, step: int, next_sample: int) -> "RunConfig":
        """Return this complete config for a run that has done `step` steps.

        Where max_tokens or epochs bound the run, the samples left give its number of steps.
        """
        if self._max_samples is None:
            return self
        left = max(0, self._max_samples - next_sample) // self.global_batch_size
        return self._with("train", steps=max(1, step + left))._fitted()._checked()

    def with_vocab_size(self, size: int) -> "RunConfig":
        """The config for a tokenizer of `size` tokens; the model's vocabulary may be larger."""
        config = self if self.model.vocab_size != "auto" else self._with("model", vocab_size=size)
        if self.data.tokenizer == "train":
            # A small corpus gives fewer tokens than were asked for.
            config = config._with("data", vocab_size=size)
        return config._checked(tokenizer_size=size)

    def to_dict(self) -> dict[str, Any]:
        """The config as one JSON object, defaults filled in; `from_dict` reads it back."""
        return self.model_dump(mode="json")

    def to_public_dict(self) -> dict[str, Any]:
        """Return the config as `to_dict` does, with the passwords of URLs masked, to be written."""
        return {key: mask_values(value) for key, value in self.to_dict().items()}

    def _checked(self, source: str = "the config", **known: Any) -> "RunConfig":
        """This config; raises ConfigError if its settings do not go together."""
        if problems := checks.find_problems(self.settings | known):
            raise Problems(problems, source)
        return self

    def _with(self, section: str, **values: Any) -> "RunConfig":
        changed = getattr(self, section).model_copy(update=values)
        block = self.parallel3d.model_copy(update={section: changed})
        return self.model_copy(update={"parallel3d": block})

    def _fitted(self) -> "RunConfig":
        """This config with what sets the learning rate fitted to its length, if that is known."""
        train, scheduler, notes = arithmetic.fit(self.train, self.scheduler)
        block = self.parallel3d.model_copy(update={"train": train})
        config = self.model_copy(update={"parallel3d": block, "scheduler": scheduler})
        config._notes = (*self._notes, *notes)
        return config


def digest_of(config: RunConfig, also: Iterable[str] = ()) -> str:
    """Return a digest that is equal for two configs, as they were read, that train the same.

    Where and how the run is written is left out, and the dotted paths of `also`.
    """
    values = config.to_public_dict()
    # Until the next release, runs are found that were begun before this setting was removed.
    values["parallel3d"]["train"]["check_layers"] = True
    for path in (*_APART, *also):
        section, _, name = path.rpartition(".")
        block = reader.at(values, section)
        if isinstance(block, dict):
            block.pop(name, None)
    return blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=16).hexdigest()
