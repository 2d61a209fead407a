"""The ladder file: sizes x budgets, and what all runs share."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    PlainValidator,
    Strict,
    ValidationError,
    model_validator,
)

from parallel3d.base import explain, reader
from parallel3d.base.section import PathText, Problem, Problems, Section

Positive = Annotated[int, Field(gt=0)]
Devices = Annotated[int, Field(gt=0, le=10**9)]
# Bounds far beyond what is ever trained; products of what is within them are finite.
Budget = Annotated[float, Field(gt=0, le=1e40)]
Numbers = Annotated[tuple[Budget, ...], Strict(False)]
_MOST_RATE_OR_BATCH = 1e15
BUDGETS = ("flops", "tokens_per_param", "tokens")


@dataclass(frozen=True)
class HyperparameterLaw:
    """The best learning rate and batch in tokens, of N (counted as `counts` names) and tokens."""

    source: str
    counts: str
    learning_rate: Callable[[float, float], float]
    batch_tokens: Callable[[float, float], float]


LAWS = {
    "olmo": HyperparameterLaw(
        "OLMo-core model_ladder.py, after Porian et al., arXiv:2406.19146", "with_head",
        lambda n, tokens: 0.0047 * (n / 108e6) ** (-1 / 3),
        lambda n, tokens: 160 * 2048 * (n / 108e6) ** (2 / 3),
    ),
    "step-law": HyperparameterLaw(
        "Step Law, Li et al., arXiv:2503.04715, equation 1", "transformer",
        lambda n, tokens: 1.79 * n**-0.713 * tokens**0.307,
        lambda n, tokens: 0.58 * tokens**0.571,
    ),
}  # fmt: skip


def _size(value: Any) -> Any:
    """A number is the target of the rule of widths and depths."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return {"params": value} if is_number else value


def _base(value: Any) -> Any:
    if not isinstance(value, (str, dict)):
        raise ValueError("must be a config; write its file's name, or the block {...}")
    return value


def _mesh(value: Any) -> Any:
    if value is not None and value != "plan" and not isinstance(value, dict):
        raise ValueError('is no mesh; write {"pp": 1, "dp": 1, "tp": 1}, or "plan"')
    return value


def _law_or_number(value: Any) -> Any:
    known, most = ", ".join(LAWS), _MOST_RATE_OR_BATCH
    if isinstance(value, str):
        if value not in LAWS:
            raise ValueError(f"is no law of learning rate and batch size; use {known}, or a number")
    elif isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= most:
        rule = f"must be a number above 0, of at most {most:g}"
        raise ValueError(f"{rule}; write one, or a law: {known}")
    return value


Mesh = Annotated[Any, PlainValidator(_mesh)]


class SizeConfig(Section):
    """One size of model; a bare number means its `params`."""

    params: Annotated[float, Field(gt=0, le=1e18)] | None = None
    """Parameters of the blocks that the rule of widths and depths comes as near to as it can."""
    model: dict[str, Any] = Field(default={})
    """Settings of the model, as in parallel3d.model, in place of the rule's."""
    seeds: Annotated[tuple[int, ...], Strict(False)] | None = None
    """Seeds of this size's runs; null: the ladder's."""
    budgets: Numbers = ()
    """Those of the ladder's budgets that this size is trained on; none named: all."""
    mesh: Mesh = None
    """As the ladder's; null: that."""
    devices: Devices | None = None
    """As the ladder's; null: that."""


class BudgetConfig(Section):
    """How long each size is trained: exactly one of three ways to say it."""

    flops: Numbers = ()
    """FLOPs of each run: 6ND, N with the head (IsoFLOP)."""
    tokens_per_param: Numbers = ()
    """Tokens for each parameter, N with the head."""
    tokens: Numbers = ()
    """Tokens."""

    @property
    def kind(self) -> str:
        """The one of the three ways that is given."""
        return next(name for name in BUDGETS if getattr(self, name))

    @model_validator(mode="after")
    def _check(self) -> "BudgetConfig":
        given = {name: getattr(self, name) for name in BUDGETS if getattr(self, name)}
        if len(given) != 1:
            rule = f"{' and '.join(given) or 'none'} is given; a budget is one of three things"
            raise Problems([Problem("", given, rule, f"give one of {', '.join(BUDGETS)}")])
        return self


class HyperparametersConfig(Section):
    """Batch size and learning rate of each run: by a law's name, or a number for all."""

    learning_rate: Annotated[float | str, PlainValidator(_law_or_number)] = "step-law"
    """Peak learning rate: "olmo", "step-law", or a number."""
    learning_rate_factor: float = Field(default=1.0, gt=0)
    """Times the law's; the laws are of sizes from 1e7 parameters on."""
    batch_tokens: Annotated[float | str, PlainValidator(_law_or_number)] = "step-law"
    """Tokens of a step: "olmo", "step-law", or a number."""


