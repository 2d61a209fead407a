"""Expansion of a ladder into runs: complete configs, the files that training reads."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

from parallel3d import models
from parallel3d.base import reader
from parallel3d.base.errors import ConfigError
from parallel3d.base.section import ABSENT, Problem, Problems
from parallel3d.config import RunConfig
from parallel3d.models.common import divisor_below
from parallel3d.plan.search.plans import with_vocabulary
from parallel3d.scaling.ladder.ladder_file import LAWS, LadderConfig, SizeConfig
from parallel3d.scaling.ladder.sizes import model_of
from parallel3d.scaling.points import FLOPS_PER_PARAM_AND_TOKEN
from parallel3d.scaling.runs import ALL, PartCounts, count

_OWN = ("steps", "max_tokens", "epochs", "lr_schedule", "stop_after")  # a ladder says these itself
CONFIGS, TRUNKS = "configs", "trunks"  # folders of a ladder's directory
_SIX = FLOPS_PER_PARAM_AND_TOKEN


@dataclass(frozen=True)
class LadderRun:
    """One run of a ladder, with the config that launch/train.py reads.

    `tokens`: on which the weights that it ends with were trained; `exact_flops`: with attention.
    `trunk`: the run from whose checkpoint it begins, or ""; `steps_done`: those of its trunk.
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


def _shared_model(base: Mapping[str, Any], source: Path) -> dict[str, Any]:
    """Return settings of the model that all sizes share, its vocabulary a number.

    Raises ConfigError where the base lacks a model or a length of a sample, has settings that are
    the ladder's, or no block where the ladder writes into one. `source`: the ladder's file.
    """
    block = base.get("parallel3d")
    model = block.get("model") if isinstance(block, dict) else None
    if not isinstance(block, dict) or not isinstance(model, dict):
        raise ConfigError(f'{source}: base: has no block "parallel3d" with a "model"; write both')
    if found := list(_no_objects(base)):
        raise Problems(found, str(source))
    data, train = block.get("data"), block.get("train", {})
    data = data if isinstance(data, dict) else {}
    found = [
        Problem(
            f"base.parallel3d.train.{key}", train[key], "is the ladder's to say",
            "remove it; see budgets and schedule",
        )
        for key in _OWN
        if key in train
    ]  # fmt: skip
    own_tokenizer = data.get("tokenizer", "train") in ("train", "none")
    vocab = model.get("vocab_size", "auto")
    if vocab == "auto" and own_tokenizer:  # that of the tokenizer to train
        vocab = data.get("vocab_size", 4096)
    for path, value, rule in (
        ("data.sequence_length", data.get("sequence_length"), "must be a number of tokens"),
        ("model.vocab_size", vocab, "must be a number, the same for all sizes"),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            found.append(Problem(f"base.parallel3d.{path}", value, rule, "write it"))
    if found:
        raise Problems(found, str(source))
    return {**model, "vocab_size": vocab}


def _no_objects(base: Mapping[str, Any]) -> Iterator[Problem]:
    blocks = (f"parallel3d.{name}" for name in ("train", "checkpoint", "run", "mesh"))
    for path in (*blocks, "optimizer", "optimizer.params"):
        value, is_mesh = reader.at(base, path), path.endswith(".mesh")
        if not (isinstance(value, dict) or value is ABSENT or (is_mesh and value == "plan")):
            rule = 'must be an object, or "plan"' if is_mesh else "must be an object"
            yield Problem(f"base.{path}", value, rule, "write {...}, or leave it out")


@dataclass(frozen=True)
class _Point:
    """One place of the ladder: a model, its tokens, and its place in the file for messages."""

    name: str
    path: str
    size: SizeConfig
    model: Any
    counts: PartCounts
    tokens: float

    def settings(self, ladder: LadderConfig) -> tuple[float, float]:
        """Return the learning rate and the batch in tokens, by laws or as given."""
        given = ladder.hyperparameters
        values = []
        for name in ("learning_rate", "batch_tokens"):
            value = getattr(given, name)
            if isinstance(value, str):
                law = LAWS[value]
                value = getattr(law, name)(getattr(self.counts, law.counts), self.tokens)
            values.append(float(value))
        return values[0] * given.learning_rate_factor, values[1]


def runs_of(ladder: LadderConfig, base: Mapping[str, Any], source: Path) -> list[LadderRun]:
    """Return every run of the ladder: trunks, those that laws are fitted on, and those held out.

    `source`: the ladder's file, for messages. Raises ConfigError for what makes no run.
    """
    shared = _shared_model(base, source)
    found: list[LadderRun] = []
    kind = ladder.budgets.kind
    for i, size in enumerate(ladder.sizes):
        budgets = sorted(size.budgets or getattr(ladder.budgets, kind))
        points = list(_points(ladder, size, shared, f"sizes.{i}", kind, budgets))
        for seed in size.seeds or ladder.seeds:
            if ladder.is_forked:
                found += _forks(ladder, base, points, seed)
            else:
                found += [_run(ladder, base, point, seed) for point in points]
    for i, held in enumerate(ladder.held_out):
        kind, budget = ("tokens", held.tokens) if held.flops is None else ("flops", held.flops)
        assert budget
        (point,) = _points(ladder, held.size, shared, f"held_out.{i}", kind, [budget], "size")
        name, seed = f"held-out-{point.name}", (held.size.seeds or ladder.seeds)[0]
        found.append(_run(ladder, base, point, seed, name=name, kind="held-out"))
    twice = [name for name, times in Counter(run.name for run in found).items() if times > 1]
    if twice:
        raise ConfigError(
            f"{source}: sizes: two of them are the same model ({twice[0]}); leave one out"
        )
    return found


def _points(
    ladder: LadderConfig, size: SizeConfig, shared: Mapping[str, Any], path: str, kind: str,
    budgets: Sequence[float], key: str = "",
) -> Iterator[_Point]:  # fmt: skip
    """Yield the point of each budget; `key`: where in the block at `path` the size stands."""
    model = model_of(ladder, size, shared, ".".join(filter(None, (path, key))))
    counts = count(model)
    for budget in budgets:
        tokens, shown = {
            "flops": (budget / (_SIX * counts.with_head), f"c{_power(budget)}"),
            "tokens_per_param": (budget * counts.with_head, f"{budget:g}x"),
            "tokens": (budget, f"d{_short(budget)}"),
        }[kind]
        name = f"{_short(counts.transformer)}-{shown}"
        yield _Point(name, path, size, model, counts, tokens)


def _forks(
    ladder: LadderConfig, base: Mapping[str, Any], points: Sequence[_Point], seed: int
) -> list[LadderRun]:
    """Return a trunk of constant rate, and a fork for each budget; no trunk if all are too short.

    All have the batch and rate of the longest, and the warm-up of the shortest with a trunk.
    """
    longest, lengths = points[-1], [point.tokens for point in points]
    same = longest.settings(ladder)
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
        ladder, base, replace(longest, tokens=done), seed, name=trunk, settings=same,
        beside=lengths, at=at, kind="trunk",
    )  # fmt: skip
    return [first, *forks]


