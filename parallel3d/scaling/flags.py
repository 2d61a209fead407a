"""Flags of launch/scale.py fit, predict, plan and run, and what those of a fit mean."""

import argparse
import json
import math
from dataclasses import replace
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from parallel3d.base.arguments import Parser, whole_number
from parallel3d.base.atomic import replace_text
from parallel3d.base.errors import ConfigError
from parallel3d.scaling import data_constrained, forecast, frontier, power, report_page, runs
from parallel3d.scaling.estimator import Estimator
from parallel3d.scaling.fit import fit_law
from parallel3d.scaling.forecast import Forecast
from parallel3d.scaling.laws import LAWS
from parallel3d.scaling.points import FLAGS, NAMES, Points, points_of
from parallel3d.scaling.result import Fit, finite
from parallel3d.scaling.run_table import read
from parallel3d.scaling.runs import COUNTS, read_runs

DRAWS = 2000  # of the bootstrap
FIT = "fit.json"
NO_EXTRA = "{} is not installed; run: pip install 'parallel3d[scaling]'"
LAWS_IN_WORDS = {
    **{law.name: law.formula for law in LAWS.values()},
    "isoflop": "the best N and D of each budget, as powers of C",
    "envelope": "the same of the runs that no cheaper run beats",
    data_constrained.NAME: "repeated tokens, arXiv:2305.16264",
    power.NAME: "the best learning rate or batch size, as powers of N and D",
}
_WORDS = {
    "params": "parameters", "tokens": "tokens trained on", "flops": "FLOPs of training",
    "loss": "loss, nats per token", "standard_error": "the loss's standard error",
    "unique": "unique tokens",
}  # fmt: skip