class ScheduleConfig(Section):
    """The learning rate over a run."""

    type: Literal["cosine", "forks"] = "cosine"
    """"cosine": down to min_ratio at each run's own end. "forks": a trunk of constant rate for each
    size, from whose checkpoints a fork cools down (1 - sqrt) to each budget's end."""
    min_ratio: float = Field(default=0.1, ge=0, le=1)
    """Where it ends, as a fraction of the learning rate."""
    cooldown: float = Field(default=0.2, gt=0, lt=1)
    """Share of a budget's steps that its fork has."""
    warmup: float = Field(default=0.1, ge=0, le=1)
    """Longest warm-up as a share of a run's tokens (of forks: of the shortest's); it is never of
    more tokens than the model has parameters."""


class HeldOutConfig(Section):
    """A run that no law is fitted on: its loss is forecast, and registered before it starts."""

    size: Annotated[SizeConfig, BeforeValidator(_size)]
    """As one of sizes."""
    flops: Budget | None = None
    """As a budget's; give this, or tokens."""
    tokens: Budget | None = None
    """As a budget's."""

    @model_validator(mode="after")
    def _check(self) -> "HeldOutConfig":
        if (self.flops is None) == (self.tokens is None):
            rule, remedy = "has to have one budget", 'give "flops" or "tokens"'
            raise Problems([Problem("flops", self.flops, rule, remedy)])
        return self


class LadderConfig(Section):
    """A ladder: sizes x budgets of one family, on one corpus."""

    base: Annotated[Any, PlainValidator(_base)]
    """A run's config that all runs share, without sizes and length, or its file's name, relative to
    the ladder's folder."""
    directory: PathText = Field(min_length=1)
    """Folder of the runs, relative to the working directory; of this ladder alone."""
    sizes: Annotated[tuple[Annotated[SizeConfig, BeforeValidator(_size)], ...], Strict(False)]
    """The models: numbers, {"params": ...}, or {"model": {"hidden_size": ..., ...}}."""
    aspect_ratio: float = Field(default=64, ge=0.01)
    """hidden_size / num_hidden_layers that the rule keeps to as it can."""
    head_size: int = Field(default=64, gt=0, le=2**20)
    """Width of an attention head; hidden_size is a multiple of it."""
    mlp_ratio: Annotated[float, Field(gt=0, le=1000)] | None = None
    """intermediate_size / hidden_size; null: the family's."""
    budgets: BudgetConfig
    """How long each size is trained."""
    hyperparameters: HyperparametersConfig = HyperparametersConfig()
    """Batch size and learning rate."""
    schedule: ScheduleConfig = ScheduleConfig()
    """The learning rate over a run."""
    seeds: Annotated[tuple[int, ...], Strict(False)] = (0,)
    """Every run once for each: the noise of the loss."""
    held_out: Annotated[tuple[HeldOutConfig, ...], Strict(False)] = ()
    """Runs to be forecast, after all others."""
    mesh: Mesh = None
    """Mesh of each run, or "plan"; null: the base's."""
    devices: Devices = 1
    """Devices for each run whose mesh is planned, or has dp "auto"."""
    unique_tokens: Positive | None = None
    """Training tokens of the corpus; null: as `run` counts them when it prepares it."""

    @property
    def is_forked(self) -> bool:
        """True if each size has a trunk, and its budgets are forks of it."""
        return self.schedule.type == "forks"

    @model_validator(mode="after")
    def _check(self) -> "LadderConfig":
        if found := list(self._problems()):
            raise Problems(found)
        return self

    def _problems(self) -> Iterator[Problem]:
        if len(self.sizes) < 2:
            sizes = [size.params or size.model for size in self.sizes]
            yield Problem("sizes", sizes, "one size tells no law of sizes", "give two or more")
        path = f"budgets.{self.budgets.kind}"
        budgets = getattr(self.budgets, self.budgets.kind)
        distinct = set(budgets)
        if len(distinct) < 2:
            rule = "all budgets are equal" if len(budgets) > 1 else "is one budget"
            yield Problem(path, list(budgets), rule, "give two or more that differ")
        elif len(distinct) < len(budgets):
            yield Problem(path, list(budgets), "has a budget twice", "leave one out; see seeds")
        seeds = {"seeds": self.seeds}
        for i, size in enumerate(self.sizes):
            seeds[f"sizes.{i}.seeds"] = self.seeds if size.seeds is None else size.seeds
            if other := [b for b in size.budgets if b not in distinct]:
                remedy = f"use some of {list(budgets)}"
                yield Problem(f"sizes.{i}.budgets", other[0], f"is none of {path}", remedy)
        for place, some in seeds.items():
            if not some or len(set(some)) < len(some):
                rule, remedy = "must be seeds that differ", "write [0], or [0, 1]"
                yield Problem(place, list(some), rule, remedy)


def load(name: str) -> tuple[LadderConfig, dict[str, Any], Path]:
    """Return a ladder by file or shipped name, its base config, its file; raises ConfigError."""
    file = reader.find(name)
    raw = reader.read(file)
    try:
        ladder = LadderConfig.model_validate(raw)
    except ValidationError as error:
        raise Problems(explain.problems_in(error, raw, LadderConfig), str(file)) from None
    base = ladder.base
    if isinstance(base, str):
        beside = file.parent / base
        base = reader.read(beside if beside.is_file() else reader.find(base))
    return ladder, dict(base), file
