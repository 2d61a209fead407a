"""The "parallel3d" block: mesh, pipeline, model, data, training and where a run is written."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, model_validator

import models
import parallel3d
from parallel3d.config.reader import CONFIGS
from parallel3d.config.section import ABSENT, Problem, Problems, Section, Strings, refuse

SCHEDULES = Path(parallel3d.__file__).parent / "pipeline" / "schedules"
NOT_FOR_TRAINING = {
    "interleaved": "interleaved schedules can be drawn but not yet run; use gpipe or one_f_one_b",
    "forward_only": "forward_only has no backward, it is for evaluation; use gpipe or one_f_one_b",
}

Positive = Annotated[int, Field(gt=0)]
# pp and tp cannot be derived from the number of processes, so their "auto" means 1.
OneIfAuto = Annotated[Positive, BeforeValidator(lambda value: 1 if value == "auto" else value)]


def schedule_names() -> list[str]:
    """Every schedule: the file names in parallel3d/pipeline/schedules."""
    return sorted(path.stem for path in SCHEDULES.glob("[!_]*.py"))


def _known_schedule(name: str) -> str:
    if name not in schedule_names():
        usable = ", ".join(n for n in schedule_names() if n not in NOT_FOR_TRAINING)
        raise ValueError(f"names no file in parallel3d/pipeline/schedules; use one of: {usable}")
    return name


def _known_hardware(name: str) -> str:
    known = sorted(path.stem for path in CONFIGS.glob("hardware/*.json"))
    if name not in ("auto", *known):
        raise ValueError(f'is not described in configs/hardware; use "auto", {", ".join(known)}')
    return name


def _one_stage(count: int) -> int:
    if count > 1:
        raise ValueError("several stages on a rank are not yet supported; use 1")
    return count


def _family_config(value: Any) -> Any:
    """The model section, by the family's own `Config`."""
    if isinstance(value, Section):
        return value
    if not isinstance(value, dict):
        raise ValueError("must be a block of settings; write {...}")
    family = value.get("family", ABSENT)
    if family not in models.families():
        path = "family"
        known = ", ".join(models.families())
        raise Problems([Problem(path, family, "names no model family", f"use one of: {known}")])
    return models.config_class(family).model_validate(value)


class MeshConfig(Section):
    """How many ranks each axis of the mesh has; their product is the number of processes."""

    pp: OneIfAuto = 1
    """Pipeline-parallel ranks; "auto" means 1."""
    dp: Positive | Literal["auto"] = "auto"
    """Data-parallel ranks; "auto" takes the processes that pp and tp leave."""
    tp: OneIfAuto = 1
    """Tensor-parallel ranks; "auto" means 1."""

    def __str__(self) -> str:
        return f"pp={self.pp} x dp={self.dp} x tp={self.tp}"


class PipelineConfig(Section):
    """How microbatches flow through the stages."""

    schedule: Annotated[str, AfterValidator(_known_schedule), refuse(NOT_FOR_TRAINING)] = "gpipe"
    """The order of forwards and backwards: a file name in parallel3d/pipeline/schedules."""
    stages_per_rank: Annotated[Positive, AfterValidator(_one_stage)] = 1
    """Stages that each pipeline rank holds; only 1 runs yet."""
    gradient_reduction: Literal["per_step", "per_microbatch"] = "per_step"
    """Reduce gradients once a step, or after each microbatch (less memory, more traffic)."""
    activation_checkpointing: Literal["none", "full"] = "none"
    """"full" keeps a layer's input only and computes the layer again in backward."""


class DataConfig(Section):
    """The corpus, its tokenizer, and how it is cut into samples."""

    source: Literal["python-stdlib", "text"] = "python-stdlib"
    """"python-stdlib" is the running interpreter's standard library; "text" reads `paths`."""
    paths: Strings = ()
    """Text files and globs ("folder/**/*.txt"), for source "text"; each file is a document."""
    tokenizer: str = Field(default="train", min_length=1)
    """"train" trains a byte-level BPE on the corpus; else a folder or name for AutoTokenizer."""
    vocab_size: int = Field(default=4096, ge=257)
    """Tokens that tokenizer "train" makes; 256 bytes and the end of text are the least."""
    sequence_length: int = Field(gt=0)
    """Tokens in a sample."""
    held_out_fraction: float = Field(default=0.01, gt=0, lt=0.5)
    """Share of the documents that is kept for evaluation."""
    cache: str = Field(default="auto", min_length=1)
    """Folder of tokenised corpora; "auto" is parallel3d in $XDG_CACHE_HOME, or in ~/.cache."""

    @model_validator(mode="after")
    def _check(self) -> "DataConfig":
        if self.source == "text" and not self.paths:
            remedy = 'add "paths": ["corpus/*.txt"]'
            raise Problems([Problem("paths", [], 'is required by source "text"', remedy)])
        if self.source != "text" and self.paths:
            rule = f'is not read by source "{self.source}"'
            raise Problems([Problem("paths", self.paths, rule, 'remove it, or use source "text"')])
        return self


class LrScheduleConfig(Section):
    """The learning rate of each step, as a fraction of optimizer.params.lr."""

    type: Literal["constant", "cosine"] = "constant"
    """After the warm-up: stay, or follow half a cosine down to min_ratio at the last step."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises linearly from 0."""
    min_ratio: float = Field(default=0.1, ge=0, le=1)
    """Where "cosine" ends."""


class TrainConfig(Section):
    """How long to train, and when to evaluate."""

    steps: int = Field(gt=0)
    """Optimizer steps."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Fixes weights, dropout and the order of samples."""
    lr_schedule: LrScheduleConfig = LrScheduleConfig()
    """The learning rate over the steps."""
    evaluate_every: int = Field(default=0, ge=0)
    """Steps between held-out losses; 0 means only after the last step."""
    evaluate_samples: int = Field(default=64, gt=0)
    """Held-out samples in an evaluation."""
    timeout_seconds: int = Field(default=300, gt=0)
    """How long a rank waits for another before the run fails, once the first step is done."""

    @model_validator(mode="after")
    def _check(self) -> "TrainConfig":
        warmup = self.lr_schedule.warmup_steps
        if warmup > self.steps:
            rule = f"is longer than the run of {self.steps} steps"
            remedy = f"use at most {self.steps}, or raise train.steps"
            raise Problems([Problem("lr_schedule.warmup_steps", warmup, rule, remedy)])
        return self


class OutputConfig(Section):
    """Where a run is written: <directory>/<name>/."""

    directory: str = Field(default="runs", min_length=1)
    """Folder of all runs, relative to the working directory."""
    name: str = Field(default="auto", pattern=r"^[^/\\]+$")
    """Name of this run; "auto" is readable and never collides."""
    tensorboard: bool = False
    """Write TensorBoard's files beside metrics.jsonl."""
    save_weights: bool = True
    """Write the trained weights as safetensors."""
    hardware: Annotated[str, AfterValidator(_known_hardware)] = "auto"
    """Whose peak FLOP/s MFU is measured against: a name in configs/hardware, or "auto"."""


class Parallel3DConfig(Section):
    """The block that DeepSpeed ignores."""

    mesh: MeshConfig = MeshConfig()
    """Ranks per axis."""
    pipeline: PipelineConfig = PipelineConfig()
    """How microbatches flow through the stages."""
    model: Annotated[Any, PlainValidator(_family_config)]
    """The model: its family, and that family's own settings."""
    data: DataConfig
    """The corpus."""
    train: TrainConfig
    """Length, seed, learning rate, evaluation."""
    run: OutputConfig = OutputConfig()
    """Where the run is written."""
