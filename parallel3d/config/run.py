"""The config of a run: DeepSpeed's settings plus the "parallel3d" block."""

import json
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator, PrivateAttr, ValidationError

from parallel3d.base import explain, reader
from parallel3d.base.masking import mask_values
from parallel3d.base.mesh_sizes import MeshSizes
from parallel3d.base.section import Problem, Problems, Section, Size
from parallel3d.config import arithmetic, checks, deepspeed, deepspeed_keys, parallel3d_block
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
from parallel3d.model.config import ModelConfig

# Settings of output, stopping and speed, which do not affect what is trained.
_NOT_TRAINED = (
    *("steps_per_print", "wall_clock_breakdown", "flops_profiler", "comms_logger", "aio"),
    *("tensorboard", "csv_monitor", "wandb", "comet"),
    *(f"zero_optimization.offload_{state}.nvme_path" for state in ("optimizer", "param")),
    *("parallel3d.run", "parallel3d.checkpoint"),
    *("parallel3d.mesh.fallbacks", "parallel3d.pipeline.weights"),
    *(
        f"parallel3d.data.{name}"
        for name in ("cache", "max_line_bytes", "workers", "read_ahead", "stream_cache_bytes")
    ),
    *(
        f"parallel3d.train.{name}"
        for name in ("stop_after", "timeout_seconds", "profile", "digest_every", "check_bits")
    ),
)
PLACEMENT_SETTINGS = (
    *("zero_optimization", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    *("parallel3d.mesh", "parallel3d.plan", "parallel3d.pipeline"),
)
"""Settings that place a run on devices and offload it; they change results by rounding only. The
global batch, train_batch_size, is not among them."""


class RunConfig(Section):
    """One ds.json: DeepSpeed's keys with DeepSpeed's meaning, and the "parallel3d" block."""

    refused: ClassVar[Mapping[str, Mapping[str, str]]] = deepspeed_keys.REASONS

    train_batch_size: Positive | None = None
    """Samples per step: micro batch x accumulation x dp. As in DeepSpeed, a size that is not set is
    computed from the others."""
    train_micro_batch_size_per_gpu: Positive | None = None
    """Samples per microbatch, on each data-parallel rank."""
    gradient_accumulation_steps: Positive | None = None
    """Microbatches per step, which pass through the pipeline together."""
    gradient_clipping: float = Field(default=1.0, ge=0)
    """Maximum global gradient norm; 0 disables clipping."""
    steps_per_print: Annotated[Size, Field(gt=0)] = 10
    """Steps between progress lines if standard error is not a terminal."""
    wall_clock_breakdown: bool = False
    """Print how a step's time divides up, every steps_per_print steps."""
    flops_profiler: FlopsProfilerConfig = FlopsProfilerConfig()
    """FLOPs of one step."""
    comms_logger: CommsLoggerConfig = CommsLoggerConfig()
    """Table of one step's communication, by group."""
    tensorboard: TensorBoardConfig = TensorBoardConfig()
    """TensorBoard files in output_path; parallel3d.run.trackers writes them to the run's folder."""
    csv_monitor: CsvMonitorConfig = CsvMonitorConfig()
    """One CSV file per metric."""
    wandb: WandbConfig = WandbConfig()
    """Weights & Biases."""
    comet: CometConfig = CometConfig()
    """Comet."""
    bf16: Bf16Config = Bf16Config()
    """Training in bfloat16; without bf16 and fp16, training is in fp32."""
    fp16: Fp16Config = Fp16Config()
    """Training in fp16 with a loss scale, for devices without bf16."""
    communication_data_type: Literal["fp32", "bf16"] | None = None
    """Precision in which gradients are averaged over dp; null means fp32. "bf16" (bf16 training
    only) halves the traffic; gradients of microbatches, tp ranks and tied weights are still added
    in fp32."""
    aio: AioConfig = AioConfig()
    """Asynchronous I/O for NVMe offload."""
    optimizer: OptimizerConfig = Field(
        examples=[deepspeed.EXAMPLE, "--optimizer.params.lr 3e-4 on the command line"]
    )
    """The optimizer and its parameters."""
    scheduler: Annotated[Any, PlainValidator(SCHEDULER)] = None
    """One of DeepSpeed's learning-rate schedules; replaces parallel3d.train.lr_schedule."""
    zero_optimization: ZeroConfig = ZeroConfig(stage=0)
    """Sharding and offload of the training state; stage 0 if missing, as in DeepSpeed."""
    parallel3d: Parallel3DConfig = Field(examples=[parallel3d_block.EXAMPLE])
    """All settings that are not DeepSpeed's."""

    _notes: tuple[str, ...] = PrivateAttr(default=())
    _max_samples: int | None = PrivateAttr(default=None)  # from max_tokens or epochs

    @classmethod
    def from_json(cls, path: str, overrides: Sequence[str] = ()) -> "RunConfig":
        """Return the config in a file, with the settings of a command line.

        Args:
            path: a file, or a name in configs/.
            overrides: `--a.b value` pairs that replace the file's settings.

        Raises ConfigError, which lists all problems.
        """
        file = reader.find(path)
        raw = reader.read(file)
        notes = apply_overrides(raw, overrides)
        config = cls.from_dict(raw, source=str(file))
        return config.with_notes(*notes, *config.notes) if notes else config

    @classmethod
    def from_dict(cls, raw: dict[str, object], source: str = "the config") -> "RunConfig":
        """Return the config in `raw`, the object of a ds.json; raises ConfigError.

        Args:
            source: where `raw` comes from, for messages.
        """
        raw, notes = normalise(raw)
        try:
            config = cls.model_validate(raw)
        except ValidationError as error:
            problems = explain.problems_in(error, raw, cls)
            # Valid settings are compared with each other, too, to report all errors at once.
            problems += checks.find_problems(explain.sound_settings(raw, problems, cls))
            raise Problems(problems, source) from None
        if config.train.batch_schedule and config.train_batch_size is None:
            first = config.train.batch_schedule[0][1]
            config = config.model_copy(update={"train_batch_size": first})
        config._notes = tuple(notes)
        return config._fitted()._checked(source=source)._with_valid_fallbacks(source)

    @property
    def notes(self) -> tuple[str, ...]:
        """One line for each "auto" that was resolved and each setting that was adapted."""
        return self._notes

    def with_notes(self, *notes: str) -> "RunConfig":
        """Return a copy of the config with these notes instead of its own."""
        config = self.model_copy()
        config._notes = notes
        return config

    @property
    def settings(self) -> dict[str, object]:
        """DeepSpeed's settings and those of the "parallel3d" block, in one dictionary."""
        return dict(self) | dict(self.parallel3d)

    @property
    def is_planned(self) -> bool:
        """True if the mesh is "plan": the planner has not chosen it yet."""
        return self.parallel3d.mesh == PLAN

    @property
    def mesh(self) -> MeshConfig:
        """Ranks per axis; raises ConfigError if the planner has not chosen them yet."""
        if isinstance(self.parallel3d.mesh, MeshConfig):
            return self.parallel3d.mesh
        raise Problems(
            [
                Problem(
                    "parallel3d.mesh",
                    PLAN,
                    "the mesh is not planned yet",
                    "use the first that `parallel3d plan` prints",
                )
            ]
        )

    @property
    def pipeline(self) -> PipelineConfig:
        """How microbatches pass through the pipeline's stages."""
        return self.parallel3d.pipeline

    @property
    def model(self) -> ModelConfig:
        """The model's settings, the `Config` of its family."""
        model: ModelConfig = self.parallel3d.model
        return model

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
        """Name, folder and trackers of the run."""
        return self.parallel3d.run

    @property
    def precision(self) -> Literal["fp32", "bf16", "fp16"]:
        """Data type of parameters and activations in training."""
        return "fp16" if self.fp16.enabled else "bf16" if self.bf16.enabled else "fp32"

    @property
    def micro_batch_size(self) -> int:
        """Samples per microbatch, on one data-parallel rank."""
        assert self.train_micro_batch_size_per_gpu, "resolve(world_size) comes first"
        return self.train_micro_batch_size_per_gpu

    @property
    def num_microbatches(self) -> int:
        """Microbatches per step and data-parallel rank."""
        assert self.gradient_accumulation_steps, "resolve(world_size) comes first"
        return self.gradient_accumulation_steps

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the run; the config must be resolved."""
        assert self.train.steps, "resolve(world_size) and with_corpus come first"
        return self.train.steps

    @property
    def global_batch_size(self) -> int:
        """Samples per step, over all ranks; the config must be resolved."""
        assert isinstance(self.mesh.dp, int), "resolve(world_size) comes first"
        return self.micro_batch_size * self.num_microbatches * self.mesh.dp

    @property
    def tokens_per_step(self) -> int:
        """Tokens per step, over all ranks; the config must be resolved."""
        return self.global_batch_size * self.data.sequence_length

    @property
    def batch_phases(self) -> tuple[tuple[int, int], ...]:
        """The first sample of each phase of train.batch_schedule, and its samples per step."""
        return (
            arithmetic.batch_phases(self.train, self.data)
            if self.train.batch_schedule
            else ((0, self.global_batch_size),)
        )

    @property
    def largest_batch(self) -> int:
        """The most samples of a step, over all ranks; the config must be resolved."""
        return max(size for _, size in self.batch_phases)

    def num_microbatches_at(self, sample: int) -> int:
        """Return the microbatches per data-parallel rank of the step that begins at a sample."""
        assert isinstance(self.mesh.dp, int), "resolve(world_size) comes first"
        return self.batch_size_at(sample) // (self.micro_batch_size * self.mesh.dp)

    def batch_size_at(self, sample: int) -> int:
        """Return the samples, over all ranks, of the step that begins at a sample."""
        return [size for first, size in self.batch_phases if first <= sample][-1]

    def steps_between(self, sample: int, end: int) -> int:
        """Return the number of whole steps in the samples from `sample` up to, without, `end`."""
        return sum(steps for _, steps in self.steps_by_size(sample, end))

    def samples_of_steps(self, steps: int) -> int:
        """Return the samples in the run's first `steps` steps."""
        return arithmetic.samples_of_steps(self.batch_phases, steps)

    def steps_by_size(self, sample: int, end: int) -> list[tuple[int, int]]:
        """Return (samples per step, whole steps) of each phase from `sample` up to `end`."""
        phases = []
        for until in (*(first for first, _ in self.batch_phases if first > sample), end):
            size = self.batch_size_at(sample)
            # The step that reaches the next phase still has this phase's size.
            count = max(0, min(-(-(until - sample) // size), (end - sample) // size))
            if count:
                phases.append((size, count))
            sample += count * size
        return phases

    def resolve(self, world_size: int) -> "RunConfig":
        """Return the config for `world_size` ranks: mesh, batch sizes and, of max_tokens, steps.

        Raises ConfigError if mesh, fallbacks or the batch do not fit the number of ranks.
        """
        fallback = arithmetic.fallback(self.mesh, world_size)
        config = self._on(fallback) if fallback else self
        dp = arithmetic.data_parallel_size(config.mesh, world_size)
        config = config._with("mesh", dp=dp, fallbacks=())._checked()
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
        if fallback:
            config = config.with_notes(
                *config.notes,
                f"parallel3d.mesh: {fallback} of fallbacks, because {self.mesh.sizes} does not "
                f"have {world_size} ranks; {accumulation} microbatches of {micro} a step",
            )
        if config.train.max_tokens is not None:
            length = config.data.sequence_length
            samples = config.train.max_tokens // length
            arithmetic.check_tokens(config.train.max_tokens, config.batch_size_at(0) * length)
            steps = config.steps_between(0, samples)
            config = config._with("train", steps=steps, max_tokens=None)
            config._max_samples = samples
        if config.train.batch_schedule:
            note = arithmetic.describe_batches(config.train, config.data)
            config = config.with_notes(*dict.fromkeys((*config.notes, note)))
        return config._fitted()._checked()

    def with_corpus(self, vocab_size: int, num_train_tokens: int) -> "RunConfig":
        """Return this resolved config for a corpus, with vocabulary and, of epochs, steps.

        Args:
            vocab_size: the tokenizer's tokens.
            num_train_tokens: tokens of the training part.

        Raises ConfigError if the model's vocabulary is smaller, or the epochs are less than a step.
        """
        config = self.with_vocab_size(vocab_size)
        if config.train.epochs is not None:
            # Each sample also needs the token that follows it.
            samples = (num_train_tokens - 1) // config.data.sequence_length
            max_samples = arithmetic.samples_of_epochs(
                config.train.epochs, samples, config.batch_size_at(0)
            )
            steps = config.steps_between(0, max_samples)
            config = config._with("train", steps=steps, epochs=None)._fitted()._checked()
            config._max_samples = max_samples
        return config

    def resumed(self, step: int, sample: int, num_left_out: int = 0) -> "RunConfig":
        """Return this complete config for a run that resumes after `step` steps.

        If max_tokens or epochs limit the run, its steps follow from the samples that are left.

        Args:
            sample: the next step's first sample.
            num_left_out: number of samples before it that were not trained on.
        """
        if self._max_samples is None:
            return self
        left = self.steps_between(sample, self._max_samples + num_left_out)
        return self._with("train", steps=max(1, step + left))._fitted()._checked()

    def with_vocab_size(self, size: int) -> "RunConfig":
        """Return the config for a tokenizer of `size` tokens.

        Raises ConfigError if the model's vocabulary is smaller; it may be larger.
        """
        config = self if self.model.vocab_size != "auto" else self._with("model", vocab_size=size)
        if self.data.tokenizer == "train":
            # On a small corpus, training a tokenizer ends with fewer tokens than requested.
            config = config._with("data", vocab_size=size)
        return config._checked(tokenizer_size=size)

    def with_weights(self, weights: str, note: str) -> "RunConfig":
        """Return the config with parallel3d.pipeline.weights set, and `note` among its notes."""
        return self._with("pipeline", weights=weights).with_notes(*self.notes, note)

    def to_dict(self) -> dict[str, Any]:
        """Return the config as one JSON object with all defaults; `from_dict` reads it back."""
        return self.model_dump(mode="json")

    def to_public_dict(self) -> dict[str, object]:
        """Return the config as `to_dict` does, with the passwords of URLs masked, to be written."""
        return {key: mask_values(value) for key, value in self.to_dict().items()}

    def _checked(self, source: str = "the config", **known: object) -> "RunConfig":
        """Return this config; raises ConfigError if its settings contradict each other."""
        if problems := checks.find_problems(self.settings | known):
            raise Problems(problems, source)
        return self

    def _with_valid_fallbacks(self, source: str) -> "RunConfig":
        """Return this config; raises ConfigError if it cannot run on a mesh of mesh.fallbacks."""
        mesh = self.parallel3d.mesh
        path = "parallel3d.mesh.fallbacks"
        if mesh == PLAN or not mesh.fallbacks:
            return self
        self.resolve(mesh.sizes.ranks)  # its problems are not those of a fallback
        problems: list[Problem] = []
        for sizes in map(MeshSizes.parse, mesh.fallbacks):
            try:
                self._on(sizes).resolve(sizes.ranks)
            except Problems as error:
                broken = [str(problem) for problem in error.problems]
                problems += [
                    Problem(path, str(sizes), rule, "or remove it here") for rule in broken
                ]
        if problems:
            raise Problems(problems, source)
        return self

    def _on(self, sizes: MeshSizes) -> "RunConfig":
        """Return the config with another mesh, for the same batch and micro batch."""
        assert isinstance(self.mesh.dp, int), "_check_fallbacks"
        batch, micro, _ = arithmetic.batch_sizes(
            self.train_batch_size,
            self.train_micro_batch_size_per_gpu,
            self.gradient_accumulation_steps,
            self.mesh.dp,
        )
        return self._with("mesh", **sizes._asdict(), fallbacks=()).model_copy(
            update={
                "train_batch_size": batch,
                "train_micro_batch_size_per_gpu": micro,
                "gradient_accumulation_steps": None,
            }
        )

    def _with(self, section: str, **values: object) -> "RunConfig":
        changed = getattr(self, section).model_copy(update=values)
        block = self.parallel3d.model_copy(update={section: changed})
        return self.model_copy(update={"parallel3d": block})

    def _fitted(self) -> "RunConfig":
        """Return this config with its learning-rate schedule fitted to the steps, if known."""
        train, scheduler, notes = arithmetic.fit(self.train, self.scheduler, self.data)
        block = self.parallel3d.model_copy(update={"train": train})
        config = self.model_copy(update={"parallel3d": block, "scheduler": scheduler})
        config._notes = (*self._notes, *notes)
        return config


def digest_of(config: RunConfig, also: Iterable[str] = ()) -> str:
    """Return a digest that is equal for configs that train the same, as they were read.

    Args:
        also: dotted paths of settings to ignore, besides those of output, stopping and speed.
    """
    values = config.to_public_dict()
    ignored = [p.rpartition(".") for p in (*_NOT_TRAINED, *also)]
    blocks = reader.blocks_at(values, {section for section, _, _ in ignored})
    for section, _, name in ignored:
        blocks[section].pop(name, None)
    return blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=16).hexdigest()
