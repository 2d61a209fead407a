"""Expansion of a ladder into runs: complete configs, the files that training reads."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from parallel3d import models
from parallel3d.base.errors import ConfigError
from parallel3d.config import RunConfig
from parallel3d.plan.search.plans import with_vocabulary
from parallel3d.scaling.ladder.base import ranks_of, shared_model, write_batch
from parallel3d.scaling.ladder.file import HeldOutConfig, LadderConfig, SizeConfig
from parallel3d.scaling.ladder.hyperparameter_laws import LAWS, PowerLaw
from parallel3d.scaling.ladder.sizes import PartCounts, count, model_of
from parallel3d.scaling.points import FLOPS_PER_PARAM_AND_TOKEN
from parallel3d.scaling.runs import ALL

CONFIGS, TRUNKS = "configs", "trunks"  # folders of a ladder's directory
_SIX = FLOPS_PER_PARAM_AND_TOKEN


@dataclass(frozen=True)
class LadderRun:
    """One run of a ladder: what it trains, and the config that launch/train.py reads.

    `counts`: its parameters. `tokens`: on which the weights that it ends with were trained.
    `exact_flops`: of the same, attention included. `steps_done`: those that its trunk has done
    for it. `trunk`: the name of the run whose checkpoint it begins from, "" of none.
    """

    name: str
    config: RunConfig
    counts: PartCounts
    tokens: int
    exact_flops: float
    devices: int
    kind: str = "fit"  # "fit", "trunk", "held-out"
    trunk: str = ""
    steps_done: int = 0

    @property
    def flops(self) -> float:
        """FLOPs of training a run: 6ND, with N including the head."""
        return float(_SIX * self.counts.with_head * self.tokens)

    @property
    def steps(self) -> int:
        """Optimizer steps up to the run's end, its trunk's included."""
        return self.config.num_steps

    @property
    def batch_tokens(self) -> int:
        """Tokens of one step of a run, whatever its mesh."""
        assert self.config.train_batch_size
        return self.config.train_batch_size * self.config.data.sequence_length

    @property
    def own_share(self) -> float:
        """Fraction of the run's steps that it takes itself, rather than its trunk."""
        return 1 - self.steps_done / self.steps

    @property
    def folder(self) -> Path:
        """The folder to which launch/train.py writes a run."""
        return Path(self.config.run.directory) / self.config.run.name


@dataclass(frozen=True)
class _Point:
    """One place of the ladder: a model, its tokens, and what the laws say of them."""

    name: str
    path: str
    size: SizeConfig
    model: Any
    counts: PartCounts
    tokens: float

    def settings(self, ladder: LadderConfig) -> tuple[float, float]:
        """Its learning rate and its batch in tokens."""
        given = ladder.hyperparameters

        def value(wanted: float | str, what: str) -> float:
            if not isinstance(wanted, str):
                return float(wanted)
            law = LAWS[wanted]
            power: PowerLaw = getattr(law, what)
            return power(float(getattr(self.counts, law.counts)), self.tokens)

        rate = value(given.learning_rate, "learning_rate") * given.learning_rate_factor
        return rate, value(given.batch_tokens, "batch_tokens")


def runs_of(ladder: LadderConfig, base: Mapping[str, Any], source: Path) -> list[LadderRun]:
    """Every run of the ladder: trunks, those that laws are fitted on, and those held out.

    `base`: the config that they share; `source`: the ladder's file, for messages. Raises
    ConfigError for a size, a budget or a setting that makes no run.
    """
    shared = shared_model(base, source)
    found: list[LadderRun] = []
    for i, size in enumerate(ladder.sizes):
        path = f"sizes.{i}"
        points = list(_points(ladder, size, shared, path))
        for seed in size.seeds or ladder.seeds:
            build = _cooled if ladder.is_forked else _plain
            found += build(ladder, base, points, seed)
    for i, held in enumerate(ladder.held_out):
        found.append(_held_out(ladder, base, held, shared, f"held_out.{i}"))
    twice = [name for name, times in Counter(run.name for run in found).items() if times > 1]
    if twice:
        raise ConfigError(
            f"{source}: sizes: two of them are the same model ({twice[0]}); leave one out"
        )
    return found


def _points(
    ladder: LadderConfig, size: SizeConfig, shared: Mapping[str, Any], path: str
) -> Iterator[_Point]:
    model = model_of(ladder, size, shared, path)
    counts = count(model)
    kind = ladder.budgets.kind
    for budget in sorted(size.budgets or getattr(ladder.budgets, kind)):
        per = {
            "flops": 1 / (_SIX * counts.with_head), "tokens_per_param": counts.with_head,
            "tokens": 1,
        }[kind]  # fmt: skip
        shown = {"flops": f"c{_power(budget)}", "tokens_per_param": f"{budget:g}x"}
        name = f"{_short(counts.transformer)}-{shown.get(kind, f'd{_short(budget)}')}"
        yield _Point(name, path, size, model, counts, budget * per)


def _plain(
    ladder: LadderConfig, base: Mapping[str, Any], points: Sequence[_Point], seed: int
) -> Iterator[LadderRun]:
    """A run of its own for each budget: cosine to its own end."""
    for point in points:
        name = _seeded(point.name, seed, ladder)
        yield _run(ladder, base, point, seed, name=name)


