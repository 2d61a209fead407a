"""Expand a ladder file into runs: the complete configs that training reads."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from math import ceil, prod
from pathlib import Path
from typing import Any

from parallel3d import models
from parallel3d.base.errors import ConfigError
from parallel3d.base.mesh_sizes import AXES
from parallel3d.config import RunConfig
from parallel3d.extras.scaling.ladder.ladder_file import LAWS, LadderConfig, SizeConfig, TuneConfig
from parallel3d.extras.scaling.ladder.sizes import model_of, shared_model
from parallel3d.extras.scaling.points import FLOPS_PER_ND
from parallel3d.extras.scaling.runs import ALL, PartCounts, count
from parallel3d.model.config import ModelConfig
from parallel3d.models.common import divisor_below
from parallel3d.plan.vocabulary import with_vocabulary

# Folders within a ladder's directory.
CONFIGS = "configs"
TRUNKS = "trunks"
_FOLDERS = {"trunk": TRUNKS, "tune": "tuning"}  # other kinds stand in the directory itself
RateAndBatch = tuple[float, float]
"""Learning rate and tokens per batch, or a factor of each."""


@dataclass(frozen=True)
class LadderRun:
    """One run of a ladder, with the config that launch/train.py reads.

    A fork continues from a checkpoint of its trunk, and its tokens and FLOPs include the trunk's.
    """

    name: str
    config: RunConfig
    counts: PartCounts
    tokens: int
    exact_flops: float
    """Training FLOPs with those of the attention."""
    devices: int
    steps: int
    """Steps up to the end of the run, including those of its trunk."""
    kind: str = "fit"
    """"tune", "trunk", "fit" or "held-out"."""
    trunk: str = ""
    """The name of the run whose checkpoint it starts from."""
    steps_done: int = 0
    """Steps of the trunk up to that checkpoint."""
    factors: RateAndBatch = (1.0, 1.0)
    """Learning rate and batch over those of the ladder."""
    budget: float = 0.0
    """The budget of a run that tunes, in the unit of the ladder's budgets."""

    @property
    def flops(self) -> float:
        """Training FLOPs: 6ND, with N including the head."""
        return float(FLOPS_PER_ND * self.counts.with_head * self.tokens)

    @property
    def batch_tokens(self) -> int:
        """Tokens per optimizer step, on any mesh."""
        assert self.config.train_batch_size
        return self.config.train_batch_size * self.config.data.sequence_length

    @property
    def own_share(self) -> float:
        """Fraction of `steps` that the run takes itself, after those of its trunk."""
        return 1 - self.steps_done / self.steps

    @property
    def folder(self) -> Path:
        """The folder that launch/train.py writes the run to."""
        return Path(self.config.run.directory) / self.config.run.name


@dataclass(frozen=True)
class _Point:
    """A model and its number of tokens: one combination of size and budget."""

    name: str
    path: str  # the place of the size in the ladder's file, for messages
    size: SizeConfig
    model: ModelConfig
    counts: PartCounts
    tokens: float

    def settings(self, ladder: LadderConfig, factors: RateAndBatch) -> RateAndBatch:
        """Return the learning rate and the tokens per batch, from a law or from the ladder.

        - `factors`: the factor of each.
        """
        hyperparameters = ladder.hyperparameters
        values = []
        for name in ("learning_rate", "batch_tokens"):
            value = getattr(hyperparameters, name)
            if isinstance(value, str):
                law = LAWS[value]
                value = getattr(law, name)(getattr(self.counts, law.counts), self.tokens)
            values.append(float(value))
        rate = values[0] * hyperparameters.learning_rate_factor
        return rate * factors[0], values[1] * factors[1]


