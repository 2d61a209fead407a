"""Flags of launch/scale.py fit, predict, plan and run, and the fits and forecasts they ask for."""

import argparse
import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from parallel3d.base import reader
from parallel3d.base.arguments import Parser, amount, path_of, whole_number
from parallel3d.base.atomic import replace_text
from parallel3d.base.errors import ConfigError
from parallel3d.base.step_lines import finite
from parallel3d.extras.report.page import require
from parallel3d.extras.scaling import data_constrained, forecast, frontier, report_page, runs
from parallel3d.extras.scaling.estimator import LAWS, PARAMETRIC, Estimator
from parallel3d.extras.scaling.fit import fit_law
from parallel3d.extras.scaling.forecast import Forecast
from parallel3d.extras.scaling.frontier import LEAST_BUDGETS, with_checks
from parallel3d.extras.scaling.points import USES, Fit, Points, points_of
from parallel3d.extras.scaling.runs import COUNTS, number, read, read_runs

DRAWS = 2000
"""Draws of the fitted parameters, for their intervals."""
FIT = "fit.json"
LAWS_IN_WORDS = {
    **{law.name: law.formula for law in LAWS.values()},
    "isoflop": "the best N and D of each budget as powers of C",
    "envelope": "the same, from the runs that no cheaper run beats",
    data_constrained.NAME: "the worth of repeated tokens (arXiv:2305.16264)",
    frontier.BEST_VALUE: "the best learning rate or batch size as powers of N and D",
}


def add_fit(parser: Parser) -> None:
    """Add the flags of `fit` to a parser."""
    add = parser.add_argument
    several: dict[str, Any] = {"nargs": "+", "action": "extend", "default": []}
    laws = "; ".join(f"{name}: {words}" for name, words in LAWS_IN_WORDS.items())
    add(
        "source",
        type=path_of,
        metavar="TABLE",
        help="a CSV, JSON or JSONL file, or a folder of runs",
    )
    add("--law", choices=list(LAWS_IN_WORDS), default="parametric", help=laws)
    for use, (flag, words, names) in USES.items():
        add(flag, dest=use, metavar="COLUMN", help=f"column of the {words} (default: {names[0]})")
    add(
        "--method",
        choices=list(frontier.METHODS),
        default="akima",
        help="how to find the best size of an IsoFLOP profile; the report shows both",
    )
    add(
        "--base",
        type=path_of,
        metavar="FIT",
        help="fit.json of the parametric law that the data-constrained law builds on",
    )
    add(
        "--setting-column",
        metavar="COLUMN",
        help="column of the swept setting for --law best-value, such as lr",
    )
    add("--where", metavar="COLUMN=VALUE", **several, help="use only the rows with this value")
    add(
        "--drop-largest-losses",
        type=whole_number(least=0),
        default=0,
        metavar="K",
        help="leave out the rows with the K largest losses",
    )
    add(
        "--estimator",
        choices=("huber", "likelihood", "squares"),
        default="huber",
        help="Huber loss of log(loss); its likelihood with a free scale; squares of the loss",
    )
    add("--delta", type=amount, default=1e-3, help="threshold of the Huber loss (default: 1e-3)")
    add(
        "--weighted",
        action="store_true",
        help="weight each point by 1 / standard error^2 of its loss",
    )
    add(
        "--bootstraps",
        type=whole_number(least=0, most=10**6),
        default=DRAWS,
        metavar="N",
        help=f"draws for the intervals of the parameters (default: {DRAWS:,})",
    )
    add("--seed", type=whole_number(least=0), default=0, help="seed of the draws (default: 0)")
    add(
        "--forecasts",
        type=path_of,
        metavar="FILE",
        **several,
        help="compare these registered forecasts with their runs, and leave the runs out of the "
        "fit",
    )
    add(
        "--out",
        type=path_of,
        default=Path(),
        metavar="FOLDER",
        help=f"write {FIT} and report.html to this folder (default: the working directory)",
    )
    add("--no-report", action="store_true", help="do not write report.html and its plots")


