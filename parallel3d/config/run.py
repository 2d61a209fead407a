"""The whole config of a run: what DeepSpeed's file holds, plus the "parallel3d" block."""

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, ValidationError

from parallel3d.config import checks, explain, reader
from parallel3d.config.deepspeed import Bf16Config, Fp16Config, OptimizerConfig, ZeroConfig
from parallel3d.config.explain import Setting
from parallel3d.config.section import Problems, Section
from parallel3d.config.settings import (
    DataConfig,
    MeshConfig,
    OutputConfig,
    Parallel3DConfig,
    PipelineConfig,
    Positive,
    TrainConfig,
)


class RunConfig(Section):
    """One ds.json: DeepSpeed's keys with DeepSpeed's meaning, and the "parallel3d" block."""

    train_batch_size: Positive | Literal["auto"] = "auto"
    """Samples in a step: micro batch x accumulation x dp; given, it is checked."""
    train_micro_batch_size_per_gpu: Positive
    """Samples in a microbatch, on each data-parallel rank."""
    gradient_accumulation_steps: Positive = 1
    """Microbatches in a step, which are the microbatches of one pass through the pipeline."""
    gradient_clipping: float = Field(default=1.0, ge=0)
    """Largest global gradient norm; 0 turns clipping off. The default is DeepSpeed's."""
    steps_per_print: Positive = 10
    """Steps between two lines of progress where standard error is no terminal."""
    bf16: Bf16Config = Bf16Config()
    """Training in bfloat16; without it, training is in fp32."""
    fp16: Fp16Config = Fp16Config()
    """Not yet supported."""
    optimizer: OptimizerConfig
    """The optimizer and its parameters."""
    zero_optimization: ZeroConfig
    """Sharding of the training state, and offload."""
    parallel3d: Parallel3DConfig
    """Everything that is not DeepSpeed's."""

    @classmethod
    def from_json(cls, path: str, overrides: Sequence[str] = ()) -> "RunConfig":
        """The config in a file, or in configs/ under that name, with `--a.b value` set in it.

        Raises ConfigError that lists all that is wrong.
        """
        file = reader.find(path)
        raw = reader.read(file)
        reader.apply_overrides(raw, overrides)
        return cls.from_dict(raw, source=str(file))

    @classmethod
    def from_dict(cls, raw: dict[str, Any], source: str = "the config") -> "RunConfig":
        """The config that `raw`, the object of a ds.json, describes; raises ConfigError."""
        try:
            config = cls.model_validate(raw)
        except ValidationError as error:
            problems = explain.problems_in(error, raw, cls)
            # What is sound by itself is compared all the same: all errors at once.
            problems += checks.find_problems(explain.sound_settings(raw, problems, cls))
            raise Problems(problems, source) from None
        if problems := checks.find_problems(config.settings):
            raise Problems(problems, source)
        return config

    @property
    def settings(self) -> dict[str, Any]:
        """DeepSpeed's sections and those of the "parallel3d" block, side by side."""
        return dict(self) | dict(self.parallel3d)

    @property
    def mesh(self) -> MeshConfig:
        """Ranks per axis."""
        return self.parallel3d.mesh

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
        """The corpus."""
        return self.parallel3d.data

    @property
    def train(self) -> TrainConfig:
        """Length, seed, learning rate, evaluation."""
        return self.parallel3d.train

    @property
    def run(self) -> OutputConfig:
        """Where the run is written."""
        return self.parallel3d.run

    @property
    def micro_batch_size(self) -> int:
        """Samples in one microbatch of one data-parallel rank."""
        return self.train_micro_batch_size_per_gpu

    @property
    def num_microbatches(self) -> int:
        """Microbatches that pass through the pipeline in one step."""
        return self.gradient_accumulation_steps

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
        """The config for so many processes, no mesh or batch size left "auto".

        Raises ConfigError if mesh or batch size do not fit.
        """
        config = self._with("mesh", dp=checks.data_parallel_size(self.mesh, world_size))
        if problems := checks.find_problems(config.settings):
            raise Problems(problems)
        return config.model_copy(update={"train_batch_size": config.global_batch_size})

    def with_vocab_size(self, size: int) -> "RunConfig":
        """The config for a tokenizer of `size` tokens; the model's vocabulary may be larger."""
        config = self if self.model.vocab_size != "auto" else self._with("model", vocab_size=size)
        if self.data.tokenizer == "train":
            # A small corpus gives fewer tokens than were asked for.
            config = config._with("data", vocab_size=size)
        if problems := checks.find_problems(config.settings | {"tokenizer_size": size}):
            raise Problems(problems)
        return config

    def to_dict(self) -> dict[str, Any]:
        """The config as one JSON object, defaults filled in; `from_dict` reads it back."""
        return self.model_dump(mode="json")

    def _with(self, section: str, **values: Any) -> "RunConfig":
        changed = getattr(self, section).model_copy(update=values)
        block = self.parallel3d.model_copy(update={section: changed})
        return self.model_copy(update={"parallel3d": block})


def settings() -> list[Setting]:
    """Every setting of a ds.json, in the order of the file."""
    return explain.settings(RunConfig)


def help_text() -> str:
    """Every setting with its type, default and doc, for `--help`."""
    lines = []
    for setting in settings():
        default = f"default {setting.default}" if setting.default else "required"
        lines += [f"--{setting.path} {setting.type} ({default})", f"    {setting.doc}"]
    return "\n".join(lines)