def runs_of(
    ladder: LadderConfig,
    base: Mapping[str, object],
    source: Path,
    factors: RateAndBatch = (1.0, 1.0),
) -> list[LadderRun]:
    """Return every run of the ladder: to tune, trunks, to fit laws to, and held-out runs.

    - `base`: the config that all runs share.
    - `source`: the ladder's file, for messages.
    - `factors`: tuned ones, of the rate and the batch of all runs but those that tune.

    Raises ConfigError if a run would have a wrong config.
    """
    shared = shared_model(base, source)
    runs: list[LadderRun] = []
    by_budget: dict[float, list[_Point]] = {}
    kind = ladder.budgets.kind
    for i, size in enumerate(ladder.sizes):
        budgets = sorted(size.budgets or getattr(ladder.budgets, kind))
        points = list(_points(ladder, size, shared, f"sizes.{i}", kind, budgets))
        for budget, point in zip(budgets, points, strict=True):
            by_budget.setdefault(budget, []).append(point)
        for seed in size.seeds or ladder.seeds:
            if ladder.is_forked:
                runs += _forks(ladder, base, points, seed, factors)
            else:
                runs += [_run(ladder, base, point, seed, factors=factors) for point in points]
    for i, held in enumerate(ladder.held_out):
        kind, budget = ("tokens", held.tokens) if held.flops is None else ("flops", held.flops)
        assert budget
        (point,) = _points(ladder, held.size, shared, f"held_out.{i}", kind, [budget], "size")
        name = f"held-out-{point.name}"
        seed = (held.size.seeds or ladder.seeds)[0]
        runs.append(_run(ladder, base, point, seed, name=name, kind="held-out", factors=factors))
    for budget in sorted(by_budget)[:2] if ladder.hyperparameters.tune else ():
        beside = sorted(by_budget[budget], key=lambda point: point.counts.with_head)
        tuning = _tuning(ladder, base, beside[len(beside) // 2])
        runs += [replace(run, budget=budget) for run in tuning]
    twice = [name for name, times in Counter(run.name for run in runs).items() if times > 1]
    if twice:
        raise ConfigError(
            f"{source}: two runs are the same ({twice[0]}); remove a size, a budget or a seed that "
            "is there twice"
        )
    return runs


def _tuning(ladder: LadderConfig, base: Mapping[str, object], point: _Point) -> Iterator[LadderRun]:
    """Yield the runs of a point with each rate, and with each batch at its square root's rate."""
    tune = ladder.hyperparameters.tune or TuneConfig()
    pairs = [(factor, 1.0) for factor in tune.learning_rate_factors]
    pairs += [(factor**0.5, factor) for factor in tune.batch_factors]
    for factors in dict.fromkeys(pairs):
        name = f"{point.name}-rate{factors[0]:.3g}-batch{factors[1]:.3g}"
        yield _run(ladder, base, point, ladder.seeds[0], name=name, kind="tune", factors=factors)


def _points(
    ladder: LadderConfig,
    size: SizeConfig,
    shared: Mapping[str, object],
    path: str,
    kind: str,
    budgets: Sequence[float],
    key: str = "",
) -> Iterator[_Point]:
    """Yield the point of each budget; `key` is the place of the size within the block at `path`."""
    model = model_of(ladder, size, shared, ".".join(filter(None, (path, key))))
    counts = count(model)
    for budget in budgets:
        match kind:
            case "flops":
                tokens = budget / (FLOPS_PER_ND * counts.with_head)
                shown = re.sub(r"e\+0*", "e", f"c{budget:.3g}")
            case "tokens_per_param":
                tokens = budget * counts.with_head
                shown = f"{budget:g}x"
            case _:
                tokens = budget
                shown = f"d{_short(budget)}"
        name = f"{_short(counts.transformer)}-{shown}"
        yield _Point(name, path, size, model, counts, tokens)


def _forks(
    ladder: LadderConfig,
    base: Mapping[str, object],
    points: Sequence[_Point],
    seed: int,
    factors: RateAndBatch,
) -> list[LadderRun]:
    """Return a trunk with a constant learning rate and a fork of it for each budget.

    All of them use the batch and learning rate of the longest budget, and the warm-up of the
    shortest one with a trunk. Budgets of too few steps have no trunk.
    """
    longest = points[-1]
    lengths = [point.tokens for point in points]
    same = longest.settings(ladder, factors)
    trunk = f"trunk-{_short(longest.counts.transformer)}"
    forks = [
        _run(ladder, base, point, seed, settings=same, beside=lengths, trunk=trunk)
        for point in points
    ]
    at = sorted({fork.steps_done for fork in forks if fork.trunk})
    if not at:
        return forks
    done = at[-1] * forks[-1].batch_tokens
    first = _run(
        ladder,
        base,
        replace(longest, tokens=done),
        seed,
        name=trunk,
        settings=same,
        beside=lengths,
        at=at,
        kind="trunk",
    )
    return [first, *forks]


def _run(
    ladder: LadderConfig,
    base: Mapping[str, Any],
    point: _Point,
    seed: int,
    *,
    name: str = "",
    settings: RateAndBatch | None = None,
    beside: Sequence[float] = (),
    trunk: str = "",
    at: Sequence[int] = (),
    kind: str = "fit",
    factors: RateAndBatch = (1.0, 1.0),
) -> LadderRun:
    """Return the run of a point.

    - `settings`: learning rate and tokens per batch; None to take those of the point.
    - `beside`: with forks, the tokens of all budgets of this size.
    - `trunk`: with forks, the name of their trunk.
    - `at`: for a trunk, the steps at which it saves checkpoints for its forks.
    - `factors`: of the point's learning rate and tokens per batch.
    """
    rate, batch_tokens = settings or point.settings(ladder, factors)
    is_first = seed == ladder.seeds[0] or kind == "held-out"
    suffix = "" if is_first else f"-seed{seed}"
    name = f"{name or point.name}{suffix}"
    trunk = f"{trunk}{suffix}" if trunk else ""
    raw = deepcopy(dict(base))
    block = raw["parallel3d"]
    seq = block["data"]["sequence_length"]
    if (mesh := point.size.mesh or ladder.mesh) is not None:
        block["mesh"] = mesh
    devices, dp = _ranks_of(block.get("mesh", {}), point.size.devices or ladder.devices)
    batch = max(1, round(batch_tokens / seq / dp)) * dp
    step_tokens = batch * seq

    def steps_of(tokens: float) -> int:
        return int(max(1, round(tokens / step_tokens)))

    def before_cooldown(steps: int) -> int:
        return steps - max(1, ceil(ladder.schedule.cooldown * steps))

    steps = steps_of(point.tokens)
    with_trunk = [tokens for tokens in beside if before_cooldown(steps_of(tokens))]
    shortest = min(with_trunk, default=point.tokens)
    warmup = int(min(point.counts.with_head, ladder.schedule.warmup * shortest) / step_tokens)
    schedule: dict[str, Any] = {"type": "cosine", "min_ratio": ladder.schedule.min_ratio}
    done = 0
    if ladder.is_forked:  # warm-up has to end before the first cool-down begins
        warmup = min(warmup, before_cooldown(steps_of(shortest)))
    if at:
        schedule = {"type": "constant"}
    elif ladder.is_forked:
        before = before_cooldown(steps)
        warmup = min(warmup, before)
        done = before if trunk else 0
        schedule |= {"type": "wsd", "decay_steps": steps - before}
    home = Path(ladder.directory)
    trunk = trunk if done else ""  # a budget of too few steps has no trunk
    _write_batch(raw, block, batch=batch, dp=dp, rate=rate)
    block["model"] = point.model.model_dump(mode="json")
    block["train"] = {
        "evaluate_samples": ALL,
        **block.get("train", {}),
        "steps": steps,
        "seed": seed,
        "lr_schedule": schedule | {"warmup_steps": warmup},
    }
    checkpoint = block["checkpoint"] = dict(block.get("checkpoint", {}))
    if at:
        block["train"]["evaluate_samples"] = 1
        checkpoint["at"] = list(at)
    if trunk:
        checkpoint["resume"] = str(home / TRUNKS / trunk / "checkpoints" / f"step-{done}")
    block["run"] = {
        "save_weights": False,
        **block.get("run", {}),
        "directory": str(home / _FOLDERS.get(kind, "")),
        "name": name,
    }
    try:
        config = with_vocabulary(RunConfig.from_dict(raw, source=f"the run {name}"))
        if not config.is_planned:
            config.resolve(devices)
    except ConfigError as error:
        raise ConfigError(f"{point.path}: {error}") from None
    trained = steps * step_tokens
    return LadderRun(
        name=name,
        config=config,
        counts=point.counts,
        tokens=trained,
        exact_flops=models.train_flops_per_token(config.model, seq) * trained,
        devices=devices,
        steps=steps,
        kind=kind,
        trunk=trunk,
        steps_done=done,
        factors=factors,
    )


def _short(number: float) -> str:
    """Return a count in short form for a run's name, such as 90k or 1.2M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{float(f'{number / size:.3g}'):g}{unit}"
    return f"{number:.3g}"


def _write_batch(
    raw: dict[str, Any], block: dict[str, object], *, batch: int, dp: int, rate: float
) -> None:
    """Set the learning rate and the global batch in `raw`, with microbatches up to the base's."""
    micro = raw.pop("train_micro_batch_size_per_gpu", None)
    raw.pop("gradient_accumulation_steps", None)
    raw["train_batch_size"] = batch
    if block.get("mesh") != "plan":
        share = batch // dp
        most = micro if isinstance(micro, int) and micro > 0 else share
        raw["train_micro_batch_size_per_gpu"] = divisor_below(share, min(most, share) + 1)
    optimizer = raw.setdefault("optimizer", {"type": "AdamW", "params": {}})
    optimizer.setdefault("params", {})["lr"] = float(f"{rate:.4g}")


def _ranks_of(mesh: Any, devices: int) -> tuple[int, int]:
    """Return the number of processes of a mesh and its data-parallel size.

    The data-parallel size is 1 if the mesh is still to be planned.
    """
    if mesh == "plan":
        return devices, 1
    pp, dp, cp, tp = (mesh.get(axis, "auto") for axis in AXES)
    rest = prod(size for size in (pp, cp, tp) if isinstance(size, int) and size > 0)
    if not isinstance(dp, int) or dp < 1:
        dp = max(1, devices // rest)
    return rest * dp, dp