def add_predict(parser: Parser) -> None:
    """Add the flags of `predict` to a parser."""
    parser.add_argument("--fit", type=path_of, required=True, metavar="FILE", help=f"a {FIT}")
    for flag, words in (
        ("--flops", "training FLOPs; without --params and --tokens: forecast the best run of them"),
        ("--params", "parameters of the run, counted as in the fit"),
        ("--tokens", "training tokens of the run"),
        ("--unique-tokens", "unique training tokens of the run, for the data-constrained law"),
    ):
        parser.add_argument(flag, type=amount, metavar="X", help=words)
    parser.add_argument(
        "--register",
        type=path_of,
        nargs="?",
        const=Path(),
        metavar="FILE",
        help="register the forecast in a new file (default: one beside the fit)",
    )


def add_plan(parser: Parser) -> None:
    """Add the flags of `plan` to a parser."""
    add = parser.add_argument
    add("--ladder", metavar="FILE", help="a ladder file, as in configs/ladders")
    add("--design", action="store_true", help="write a ladder file, by --base and the flags below")
    add("--base", metavar="FILE", help="config whose model's proportions and settings to keep")
    add("--out", type=path_of, metavar="FILE", help="the new ladder file")
    add("--hours", type=amount, metavar="H", help="hours of all runs on this machine")
    add("--flops", type=amount, metavar="C", help="FLOPs of the forecast run, in place of --hours")
    add(
        "--factor",
        type=amount,
        default=10.0,
        metavar="X",
        help="FLOPs of the forecast run over the largest budget (default: 10)",
    )
    add(
        "--budgets",
        type=whole_number(least=LEAST_BUDGETS, most=30),
        default=LEAST_BUDGETS,
        metavar="N",
        help=f"budgets, each 2.08 times the one below (default: {LEAST_BUDGETS})",
    )
    add(
        "--tokens-per-param",
        type=amount,
        default=20.0,
        metavar="R",
        help="tokens per parameter of the best size, as far as known (default: 20)",
    )
    add(
        "--parallel",
        type=whole_number(),
        default=1,
        metavar="N",
        help="runs at once, for --hours (default: 1)",
    )


def add_run(parser: Parser) -> None:
    """Add the flags of `run` to a parser."""
    parser.add_argument(
        "--ladder", required=True, metavar="FILE", help="a ladder file, as in configs/ladders"
    )
    parser.add_argument(
        "--parallel",
        type=whole_number(),
        default=1,
        metavar="N",
        help="train up to N runs at once, if there are devices for them (default: 1)",
    )
    parser.add_argument(
        "--emit", choices=("slurm",), help="write Slurm job arrays instead of training"
    )


def add_critical_batch(parser: Parser) -> None:
    """Add the flags of `critical-batch`."""
    add = parser.add_argument
    add(
        "--run", type=path_of, required=True, metavar="RUN", help="folder of a run with checkpoints"
    )
    add("--step", type=whole_number(), metavar="N", help="its checkpoint (default: the newest)")
    add(
        "--batches",
        type=whole_number(),
        nargs="+",
        metavar="N",
        help="samples per step of the forks (default: the run's batch times 1 to 32)",
    )
    add(
        "--tokens",
        type=whole_number(most=10**18),
        metavar="N",
        help="tokens of each fork (default: a tenth of the run's, at least 8 steps "
        "of the largest batch)",
    )
    add(
        "--batch-lr",
        choices=("none", "sqrt", "linear"),
        default="sqrt",
        help="law of the learning rate, as train.batch_lr (default: sqrt)",
    )
    add(
        "--tolerance",
        type=amount,
        default=0.01,
        metavar="NATS",
        help="loss above that of small batches that still counts as none (default: 0.01)",
    )
    add(
        "--parallel",
        type=whole_number(),
        default=1,
        metavar="N",
        help="train up to N forks at once (default: 1)",
    )


