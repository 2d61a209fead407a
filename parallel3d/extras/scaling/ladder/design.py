"""Design a ladder for a forecast, by the rules of docs/scaling.md, and simulate its interval."""

import json
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import cache
from math import log, sqrt
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from parallel3d.base import reader, terminal
from parallel3d.base.atomic import replace_text
from parallel3d.base.errors import ConfigError
from parallel3d.extras.scaling.estimator import PARAMETRIC
from parallel3d.extras.scaling.frontier import losses_of
from parallel3d.extras.scaling.ladder.expand import LadderRun, runs_of
from parallel3d.extras.scaling.ladder.ladder_file import LadderConfig, SizeConfig, TuneConfig
from parallel3d.extras.scaling.ladder.plan import with_costs
from parallel3d.extras.scaling.ladder.sizes import (
    OWN,
    SHAPE,
    model_of,
    settings_of,
    shared_model,
    with_settings,
)
from parallel3d.extras.scaling.points import FLOPS_PER_ND, Points, interval
from parallel3d.extras.scaling.posterior import GAMMA, posterior
from parallel3d.extras.scaling.runs import count

LADDERS = 200  # simulated ones
NOISE = 0.003  # relative scatter of their losses between runs
_RATIO = 3 ** (1 / 3)  # between sizes; between budgets its square, as the best size is ~ C^0.5
_LEAST = 2  # sizes below and above the best one, after the widths are rounded
_FARTHEST = 4.0  # size over the best one
_Sizes = Callable[[int], tuple[int, dict[str, int]]]
_Runs = Callable[[float], tuple[dict[str, Any], list[LadderRun], float | None]]


def design(args: Namespace, out: Console) -> dict[str, Any]:
    """Write the ladder file that the flags of `plan --design` ask for, and print what it will do.

    Returns its facts for --json. Raises ConfigError if no ladder follows the rules.
    """
    if not (args.base and args.out) or args.ladder or (args.hours is None) == (args.flops is None):
        raise ConfigError(
            "--design: needs --base FILE, --out FILE and one of --hours and --flops, without "
            "--ladder; write: plan --design --base ds.json --hours 1.5 --out ladder.json"
        )
    if args.out.exists():
        raise ConfigError(f"--out {args.out}: exists; name a new file")
    file = reader.find(args.base)
    base, model = _without_own(reader.read(file))
    sizes = _sizes(base, model, file)

    def runs(flops: float) -> tuple[dict[str, Any], list[LadderRun], float | None]:
        """Return the ladder that forecasts a run of so many FLOPs, its runs and its hours."""
        document = _document(base, model, sizes, flops, args)
        expanded = runs_of(LadderConfig.model_validate(document), document["base"], file)
        hours = 0.0
        for run, cost in with_costs(expanded):
            if cost.hours is None:
                return document, expanded, None
            at_once = 1 if run.kind == "held-out" else args.parallel
            hours += (cost.hours + 10 / 3600) / at_once  # imports and evaluation take 10 s
        return document, expanded, hours

    flops = args.flops or flops_for(args.hours, runs)
    document, expanded, hours = runs(flops)
    fitted = [run for run in expanded if run.kind == "fit"]
    target = next(run for run in expanded if run.kind == "held-out")
    outcomes = simulate(fitted, target, NOISE)
    low, median, high = np.percentile([half for half, _ in outcomes], [10, 50, 90]).tolist()
    held = sum(is_held for _, is_held in outcomes)
    without = LADDERS - len(outcomes)
    replace_text(args.out, f"{json.dumps(document, indent=1)}\n")
    budgets = document["budgets"]["flops"]
    terminal.say(
        out,
        f"wrote {args.out}: {len(budgets)} budgets over x{budgets[-1] / budgets[0]:.3g}, "
        f"{len(fitted)} runs, and a forecast at {target.flops:.3g} FLOPs, "
        f"{target.flops / budgets[-1]:.3g} times the largest\n"
        f"learning rate: {document['hyperparameters']['learning_rate']} "
        f"({'muP' if _is_mup(model) else 'without muP'}), batch: step-law; "
        f"{len(expanded) - len(fitted) - 1} runs tune both at the two smallest budgets\n"
        f"hours with --parallel {args.parallel}: {'unknown' if hours is None else f'{hours:.2g}'}\n"
        f"95 % interval of the forecast, on {LADDERS} simulated ladders with a noise of "
        f"{100 * NOISE:g} %: within {100 * median:.2g} % of it (80 % of the ladders: "
        f"{100 * low:.2g} to {100 * high:.2g} %); {held} intervals held, {without} ladders allowed "
        "no forecast",
    )
    return {
        "hours": hours,
        "half_width": {"p10": low, "median": median, "p90": high},
        "simulated": LADDERS,
        "held": held,
        "without_forecast": without,
    }


def _without_own(raw: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a base config without the shape and length that a ladder sets, and its settings."""
    model = reader.block_at(raw, "parallel3d.model")
    settings = settings_of(model)
    kept = {
        "model": with_settings(model, _without(settings, (*SHAPE, "num_key_value_heads"))),
        "train": _without(reader.block_at(raw, "parallel3d.train"), OWN),
    }
    return {**raw, "parallel3d": reader.block_at(raw, "parallel3d") | kept}, settings


def _without(block: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {key: value for key, value in block.items() if key not in names}


def _sizes(base: dict[str, Any], model: dict[str, Any], file: Path) -> _Sizes:
    """Return a function of n: parameters with the head, and shape, of the n-th size from 0.

    The sizes keep the proportions of the base's model, but its depth with muP without base_depth,
    since rates then transfer over the width alone. Widths are multiples of a quarter of a head up
    to 8 heads, and of a head beyond.
    """
    shared = shared_model(base, file)
    layers, width, heads = shape = [model.get(name) or 0 for name in SHAPE[:3]]
    if not all(shape) or width % heads:
        raise ConfigError(
            f"{file}: parallel3d.model: its {', '.join(SHAPE[:3])} are {shape}, whose proportions "
            "the sizes keep; set all, and the width as a multiple of the heads"
        )
    head = width // heads
    group = heads // (model.get("num_key_value_heads") or heads)
    step = max(2, head // 8 * 2)
    is_deep = not _is_mup(model) or "base_depth" in model["parametrization"]
    ladder = LadderConfig.model_construct(mlp_ratio=_mlp_ratio(model), head_size=head)

    @cache
    def size(n: int) -> tuple[int, dict[str, int]]:
        own = step * (n + 1) if step * n < 8 * head else head * (n + 9 - 8 * head // step)
        count_heads = max(1, round(own / head / group)) * group
        while count_heads > group and (own % count_heads or own // count_heads % 2):
            count_heads -= group
        shape = {
            "num_hidden_layers": max(1, round(own * layers / width)) if is_deep else layers,
            "hidden_size": own,
            "num_attention_heads": count_heads,
        }
        if "num_key_value_heads" in model:
            shape["num_key_value_heads"] = count_heads // group
        found = model_of(ladder, SizeConfig(model=shape), shared, "sizes")
        return count(found).with_head, shape

    return size


def _is_mup(model: dict[str, Any]) -> bool:
    return (model.get("parametrization") or {}).get("type") == "mup"


def _mlp_ratio(model: dict[str, Any]) -> float | None:
    return (model.get("intermediate_size") or 0) / model["hidden_size"] or None


def _document(
    base: dict[str, Any], model: dict[str, Any], sizes: _Sizes, flops: float, args: Namespace
) -> dict[str, Any]:
    """Return the ladder file that forecasts a run of so many FLOPs.

    Raises ConfigError if a budget has too few sizes around its best one.
    """
    most = 0.99 * flops / args.factor  # whole steps change FLOPs by less than 1 %
    budgets = [float(f"{most / _RATIO ** (2 * k):.3g}") for k in range(args.budgets)][::-1]
    budgets_of: dict[int, list[float]] = {}
    target = sqrt(flops / FLOPS_PER_ND / args.tokens_per_param)
    for budget in budgets:
        best = sqrt(budget / FLOPS_PER_ND / args.tokens_per_param)
        near = {_nearest(sizes, best * _RATIO**offset) for offset in range(-3, 4)}
        chosen = sorted(n for n in near if 1 / _FARTHEST < sizes(n)[0] / best < _FARTHEST)
        below = sum(sizes(n)[0] < best for n in chosen)
        if min(below, len(chosen) - below) < _LEAST:
            raise _TooSmall(
                f"a budget of {budget:.3g} FLOPs has {below} and {len(chosen) - below} sizes below "
                f"and above its best one, about {best:,.0f} parameters; {_LEAST} of each must be: "
                "use more --hours or --flops, a smaller --factor, or a --base with narrower heads "
                "or a smaller vocabulary"
            )
        for n in chosen:
            budgets_of.setdefault(n, []).append(budget)
    rate = base.get("optimizer", {}).get("params", {}).get("lr") if _is_mup(model) else None
    document = {
        "directory": f"runs/{args.out.stem}",
        "base": base,
        "head_size": model["hidden_size"] // model["num_attention_heads"],
        "mlp_ratio": _mlp_ratio(model),
        "sizes": [{"model": sizes(n)[1], "budgets": b} for n, b in sorted(budgets_of.items())],
        "budgets": {"flops": budgets},
        "hyperparameters": {
            "learning_rate": rate or "step-law",
            "batch_tokens": "step-law",
            "tune": TuneConfig().model_dump(mode="json"),
        },
        # It runs alone, on all devices if the base leaves dp open.
        "held_out": [
            {
                "size": {"model": sizes(_nearest(sizes, target))[1], "devices": args.parallel},
                "flops": float(f"{flops:.4g}"),
            }
        ],
    }
    return {key: value for key, value in document.items() if value is not None}


class _TooSmall(ConfigError):
    """The models of a design would be too small."""


def _nearest(sizes: _Sizes, params: float) -> int:
    """Return the size nearest to so many parameters."""
    n = 0
    while sizes(n)[0] < params:
        n += 1
    return n - 1 if n and sizes(n - 1)[0] * sizes(n)[0] > params**2 else n


def flops_for(hours: float, runs: _Runs) -> float:
    """Return the FLOPs of the forecast run whose whole ladder takes so many hours.

    Raises ConfigError if the speed of the machine is not known.
    """
    flops = 1e9
    step = 4.0
    while step > 1.02:  # upwards, so that no size is tried that is far too large to fit
        try:
            needed = runs(flops * step)[2]
        except _TooSmall:
            needed = 0.0
        if needed is None:
            raise ConfigError(
                f"--hours {hours:g}: the speed of this machine is not known; run `parallel3d plan "
                "--calibrate`, set parallel3d.run.hardware in the base, or give --flops"
            )
        if needed < hours:
            flops *= step
        else:
            step = sqrt(step)
    return flops


def simulate(
    fitted: Sequence[LadderRun], target: LadderRun, noise: float
) -> list[tuple[float, bool]]:
    """Forecast the best run of the target's budget from synthetic losses of the fitted runs.

    Returns half the 95 % interval over the forecast, and True if it holds, for each of `LADDERS`
    known laws that allow a forecast. The laws are L = E + A / N^a + B / D^a, where gamma = a / 2
    has the prior of the posterior, the loss above E is 0.3 to 3 times E at the middle budget, and
    the best size is off by a factor of about 1.5.
    """
    params, tokens, flops = np.array(
        [(run.counts.with_head, run.tokens, run.flops) for run in (*fitted, target)], dtype=float
    ).T  # [runs + 1]
    outcomes = []
    for seed in range(LADDERS):
        random = np.random.default_rng(seed)
        gamma = float(np.exp(log(GAMMA[0]) + GAMMA[1] * random.standard_normal()).clip(0.03, 0.4))
        off = np.log(params[-1] / np.sqrt(flops[-1])) + 0.4 * random.standard_normal()
        share = np.exp(random.uniform(log(0.3), log(3)))
        away = 2 * gamma * (np.log(params / np.sqrt(flops)) - off)
        away[-1] = 0
        middle = np.exp(np.log(flops[:-1]).mean())
        loss = 1 + share * np.cosh(away) * (flops / middle) ** -gamma
        loss *= np.exp(noise * random.standard_normal(len(loss)))
        points = Points(params[:-1], tokens[:-1], flops[:-1], loss[:-1], ("",) * len(fitted), {})
        if law := posterior(losses_of(points, PARAMETRIC.name)[0]):
            drawn = law.loss(float(flops[-1]))
            low, high = interval(law.run(drawn)) or (0.0, 0.0)
            is_held = bool(low <= loss[-1] <= high)
            outcomes.append(((high - low) / 2 / float(np.median(drawn)), is_held))
    return outcomes
