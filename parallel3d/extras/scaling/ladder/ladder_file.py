"""The ladder file: sizes x budgets, and the settings that all runs share."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Strict

from parallel3d.base import explain, reader
from parallel3d.base.counts import read_number
from parallel3d.base.section import FolderText, Problem, Section


def _as_number(value: object) -> object:
    """Return the number in a text such as "1.5B"; other values as they are."""
    if isinstance(value, str):
        with suppress(ValueError):
            return float(read_number(value))
    return value


Devices = Annotated[int, Field(gt=0, le=10**9)]
# The bounds are far above any real run, and keep products of such numbers finite.
Budget = Annotated[float, BeforeValidator(_as_number), Field(gt=0, le=1e40)]
Params = Annotated[float, BeforeValidator(_as_number), Field(gt=0, le=1e15)]
Numbers = Annotated[tuple[Budget, ...], Strict(False)]
BUDGETS = ("flops", "tokens_per_param", "tokens")


@dataclass(frozen=True)
class HyperparameterLaw:
    """The best learning rate and tokens per batch as functions of (N, training tokens)."""

    source: str
    counts: str  # how N counts parameters: an attribute of PartCounts
    learning_rate: Callable[[float, float], float]
    batch_tokens: Callable[[float, float], float]


LAWS = {
    "olmo": HyperparameterLaw(
        "OLMo-core model_ladder.py, after Porian et al., arXiv:2406.19146",
        "with_head",
        lambda n, tokens: 0.0047 * (n / 108e6) ** (-1 / 3),
        lambda n, tokens: 160 * 2048 * (n / 108e6) ** (2 / 3),
    ),
    "step-law": HyperparameterLaw(
        "Step Law, Li et al., arXiv:2503.04715, equation 1",
        "transformer",
        lambda n, tokens: 1.79 * n**-0.713 * tokens**0.307,
        lambda n, tokens: 0.58 * tokens**0.571,
    ),
}


def _size(value: object) -> object:
    """Return the settings of a size; a bare number means its `params`."""
    value = _as_number(value)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return {"params": value} if is_number else value


Mesh = dict[str, Any] | Literal["plan"] | None
RateOrBatch = Params | Literal["olmo", "step-law"]


class SizeConfig(Section):
    """One model size; a bare number means its `params`."""

    params: Params | None = None
    """Target number of parameters in the blocks, of experts those that a token uses. The ladder
    chooses the width and depth that come nearest."""
    model: dict[str, Any] = Field(default={})
    """Model settings, as in parallel3d.model; without params they give the width and depth."""
    seeds: Annotated[tuple[int, ...], Strict(False)] | None = None
    """Seeds of this size's runs; null uses the ladder's."""
    budgets: Numbers = ()
    """The budgets of the ladder to train this size on; empty means all."""
    mesh: Mesh = None
    """Mesh of this size's runs; null uses the ladder's."""
    devices: Devices | None = None
    """Devices of each run; null uses the ladder's."""


class BudgetConfig(Section):
    """How long to train each size. Set exactly one of the three lists."""

    flops: Numbers = ()
    """Training FLOPs of each run: 6ND, with N including the head (IsoFLOP)."""
    tokens_per_param: Numbers = ()
    """Training tokens per parameter, including those of the head."""
    tokens: Numbers = ()
    """Training tokens."""

    @property
    def kind(self) -> str:
        """The name of the list that is set."""
        return next(name for name in BUDGETS if getattr(self, name))

    def _problems(self) -> Iterator[Problem]:
        budgets = {name: getattr(self, name) for name in BUDGETS if getattr(self, name)}
        rule = f"sets {' and '.join(budgets) or 'none'} of {', '.join(BUDGETS)}"
        if len(budgets) != 1:
            yield Problem("", budgets, rule, "set exactly one")


class TuneConfig(Section):
    """Runs that tune rate and batch before all others: the middle size of the two smallest budgets.

    Each factor multiplies what `hyperparameters` says; the tuned factor is the mean of the two
    budgets.
    """

    learning_rate_factors: Numbers = (0.25, 0.5, 1, 2, 4)
    """Factors of the learning rate to try. The best one must have others on both sides."""
    batch_factors: Numbers = (0.5, 1, 2)
    """Factors of the batch to try, with the learning rate times their square root; [1] tunes the
    rate alone."""

    def _problems(self) -> Iterator[Problem]:
        limits = (
            ("learning_rate_factors", self.learning_rate_factors, 3),
            ("batch_factors", self.batch_factors, 1),
        )
        for name, factors, least in limits:
            if len(set(factors)) < least or 1 not in factors:
                yield Problem(
                    name,
                    list(factors),
                    f"must have {least} or more different ones, with 1",
                    "write [0.5, 1, 2]",
                )