def _run(
    ladder: LadderConfig, base: Mapping[str, Any], point: _Point, seed: int, *, name: str = "",
    settings: tuple[float, float] | None = None, beside: Sequence[float] = (), trunk: str = "",
    at: Sequence[int] = (), kind: str = "fit",
) -> LadderRun:  # fmt: skip
    """Return the run of a point; `at` are the steps of a trunk that its forks begin from.

    `beside`: tokens of all runs of its size and seed where these are forks.
    """
    rate, batch_tokens = settings or point.settings(ladder)
    is_first = seed == ladder.seeds[0] or kind == "held-out"
    suffix = "" if is_first else f"-seed{seed}"
    name, trunk = f"{name or point.name}{suffix}", f"{trunk}{suffix}" if trunk else ""
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
    if ladder.is_forked:  # a rate that still rises cannot come down
        warmup = min(warmup, before_cooldown(steps_of(shortest)))
    if at:
        schedule = {"type": "constant"}
    elif ladder.is_forked:
        before = before_cooldown(steps)
        warmup = min(warmup, before)
        done = before if trunk else 0
        schedule |= {"type": "wsd", "decay_steps": steps - before}
    trunks = Path(ladder.directory) / TRUNKS
    trunk = trunk if done else ""  # a run that is too short has none
    _write_batch(raw, block, batch=batch, dp=dp, rate=rate)
    block["model"] = point.model.model_dump(mode="json")
    block["train"] = {
        "evaluate_samples": ALL, **block.get("train", {}), "steps": steps, "seed": seed,
        "lr_schedule": schedule | {"warmup_steps": warmup},
    }  # fmt: skip
    checkpoint = block["checkpoint"] = dict(block.get("checkpoint", {}))
    if at:
        block["train"]["evaluate_samples"] = 1
        checkpoint["at"] = list(at)
    if trunk:
        checkpoint["resume"] = str(trunks / trunk / "checkpoints" / f"step-{done}")
    directory = str(trunks if at else ladder.directory)
    block["run"] = {"save_weights": False, **block.get("run", {})} | {
        "directory": directory, "name": name,
    }  # fmt: skip
    try:
        config = with_vocabulary(RunConfig.from_dict(raw, source=f"the run {name}"))
        if not config.is_planned:
            config.resolve(devices)
    except ConfigError as error:
        raise ConfigError(f"{point.path}: {error}") from None
    trained = steps * step_tokens
    exact = models.train_flops_per_token(config.model, seq) * trained
    return LadderRun(
        name, config, point.counts, trained, exact, devices, kind, trunk=trunk, steps_done=done
    )


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


def _write_batch(
    raw: dict[str, Any], block: dict[str, Any], *, batch: int, dp: int, rate: float
) -> None:
    """Write the learning rate and the global batch, in microbatches no larger than the base's."""
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
    """Return the processes of a mesh, and how many of them split a batch; 1 where it is planned."""
    if mesh == "plan":
        return devices, 1
    pp, dp, tp = (mesh.get(axis, "auto") for axis in ("pp", "dp", "tp"))
    rest = 1
    for size in (pp, tp):
        rest *= size if isinstance(size, int) and size > 0 else 1
    if not isinstance(dp, int) or dp < 1:
        dp = max(1, devices // rest)
    return rest * dp, dp