def above_0(text: str) -> float:
    """Read a number above 0 from text such as 1e24."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f" = {text}: must be a number above 0; write 1e24")
    return value


def add_fit(parser: Parser) -> None:
    """Add the flags of `fit` to a parser."""
    add = parser.add_argument
    several: dict[str, Any] = {"nargs": "+", "action": "extend", "default": []}
    laws = "; ".join(f"{name}: {words}" for name, words in LAWS_IN_WORDS.items())
    # fmt: off
    add("source", type=Path, metavar="TABLE", help="a CSV, JSON or JSONL file, or a folder of runs")
    add("--law", choices=list(LAWS_IN_WORDS), default="parametric", help=laws)
    for what, flag in FLAGS.items():
        add(flag, dest=what, metavar="COLUMN", help=f"{_WORDS[what]}; else {NAMES[what][0]}")
    add("--method", choices=list(frontier.METHODS), default="akima",
        help="how an IsoFLOP profile's best size is found; both are printed")
    add("--base", type=Path, metavar="FIT", help="the data-constrained law's parametric one")
    add("--setting-column", metavar="COLUMN", help="best-value: what was swept, such as lr")
    add("--compare-n", metavar="COLUMN", **several,
        help="fit again with other counts of parameters, and compare")
    add("--where", metavar="COLUMN=VALUE", **several, help="take these rows alone")
    add("--drop-largest-losses", type=whole_number(least=0), default=0, metavar="K",
        help="leave the K largest losses out")
    add("--estimator", choices=("huber", "likelihood", "squares"), default="huber",
        help="Huber loss of log(loss), its likelihood of free scale, squares of the loss")
    add("--delta", type=above_0, default=1e-3, help="where Huber's line begins")
    add("--weighted", action="store_true", help="by 1 / standard error^2 of the losses")
    add("--bootstraps", type=whole_number(least=0, most=10**6), default=DRAWS, metavar="N",
        help=f"resamples for the intervals; else {DRAWS:,}")
    add("--seed", type=whole_number(least=0), default=0, help="of the resamples")
    add("--forecasts", type=Path, metavar="FILE", **several,
        help="registered forecasts, to be held against their runs, which are not fitted")
    add("--out", type=Path, default=Path(), metavar="FOLDER",
        help=f"where {FIT} and report.html go; else here")
    add("--no-report", action="store_true", help="write no report.html, and no pictures")
    # fmt: on
    parser.add_json()


def add_predict(parser: Parser) -> None:
    """Add the flags of `predict` to a parser."""
    parser.add_argument("--fit", type=Path, required=True, metavar="FILE", help=f"a {FIT}")
    for flag, words in (
        ("--flops", "the budget; alone: of the best N and D"),
        ("--params", "N of one run, counted as the fit's"),
        ("--tokens", "D of one run"),
        ("--unique-tokens", "unique tokens of the run, of the data-constrained law"),
    ):
        parser.add_argument(flag, type=above_0, metavar="X", help=words)
    parser.add_argument(
        "--register", type=Path, nargs="?", const=Path(), metavar="FILE",
        help="write the forecast to a new file, before the run; else one beside the fit",
    )  # fmt: skip
    parser.add_json()


def add_plan(parser: Parser) -> None:
    """Add the flags of `plan` to a parser."""
    parser.add_argument(
        "--ladder", required=True, metavar="FILE", help="a ladder, as those in configs/ladders"
    )
    parser.add_json()


def add_run(parser: Parser) -> None:
    """Add the flags of `run` to a parser."""
    add_plan(parser)
    parser.add_argument(
        "--parallel", type=whole_number(), default=1, metavar="N",
        help="so many runs at once, where there are devices for them; else 1",
    )  # fmt: skip
    parser.add_argument(
        "--emit", choices=("slurm",), help="write job arrays for Slurm instead, and train nothing"
    )


def predict(args: argparse.Namespace) -> tuple[Forecast, Fit, Path | None]:
    """Return the forecast that the flags ask for, its fit, and the file it was registered in."""
    stored = Fit.read(args.fit)
    made = forecast.forecast(
        stored, flops=args.flops, params=args.params, tokens=args.tokens, unique=args.unique_tokens
    )
    path: Path | None = args.register
    if path is not None:
        name = f"forecast-{made.flops:.3g}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.json"
        path = path if path.name else stored.path.parent / name
        forecast.register(path, made, stored)
    return made, stored, path


def fit(args: argparse.Namespace) -> Fit:
    """Return the fit that the flags ask for; ConfigError if the points allow none."""
    for package in ("scipy", *(["matplotlib"] * (not args.no_report))):
        if find_spec(package) is None:
            raise ConfigError(NO_EXTRA.format(package))
    is_runs = args.source.is_dir()
    compared = list(args.compare_n)
    if is_runs and not compared:
        compared = [name for name in COUNTS if name != (args.params or COUNTS[0])]
    others = [("--compare-n", name) for name in compared]
    if args.setting_column:
        others.append(("--setting-column", args.setting_column))
    table = read_runs(args.source) if is_runs else read(args.source)
    named = {what: getattr(args, what) for what in FLAGS}
    found = points_of(
        table.where(args.where), named, others=others, drop_largest=args.drop_largest_losses
    )
    held = forecast.judged(args.forecasts, found)
    sworn = {line["row"]: f"held out: {line['file']} is its forecast" for line in held}
    # A law is tested on runs that it never saw.
    found = found.without({i: sworn[row] for i, row in enumerate(found.names) if row in sworn})
    result = _fit(args, found)
    fits = {found.columns.get("params", "C / 6D"): result}
    for name in compared:
        fits[name] = _fit(args, replace(found, params=found.others[name]), brief=True)
    shorts = {
        name: {
            "parameters": dict(one.parameters), "objective": one.objective,
            "optimal_exponents": dict(one.optimal),
        }
        for name, one in fits.items()
    }  # fmt: skip
    more = {
        "n_counts": next(iter(fits)), "n_compared": shorts, "table": str(args.source),
        "where": args.where, "forecasts": held,
    }  # fmt: skip
    return replace(result, diagnostics={**result.diagnostics, **more})


def _fit(args: argparse.Namespace, found: Points, brief: bool = False) -> Fit:
    law, seed, draws = args.law, args.seed, 0 if brief else args.bootstraps
    estimator = Estimator(args.estimator, args.delta, args.weighted)
    if law in LAWS:
        return fit_law(found, LAWS[law], estimator, draws=draws, seed=seed, brief=brief)
    if law == data_constrained.NAME:
        base = _base(args.base) if args.base else None
        return data_constrained.fit_decays(found, estimator, base, draws=draws, seed=seed)
    if args.weighted:
        raise ConfigError(f"--weighted: not of the {law} law; leave it out")
    if law in frontier.NAMES:
        return frontier.fit_frontier(found, law, args.method, estimator, draws=draws, seed=seed)
    swept = args.setting_column
    if swept is None:
        raise ConfigError("--setting-column: is missing; name the column of what was swept")
    return power.fit_best(found, found.others[swept], swept, draws=draws, seed=seed)


def _base(path: Path) -> dict[str, float]:
    """Return the parametric law in a fit.json, or in an object of its five parameters."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        raw = raw["parameters"] if raw.get("law") == "parametric" else raw
        found = {name: float(raw[name]) for name in LAWS["parametric"].parameters}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        found = {}
    if not found or min(found.values()) <= 0:
        raise ConfigError(
            f"--base {path}: holds no parametric law; give its fit.json, or an object with numbers "
            "above 0 for E, A, B, alpha and beta"
        )
    return found


def write(found: Fit, args: argparse.Namespace) -> list[Path]:
    """Write fit.json and report.html, with its pictures, into a folder; return their paths."""
    path = args.out / FIT
    args.out.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps(finite(found.document())))
    if args.no_report:
        return [path]
    is_runs = args.source.is_dir()
    page = report_page.write(
        found, args.out, title=f"Scaling law of {args.source.resolve().name}",
        curves=runs.curves(args.source) if is_runs else (),
        settings=runs.settings(args.source) if is_runs else None,
    )  # fmt: skip
    return [path, page]