def _cooled(
    ladder: LadderConfig, base: Mapping[str, Any], points: Sequence[_Point], seed: int
) -> list[LadderRun]:
    """A trunk of constant rate, and a fork for each budget; no trunk where all are too short.

    Batch and learning rate are the same for all: what the laws say of the longest. The warm-up is
    that of the shortest fork that the trunk has.
    """
    longest, lengths = points[-1], [point.tokens for point in points]
    same = longest.settings(ladder)
    size = _short(longest.counts.transformer)
    trunk = _seeded(f"trunk-{size}", seed, ladder)
    forks = [
        _run(
            ladder, base, point, seed, name=_seeded(point.name, seed, ladder), settings=same,
            beside=lengths, trunk=trunk,
        )
        for point in points
    ]  # fmt: skip
    at = sorted({fork.steps_done for fork in forks if fork.trunk})
    if not at:
        return forks
    tokens = at[-1] * forks[-1].batch_tokens
    return [
        _run(
            ladder, base, longest, seed, name=trunk, settings=same, beside=lengths, at=at,
            kind="trunk", tokens=tokens,
        ),
        *forks,
    ]  # fmt: skip


def _held_out(
    ladder: LadderConfig, base: Mapping[str, Any], held: HeldOutConfig, shared: Mapping[str, Any],
    path: str,
) -> LadderRun:  # fmt: skip
    """A run that is forecast; its rate comes down as the others' does, without a trunk."""
    model = model_of(ladder, held.size, shared, f"{path}.size")
    counts = count(model)
    flops = held.flops
    tokens = held.tokens if flops is None else flops / (_SIX * counts.with_head)
    assert tokens
    budget = f"d{_short(tokens)}" if flops is None else f"c{_power(flops)}"
    name = f"held-out-{_short(counts.transformer)}-{budget}"
    point = _Point(name, path, held.size, model, counts, tokens)
    seed = (held.size.seeds or ladder.seeds)[0]
    return _run(ladder, base, point, seed, name=name, kind="held-out")


def _run(
    ladder: LadderConfig, base: Mapping[str, Any], point: _Point, seed: int, *, name: str,
    settings: tuple[float, float] | None = None, beside: Sequence[float] = (), trunk: str = "",
    at: Sequence[int] = (), kind: str = "fit", tokens: float | None = None,
) -> LadderRun:  # fmt: skip
    """The run of a point; `at` are the steps of a trunk that its forks begin from.

    `beside`: tokens of all runs of its size and seed where these are forks.
    """
    rate, batch_tokens = settings or point.settings(ladder)
    raw = deepcopy(dict(base))
    block = raw["parallel3d"]
    seq = block["data"]["sequence_length"]
    if (mesh := point.size.mesh or ladder.mesh) is not None:
        block["mesh"] = mesh
    devices, dp = ranks_of(block.get("mesh", {}), point.size.devices or ladder.devices)
    batch = max(1, round(batch_tokens / seq / dp)) * dp
    of_a_step = batch * seq
    steps = _steps(tokens or point.tokens, of_a_step)
    with_trunk = [d for d in beside if _before_cooldown(ladder, _steps(d, of_a_step))]
    shortest = min(with_trunk, default=point.tokens)
    warmup = int(min(point.counts.with_head, ladder.schedule.warmup * shortest) / of_a_step)
    schedule: dict[str, Any] = {"type": "cosine", "min_ratio": ladder.schedule.min_ratio}
    done = 0
    if ladder.is_forked:  # a rate that still rises cannot come down
        warmup = min(warmup, _before_cooldown(ladder, _steps(shortest, of_a_step)))
    if at:
        schedule = {"type": "constant"}
    elif ladder.is_forked:
        before = _before_cooldown(ladder, steps)
        warmup = min(warmup, before)
        done = before if trunk else 0
        schedule |= {"type": "wsd", "decay_steps": steps - before}
    trunks = Path(ladder.directory) / TRUNKS
    if trunk and not done:
        trunk = ""  # too short for one
    write_batch(raw, block, batch=batch, dp=dp, rate=rate)
    block["model"] = point.model.model_dump(mode="json")
    block["train"] = {
        "evaluate_samples": ALL, **block.get("train", {}), "steps": steps, "seed": seed,
        "lr_schedule": schedule | {"warmup_steps": warmup},
    }  # fmt: skip
    checkpoint = dict(block.get("checkpoint", {}))
    if at:
        block["train"]["evaluate_samples"] = 1
        checkpoint["at"] = list(at)
    if trunk:
        checkpoint["resume"] = str(trunks / trunk / "checkpoints" / f"step-{done}")
    directory = str(trunks if at else ladder.directory)
    block["checkpoint"] = checkpoint
    block["run"] = {"save_weights": False, **block.get("run", {})} | {
        "directory": directory, "name": name,
    }  # fmt: skip
    try:
        config = with_vocabulary(RunConfig.from_dict(raw, source=f"the run {name}"))
        if not config.is_planned:
            config.resolve(devices)
    except ConfigError as error:
        raise ConfigError(f"{point.path}: {error}") from None
    trained = steps * batch * seq
    exact = models.train_flops_per_token(config.model, seq) * trained
    return LadderRun(
        name, config, point.counts, trained, exact, devices, kind, trunk=trunk, steps_done=done
    )


def _steps(tokens: float, of_a_step: int) -> int:
    return max(1, round(tokens / of_a_step))


def _before_cooldown(ladder: LadderConfig, steps: int) -> int:
    return steps - max(1, ceil(ladder.schedule.cooldown * steps))


def _seeded(name: str, seed: int, ladder: LadderConfig) -> str:
    """The name of a run; of the ladder's first seed as it is."""
    return name if seed == ladder.seeds[0] else f"{name}-seed{seed}"


def _short(number: float) -> str:
    """A count for a name: 90k, 1.2M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{float(f'{number / size:.3g}'):g}{unit}"
    return f"{number:.3g}"


def _power(number: float) -> str:
    """FLOPs for a name: 3e12."""
    mantissa, _, exponent = f"{number:.3g}".partition("e+")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa
