"""The config of a run in three phases: as read, for a number of ranks, and with its corpus."""

from collections.abc import Mapping, Sequence
from typing import Literal, Self, TypeVar

from pydantic import Field, ValidationError

from parallel3d.base import explain, reader
from parallel3d.base.errors import ConfigError
from parallel3d.base.mesh_sizes import MeshSizes
from parallel3d.base.reader import JsonObject
from parallel3d.base.section import Positive, Problem, Problems, raise_if_any
from parallel3d.config import arithmetic, checks
from parallel3d.config.data import DataConfig
from parallel3d.config.normalise import apply_overrides, normalise
from parallel3d.config.parallel3d_block import (
    PLAN,
    CheckpointConfig,
    MeshConfig,
    OutputConfig,
    Parallel3DConfig,
    PipelineConfig,
    TrainConfig,
)
from parallel3d.config.run_settings import RunSettings
from parallel3d.model.config import ModelConfig
from parallel3d.schedule import schedules


class RunConfig(RunSettings):
    """A config as it was read: its settings are valid, and agree with each other."""

    notes: tuple[str, ...] = Field(default=(), exclude=True)
    """One line for each "auto" that was resolved and each setting that was adapted."""

    @classmethod
    def from_json(cls, path: str, overrides: Sequence[str] = ()) -> "RunConfig":
        """Return the config in a file, with the settings of a command line.

        - `path`: a file, or a name in configs/.
        - `overrides`: `--a.b value` pairs that replace the file's settings.

        Raises ConfigError, which lists all problems.
        """
        file = reader.find(path)
        if file.suffix == ".toml":
            raise ConfigError(
                f"{file}: is no JSON; write its settings to a JSON file (docs/coming-from.md has "
                "those of torchtitan)"
            )
        if file.suffix in (".yaml", ".yml", ".py", ".sh"):
            raise ConfigError(
                f"{file}: is no JSON; convert it: parallel3d convert config {file} --out ds.json "
                "(docs/coming-from.md says which programs' files it reads)"
            )
        raw = reader.read(file)
        notes = apply_overrides(raw, overrides)
        config = cls.from_dict(raw, source=str(file))
        return config.with_notes(*notes, *config.notes)

    @classmethod
    def from_dict(cls, raw: JsonObject, source: str = "the config") -> "RunConfig":
        """Return the config in `raw`, the object of a ds.json; raises ConfigError.

        - `source`: where `raw` comes from, for messages.
        """
        raw, notes = normalise(raw)
        try:
            settings = RunSettings.model_validate(raw)
        except ValidationError as error:
            problems = explain.problems_in(error, raw, RunSettings)
            # Valid settings are compared with each other, too, to report all errors at once.
            problems += checks.find_problems(explain.sound_settings(raw, problems, RunSettings))
            raise Problems(problems, source) from None
        notes += getattr(settings.parallel3d.model, "notes", ())
        config = _in_phase(settings, RunConfig, notes=tuple(notes))
        if config.train.batch_schedule and config.train_batch_size is None:
            first = config.train.batch_schedule[0][1]
            config = config.model_copy(update={"train_batch_size": first})
        config = config._with_one_reduction()
        return config._fitted()._checked(source=source)._with_valid_fallbacks(source)

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
        if self.fp16.enabled:
            return "fp16"
        return "bf16" if self.bf16.enabled else "fp32"

    def resolve(
        self, world_size: int, batch: int | None = None, host_size: int | None = None
    ) -> "ResolvedConfig":
        """Return the config for `world_size` ranks: mesh, batch sizes and, of max_tokens, steps.

        - `batch`: the batch of a run that resumes, which stays unless the config asks for another.
        - `host_size`: the ranks on each host; None: all are on one.

        Raises ConfigError if mesh, fallbacks or the batch do not fit the number of ranks.
        """
        fallback = arithmetic.fallback(self.mesh, world_size)
        config = self._on(fallback) if fallback else self
        dp = arithmetic.data_parallel_size(config.mesh, world_size)
        shards, notes = arithmetic.num_shards(config.mesh, dp, host_size or world_size)
        config = config._with("mesh", dp=dp, dp_shards=shards, fallbacks=())._checked()
        config = config.with_notes(*config.notes, *notes)
        asked_batch, micro, accumulation = arithmetic.batch_sizes(
            config.train_batch_size,
            config.train_micro_batch_size_per_gpu,
            config.gradient_accumulation_steps,
            dp,
        )
        if batch is None or config.train_batch_size is not None:
            batch = asked_batch
        if batch != asked_batch:
            micro, accumulation = arithmetic.kept_sizes(batch, micro, dp, config._is_runnable)
        if fallback:
            config = config.with_notes(
                *config.notes,
                f"parallel3d.mesh: {fallback} of fallbacks, because {self.mesh.sizes} does not "
                f"have {world_size} ranks; {accumulation} microbatches of {micro} a step",
            )
        resolved = _in_phase(
            config,
            ResolvedConfig,
            train_batch_size=batch,
            train_micro_batch_size_per_gpu=micro,
            gradient_accumulation_steps=accumulation,
            parallel3d=ResolvedBlock.model_construct(**dict(config.parallel3d)),
        )
        return resolved._limited_by_max_tokens()._with_note_on_batches()._fitted()._checked()

    def completed(self) -> "CompleteConfig":
        """Return this config as one that is complete: of a run's folder, or in need of no corpus.

        Raises ConfigError if the mesh, the batch, the steps or the vocabulary are not known.
        """
        values = {
            "parallel3d.mesh.dp": self.mesh.dp,
            arithmetic.BATCH: self.train_batch_size,
            arithmetic.MICRO: self.train_micro_batch_size_per_gpu,
            arithmetic.ACCUMULATION: self.gradient_accumulation_steps,
            "parallel3d.train.steps": self.train.steps,
            "parallel3d.model.vocab_size": self.model.vocab_size,
        }
        problems = []
        for path, value in values.items():
            if value in ("auto", None):
                problems.append(Problem(path, value, "is not known yet", "write a number"))
        raise_if_any(problems)
        block = ResolvedBlock.model_construct(**dict(self.parallel3d))
        return _in_phase(self, CompleteConfig, parallel3d=block, num_steps=self.train.steps)

    def with_notes(self, *notes: str) -> Self:
        """Return a copy of the config with these notes instead of its own."""
        return self.model_copy(update={"notes": notes})

    def with_vocab_size(self, size: int) -> Self:
        """Return the config for a tokenizer of `size` tokens.

        Raises ConfigError if the model's vocabulary is smaller; it may be larger.
        """
        config = self if self.model.vocab_size != "auto" else self._with("model", vocab_size=size)
        if self.data.tokenizer == "train":
            # On a small corpus, training a tokenizer ends with fewer tokens than requested.
            config = config._with("data", vocab_size=size)
        return config._checked(tokenizer_size=size)

    def with_gathers(self, chosen: Mapping[str, str], notes: Sequence[str]) -> Self:
        """Return the config with these settings of parallel3d.pipeline, and the notes on them."""
        return self._with("pipeline", **chosen).with_notes(*self.notes, *notes)

    def _checked(self, source: str = "the config", **known: object) -> Self:
        """Return this config; raises ConfigError if its settings contradict each other."""
        raise_if_any(checks.find_problems(self.settings | known), source)
        return self

    def _with_valid_fallbacks(self, source: str) -> Self:
        """Return this config; raises ConfigError if it cannot run on a mesh of mesh.fallbacks."""
        mesh = self.parallel3d.mesh
        path = "parallel3d.mesh.fallbacks"
        if mesh == PLAN or not mesh.fallbacks:
            return self
        # Problems of the config's own mesh are not those of a fallback.
        self.resolve(mesh.sizes.ranks)
        problems: list[Problem] = []
        for sizes in map(MeshSizes.parse, mesh.fallbacks):
            try:
                self._on(sizes).resolve(sizes.ranks)
            except Problems as error:
                broken = [str(problem) for problem in error.problems]
                problems += [
                    Problem(path, str(sizes), rule, "or remove it here") for rule in broken
                ]
        raise_if_any(problems, source)
        return self

    def _is_runnable(self, num_microbatches: int) -> bool:
        """Return True if the schedule can run with so many microbatches on this mesh."""
        pipeline = self.pipeline
        sizes = self.mesh.pp, num_microbatches, pipeline.stages_per_rank
        return not schedules.why_not(pipeline.schedule, *sizes)

    def _on(self, sizes: MeshSizes) -> Self:
        """Return the config with another mesh, for the same batch and micro batch.

        The mesh has a number for dp, as all meshes with fallbacks.
        """
        batch, micro, _ = arithmetic.batch_sizes(
            self.train_batch_size,
            self.train_micro_batch_size_per_gpu,
            self.gradient_accumulation_steps,
            self.mesh.sizes.dp,
        )
        return self._with("mesh", **sizes._asdict(), fallbacks=()).model_copy(
            update={
                "train_batch_size": batch,
                "train_micro_batch_size_per_gpu": micro,
                "gradient_accumulation_steps": None,
            }
        )

    def _with_one_reduction(self) -> Self:
        """Return this config; with mesh.dp_shards ZeRO-2 reduces gradients once a step by default.

        Each reduction is also one over the copies of the shards, between hosts.
        """
        mesh = self.parallel3d.mesh
        is_open = self.pipeline.gradient_reduction == "auto" and self.zero_optimization.stage == 2
        if mesh == PLAN or mesh.dp_shards is None or not is_open:
            return self
        note = 'parallel3d.pipeline.gradient_reduction: auto = "per_step" (mesh.dp_shards)'
        return self._with("pipeline", gradient_reduction="per_step").with_notes(*self.notes, note)

    def _with(self, section: str, **values: object) -> Self:
        changed = getattr(self, section).model_copy(update=values)
        block = self.parallel3d.model_copy(update={section: changed})
        return self.model_copy(update={"parallel3d": block})

    def _fitted(self) -> Self:
        """Return this config with its learning-rate schedule fitted to the steps, if known."""
        train, scheduler, notes = arithmetic.fit(self.train, self.scheduler, self.data)
        block = self.parallel3d.model_copy(update={"train": train})
        config = self.model_copy(update={"parallel3d": block, "scheduler": scheduler})
        return config.with_notes(*self.notes, *notes)


class ResolvedBlock(Parallel3DConfig):
    """The "parallel3d" block for a number of ranks."""

    mesh: MeshConfig
    """Ranks per axis; dp is a number."""


class ResolvedConfig(RunConfig):
    """A config for a number of ranks: its mesh and batch are known, but not yet its corpus."""

    train_batch_size: Positive
    train_micro_batch_size_per_gpu: Positive
    gradient_accumulation_steps: Positive
    parallel3d: ResolvedBlock
    max_samples: int | None = Field(default=None, exclude=True)
    """The samples of the run, if max_tokens or epochs limit it."""

    @property
    def mesh(self) -> MeshConfig:
        """Ranks per axis."""
        return self.parallel3d.mesh

    @property
    def micro_batch_size(self) -> int:
        """Samples per microbatch, on one data-parallel rank."""
        return self.train_micro_batch_size_per_gpu

    @property
    def num_microbatches(self) -> int:
        """Microbatches per step and data-parallel rank."""
        return self.gradient_accumulation_steps

    @property
    def global_batch_size(self) -> int:
        """Samples per step, over all ranks."""
        return self.train_batch_size

    @property
    def tokens_per_step(self) -> int:
        """Tokens per step, over all ranks."""
        return self.global_batch_size * self.data.sequence_length

    @property
    def batch_phases(self) -> tuple[tuple[int, int], ...]:
        """The first sample of each phase of train.batch_schedule, and its samples per step."""
        if self.train.batch_schedule:
            return arithmetic.batch_phases(self.train, self.data)
        return ((0, self.global_batch_size),)

    @property
    def largest_batch(self) -> int:
        """The most samples of a step, over all ranks."""
        return max(size for _, size in self.batch_phases)

    def num_microbatches_at(self, sample: int) -> int:
        """Return the microbatches per data-parallel rank of the step that begins at a sample."""
        return self.batch_size_at(sample) // (self.micro_batch_size * self.mesh.sizes.dp)

    def batch_size_at(self, sample: int) -> int:
        """Return the samples, over all ranks, of the step that begins at a sample."""
        return arithmetic.batch_at(self.batch_phases, sample)

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

    def with_corpus(self, vocab_size: int, num_train_tokens: int) -> "CompleteConfig":
        """Return this config for a corpus, with vocabulary and, of epochs, steps.

        - `vocab_size`: the tokenizer's tokens.
        - `num_train_tokens`: tokens of the training part.

        Raises ConfigError if the model's vocabulary is smaller, or the epochs are less than a step.
        """
        config = self.with_vocab_size(vocab_size)
        if config.train.epochs is not None:
            # Each sample also needs the token that follows it.
            samples = (num_train_tokens - 1) // config.data.sequence_length
            max_samples = arithmetic.samples_of_epochs(
                config.train.epochs, samples, config.batch_size_at(0)
            )
            config = config._limited_to(max_samples)._fitted()._checked()
        return config.completed()

    def _limited_by_max_tokens(self) -> Self:
        """Return this config with the steps of train.max_tokens, if that is set."""
        max_tokens = self.train.max_tokens
        if max_tokens is None:
            return self
        length = self.data.sequence_length
        tokens_per_step = self.batch_size_at(0) * length
        if max_tokens < tokens_per_step:
            raise Problem(
                "parallel3d.train.max_tokens",
                max_tokens,
                f"is less than one step of {tokens_per_step} tokens",
                f"use {tokens_per_step} or more, or a smaller batch",
            ).error()
        return self._limited_to(max_tokens // length)

    def _with_note_on_batches(self) -> Self:
        """Return this config with a note on train.batch_schedule, if that is set."""
        if not self.train.batch_schedule:
            return self
        note = arithmetic.describe_batches(self.train, self.data)
        return self.with_notes(*dict.fromkeys((*self.notes, note)))

    def _limited_to(self, max_samples: int) -> Self:
        """Return this config with the steps of so many samples in place of max_tokens or epochs."""
        steps = self.steps_between(0, max_samples)
        config = self._with("train", steps=steps, max_tokens=None, epochs=None)
        return config.model_copy(update={"max_samples": max_samples})


class CompleteConfig(ResolvedConfig):
    """A config with which a model can be built and trained: its vocabulary and steps are known."""

    num_steps: Positive = Field(exclude=True)
    """Optimizer steps of the run, which train.steps has, too."""

    def resumed(self, step: int, sample: int, num_left_out: int = 0) -> Self:
        """Return this config for a run that resumes after `step` steps.

        If max_tokens or epochs limit the run, its steps follow from the samples that are left.

        - `sample`: the next step's first sample.
        - `num_left_out`: number of samples before it that were not trained on.
        """
        if self.max_samples is None:
            return self
        left = self.steps_between(sample, self.max_samples + num_left_out)
        steps = max(1, step + left)
        config = self._with("train", steps=steps).model_copy(update={"num_steps": steps})
        return config._fitted()._checked()


Phase = TypeVar("Phase", bound=RunConfig)


def _in_phase(settings: RunSettings, phase: type[Phase], **known: object) -> Phase:
    """Return a config with these settings in another phase, in which `known` is known, too.

    They were validated when they were read.
    """
    values = dict(settings) | known
    known_values = {name: value for name, value in values.items() if value is not None}
    return phase.model_construct(settings.model_fields_set | known.keys(), **known_values)