def predict(args: argparse.Namespace) -> tuple[Forecast, Fit, Path | None]:
    """Make the forecast that the flags ask for, and register it if they say so.

    Returns the forecast, its fit, and the file of the registered forecast or None.
    """
    if not args.fit.exists():
        raise ConfigError(
            f"--fit {args.fit}: does not exist; `parallel3d scale fit` and `scale run` write it, "
            "unless the ladder has too few runs for a fit"
        )
    stored = Fit.read(args.fit)
    prediction = forecast.forecast(
        stored, flops=args.flops, params=args.params, tokens=args.tokens, unique=args.unique_tokens
    )
    path: Path | None = args.register
    if path is not None:
        name = f"forecast-{prediction.flops:.3g}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.json"
        path = path if path.name else stored.path.parent / name
        forecast.register(path, prediction, stored)
    return prediction, stored, path


def fit(args: argparse.Namespace) -> Fit:
    """Make the fit that the flags ask for; raise ConfigError if the points do not allow it."""
    require("scipy")
    compared = []
    if args.source.is_dir():
        main_count = args.params or COUNTS[0]
        compared = [name for name in COUNTS if name != main_count]
        table = read_runs(args.source)
    else:
        table = read(args.source)
    table = table.where(args.where)
    others = [*compared]
    if args.setting_column:
        others.append(args.setting_column)
    named = {use: getattr(args, use) for use in USES}
    points = points_of(table, named, others=others, drop_largest=args.drop_largest_losses)
    outcomes = forecast.compare(args.forecasts, points)
    reasons = {line["row"]: f"held out: {line['file']} is its forecast" for line in outcomes}
    # A forecast is a test only if its run is not among the fitted points.
    points = points.without(
        {i: reasons[row] for i, row in enumerate(points.names) if row in reasons}
    )
    main_fit = with_checks(_fit(args, points), table)
    fits = {points.columns.get("params", "C / 6D"): main_fit}
    for name in compared:
        fits[name] = _fit(args, replace(points, params=points.others[name]), brief=True)
    summaries = {
        name: {
            "parameters": dict(fitted.parameters),
            "objective": fitted.objective,
            "optimal_exponents": dict(fitted.optimal),
        }
        for name, fitted in fits.items()
    }
    choices = {
        "n_counts": next(iter(fits)),
        "n_compared": summaries,
        "table": str(args.source),
        "where": args.where,
        "forecasts": outcomes,
    }
    return replace(main_fit, diagnostics={**main_fit.diagnostics, **choices})


def _fit(args: argparse.Namespace, points: Points, brief: bool = False) -> Fit:
    law = args.law
    seed = args.seed
    draws = 0 if brief else args.bootstraps
    estimator = Estimator(args.estimator, args.delta, args.weighted)
    if law in LAWS:
        return fit_law(points, LAWS[law], estimator, draws=draws, seed=seed, brief=brief)
    if law == data_constrained.NAME:
        base = _base(args.base) if args.base else None
        return data_constrained.fit_decays(points, estimator, base, draws=draws, seed=seed)
    if args.weighted:
        raise ConfigError(f"--weighted: is not supported by the {law} law; remove it")
    if law in frontier.NAMES:
        return frontier.fit_frontier(points, law, args.method, estimator, draws=draws, seed=seed)
    setting = args.setting_column
    if setting is None:
        raise ConfigError("--setting-column: is missing; name the column of the swept setting")
    return frontier.fit_best(points, points.others[setting], setting, draws=draws, seed=seed)


def _base(path: Path) -> dict[str, float]:
    """Read the parametric law from a fit.json, or from an object with its five parameters."""
    raw = reader.read(path)
    values = reader.block_at(raw, "parameters") or raw
    numbers = {name: number(values.get(name)) or 0.0 for name in PARAMETRIC.parameters}
    if min(numbers.values()) <= 0:
        raise ConfigError(
            f"--base {path}: holds no parametric law; use its fit.json, or an object with numbers "
            "above 0 for E, A, B, alpha and beta"
        )
    return numbers


def write(fitted: Fit, args: argparse.Namespace) -> list[Path]:
    """Write fit.json, and report.html with its plots, into the --out folder; return their paths."""
    path = args.out / FIT
    args.out.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps(finite(fitted.document())))
    if args.no_report:
        return [path]
    page = report_page.write(
        fitted,
        args.out,
        title=f"Scaling law of {args.source.resolve().name}",
        settings=runs.settings(args.source) if args.source.is_dir() else None,
    )
    return [path, page]