class HyperparametersConfig(Section):
    """Batch size and learning rate of each run: a law, or a number for all runs."""

    learning_rate: RateOrBatch = "step-law"
    """Peak learning rate: "olmo", "step-law", or a number."""
    learning_rate_factor: float = Field(default=1.0, gt=0)
    """Multiplies the learning rate. The laws were fitted to models of at least 1e7 parameters;
    smaller models may need another rate."""
    batch_tokens: RateOrBatch = "step-law"
    """Tokens per optimizer step: "olmo", "step-law", or a number."""
    tune: TuneConfig | None = None
    """Tune both before the other runs; null trains with them as they are."""


class ScheduleConfig(Section):
    """The learning-rate schedule of each run."""

    type: Literal["cosine", "forks"] = "cosine"
    """"cosine" decays to min_ratio at the end of each run. "forks" trains one trunk per size at a
    constant rate; for each budget a fork continues from one of its checkpoints and cools down
    (1 - sqrt)."""
    min_ratio: float = Field(default=0.1, ge=0, le=1)
    """Final learning rate as a fraction of the peak."""
    cooldown: float = Field(default=0.2, gt=0, lt=1)
    """Length of a fork's cool-down as a fraction of its budget's steps."""
    warmup: float = Field(default=0.1, ge=0, le=1)
    """Warm-up as a fraction of a run's tokens, with forks of the shortest budget's tokens. It never
    has more tokens than the model has parameters."""


class HeldOutConfig(Section):
    """A run that is not fitted. Its loss is forecast and registered before it starts."""

    size: Annotated[SizeConfig, BeforeValidator(_size)]
    """Size of the model, as in sizes."""
    flops: Budget | None = None
    """Training FLOPs (6ND). Set either flops or tokens."""
    tokens: Budget | None = None
    """Training tokens."""

    def _problems(self) -> Iterator[Problem]:
        if (self.flops is None) == (self.tokens is None):
            yield Problem(
                "flops", self.flops, "must have one budget", 'set either "flops" or "tokens"'
            )


class LadderConfig(Section):
    """A ladder: every size trained on every budget, with one model family and one corpus."""

    base: str | dict[str, Any]
    """The config that all runs share, without model sizes and training length: a block, or the name
    of its file relative to the ladder's folder."""
    directory: FolderText = Field(min_length=1)
    """Folder of the runs, relative to the working directory. Each ladder needs its own."""
    sizes: Annotated[tuple[Annotated[SizeConfig, BeforeValidator(_size)], ...], Strict(False)]
    """The model sizes: numbers, {"params": ...}, or {"model": {"hidden_size": ..., ...}}."""
    aspect_ratio: float = Field(default=64, ge=1)
    """Target for hidden_size / num_hidden_layers."""
    head_size: int = Field(default=64, gt=0, le=4096)
    """Width of an attention head; hidden_size is a multiple of it."""
    mlp_ratio: Annotated[float, Field(gt=0, le=1000)] | None = None
    """intermediate_size / hidden_size; null uses the default of the model family."""
    budgets: BudgetConfig
    """How long to train each size."""
    hyperparameters: HyperparametersConfig = HyperparametersConfig()
    """Batch size and learning rate."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning-rate schedule."""
    seeds: Annotated[tuple[int, ...], Strict(False), Field(min_length=1)] = (0,)
    """Train each run once per seed, to measure the noise of the loss."""
    held_out: Annotated[tuple[HeldOutConfig, ...], Strict(False)] = ()
    """Runs to forecast. They start after all other runs."""
    mesh: Mesh = None
    """Mesh of each run, or "plan"; null uses the mesh of the base."""
    devices: Devices = 1
    """Devices per run, for a mesh of "plan" or with "auto" for dp."""
    unique_tokens: Annotated[int, Field(gt=0)] | None = None
    """Training tokens of the corpus; null uses the number that `run` counts as it prepares it."""

    @property
    def is_forked(self) -> bool:
        """True if each size has a trunk, and the runs of its budgets are forks of it."""
        return self.schedule.type == "forks"

    def _problems(self) -> Iterator[Problem]:
        path = f"budgets.{self.budgets.kind}"
        budgets = list(getattr(self.budgets, self.budgets.kind))
        if len(self.sizes) < 2:
            yield Problem(
                "sizes",
                [size.params or size.model for size in self.sizes],
                "a scaling law needs several sizes",
                "use two or more",
            )
        if len(set(budgets)) < 2:
            yield Problem(path, budgets, "has only one budget", "use two or more different ones")
        for i, size in enumerate(self.sizes):
            if not set(size.budgets) <= set(budgets):
                yield Problem(
                    f"sizes.{i}.budgets",
                    list(size.budgets),
                    f"must be among {path}",
                    f"use some of {budgets}",
                )


def load(name: str) -> tuple[LadderConfig, dict[str, Any], Path]:
    """Read a ladder, from a file or by the name of a shipped one.

    Returns the ladder, its base config and its file. Raises ConfigError if it is wrong.
    """
    file = reader.find(name)
    raw = reader.read(file)
    ladder = explain.checked(LadderConfig, raw, str(file))
    base = ladder.base
    if isinstance(base, str):
        beside = file.parent / base
        base = reader.read(beside if beside.is_file() else reader.find(base))
    return ladder, dict(base), file
