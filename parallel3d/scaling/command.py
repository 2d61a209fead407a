"""Flags of launch/scale.py, and what they mean."""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from parallel3d.base.arguments import Parser, whole_number
from parallel3d.base.atomic import replace_text
from parallel3d.base.errors import ConfigError
from parallel3d.scaling import data_constrained, forecast, frontier, power, report, runs
from parallel3d.scaling.estimator import Estimator
from parallel3d.scaling.fit import fit_law
from parallel3d.scaling.forecast import Forecast
from parallel3d.scaling.laws import LAWS
from parallel3d.scaling.points import FLAGS, NAMES, Dropped, Points, points_of
from parallel3d.scaling.profile import METHODS
from parallel3d.scaling.result import Fit, StoredFit, finite
from parallel3d.scaling.run_table import Table, read
from parallel3d.scaling.runs import COUNTS, read_runs

DRAWS = 2000  # of the bootstrap
FIT = "fit.json"
NO_EXTRA = "{} is not installed; run: pip install 'parallel3d[scaling]'"


def add_fit(parser: Parser) -> None:
    """Add the flags of `fit` to a parser."""
    parser.add_argument(
        "source", type=Path, metavar="TABLE", help="a CSV, JSON or JSONL file, or a folder of runs"
    )
    parser.add_argument("--law", choices=list(LAWS_IN_WORDS), default="parametric", help=_laws())
    for what, flag in FLAGS.items():
        usual = f"; else {NAMES[what][0]}" if what in NAMES else ""
        parser.add_argument(flag, dest=what, metavar="COLUMN", help=f"{_WORDS[what]}{usual}")
    parser.add_argument(
        "--method", choices=list(METHODS), default="akima",
        help="how an IsoFLOP profile's best size is found; both are printed",
    )  # fmt: skip
    parser.add_argument(
        "--base", type=Path, metavar="FIT", help="the data-constrained law's parametric one"
    )
    parser.add_argument(
        "--setting-column", metavar="COLUMN", help="best-value: what was swept, such as lr"
    )
    parser.add_argument(
        "--compare-n", nargs="+", action="extend", default=[], metavar="COLUMN",
        help="fit again with other counts of parameters, and compare",
    )  # fmt: skip
    parser.add_argument(
        "--where", nargs="+", action="extend", default=[], metavar="COLUMN=VALUE",
        help="take these rows alone",
    )  # fmt: skip
    parser.add_argument(
        "--drop-largest-losses", type=whole_number(least=0), default=0, metavar="K",
        help="leave the K largest losses out",
    )  # fmt: skip
    parser.add_argument(
        "--estimator", choices=("huber", "likelihood", "squares"), default="huber",
        help="Huber loss of log(loss), its likelihood of free scale, squares of the loss",
    )  # fmt: skip
    parser.add_argument("--delta", type=above_0, default=1e-3, help="where Huber's line begins")
    parser.add_argument(
        "--weighted", action="store_true", help="by 1 / standard error^2 of the losses"
    )
    parser.add_argument(
        "--bootstraps", type=whole_number(least=0, most=10**6), default=DRAWS, metavar="N",
        help=f"resamples for the intervals; else {DRAWS:,}",
    )  # fmt: skip
    parser.add_argument("--seed", type=whole_number(least=0), default=0, help="of the resamples")
    parser.add_argument(
        "--forecasts", type=Path, nargs="+", action="extend", default=[], metavar="FILE",
        help="registered forecasts, to be held against their runs, which are not fitted",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, default=Path(), metavar="FOLDER",
        help=f"where {FIT} and report.html go; else here",
    )  # fmt: skip
    parser.add_argument(
        "--no-report", action="store_true", help="write no report.html, and no pictures"
    )
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


def predict(args: argparse.Namespace) -> tuple[Forecast, StoredFit, Path | None]:
    """The forecast that the flags ask for, its fit, and the file that it was registered in."""
    stored = StoredFit.read(args.fit)
    made = forecast.forecast(
        stored, flops=args.flops, params=args.params, tokens=args.tokens,
        unique=args.unique_tokens,
    )  # fmt: skip
    path: Path | None = args.register
    if path is not None:
        path = path if path.name else forecast.default_path(stored, made.flops)
        forecast.register(path, made, stored)
    return made, stored, path


_WORDS = {
    "params": "parameters", "tokens": "tokens trained on", "flops": "FLOPs of training",
    "loss": "loss, nats per token", "standard_error": "the loss's standard error",
    "unique": "unique tokens",
}  # fmt: skip


LAWS_IN_WORDS = {
    **{law.name: law.formula for law in LAWS.values()},
    "isoflop": "the best N and D of each budget, as powers of C",
    "envelope": "the same of the runs that no cheaper run beats",
    data_constrained.NAME: "repeated tokens, arXiv:2305.16264",
    power.NAME: "the best learning rate or batch size, as powers of N and D",
}


def _laws() -> str:
    return "; ".join(f"{name}: {words}" for name, words in LAWS_IN_WORDS.items())


def above_0(text: str) -> float:
    """A number above 0 from text such as 1e24."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not re.search(r"\d", text) or not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f" = {text}: must be a number above 0; write 1e24")
    return value


def source(path: Path) -> Table:
    """The table at a path: a file, or a folder of runs."""
    return read_runs(path) if path.is_dir() else read(path)


def compared(args: argparse.Namespace) -> list[str]:
    """Columns that count parameters by other conventions; of runs, all that they have."""
    if args.compare_n or not args.source.is_dir():
        return list(args.compare_n)
    return [name for name in COUNTS if name != (args.params or COUNTS[0])]


def points(args: argparse.Namespace, table: Table) -> Points:
    """The points that the flags select."""
    named: Mapping[str, str | None] = {what: getattr(args, what) for what in FLAGS}
    others = [("--compare-n", name) for name in compared(args)]
    if args.setting_column:
        others.append(("--setting-column", args.setting_column))
    table = table.where(args.where)
    return points_of(table, named, others=others, drop_largest=args.drop_largest_losses)


def fit(args: argparse.Namespace) -> Fit:
    """The fit that the flags ask for; raises ConfigError if the points allow none."""
    for package in ("scipy", *(["matplotlib"] * (not args.no_report))):
        if find_spec(package) is None:
            raise ConfigError(NO_EXTRA.format(package))
    found = points(args, source(args.source))
    held = forecast.judged(args.forecasts, found)
    found = without(found, held)
    estimator = Estimator(args.estimator, args.delta, args.weighted)
    result = _fit(args, found, estimator, brief=False)
    counted = {found.columns.get("params", "C / 6D"): _short(result)}
    for name in compared(args):
        other = replace(found, params=found.others[name])
        counted[name] = _short(_fit(args, other, estimator, brief=True))
    chosen = {"n_counts": next(iter(counted)), "n_compared": counted}
    source_said = {"table": str(args.source), "where": args.where, "forecasts": held}
    return replace(result, diagnostics={**result.diagnostics, **chosen, **source_said})


def without(found: Points, held: Sequence[Mapping[str, Any]]) -> Points:
    """The points without forecast runs: a law is tested on runs that it never saw."""
    of = {line["row"]: line["file"] for line in held if line["row"] is not None}
    dropped = [Dropped(row, f"held out: {file} is its forecast") for row, file in of.items()]
    keep = np.array([name not in of for name in found.names])
    return replace(found.take(keep), dropped=(*found.dropped, *dropped))


def _fit(args: argparse.Namespace, found: Points, estimator: Estimator, brief: bool) -> Fit:
    law, seed, draws = args.law, args.seed, 0 if brief else args.bootstraps
    if law in LAWS:
        return fit_law(found, LAWS[law], estimator, draws=draws, seed=seed, brief=brief)
    if args.weighted and law != data_constrained.NAME:
        raise ConfigError(f"--weighted: not of the {law} law; leave it out")
    if law in frontier.NAMES:
        return frontier.fit_frontier(found, law, args.method, estimator, draws=draws, seed=seed)
    if law == data_constrained.NAME:
        base = _base(args.base) if args.base else None
        return data_constrained.fit_decays(found, estimator, base, draws=draws, seed=seed)
    swept = args.setting_column
    if swept is None:
        raise ConfigError("--setting-column: is missing; name the column of what was swept")
    return power.fit_best(found, found.others[swept], swept, draws=draws, seed=seed)


def _base(path: Path) -> dict[str, float]:
    """The parametric law in a fit.json, or in an object of its five parameters."""
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


def _short(found: Fit) -> dict[str, Any]:
    return {
        "parameters": dict(found.parameters), "objective": found.objective,
        "optimal_exponents": dict(found.optimal),
    }  # fmt: skip


def write(found: Fit, args: argparse.Namespace) -> list[Path]:
    """Write fit.json and report.html, with its pictures, into a folder; gives their paths."""
    folder = args.out
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FIT
    replace_text(path, json.dumps(finite(found.document())))
    if args.no_report:
        return [path]
    is_runs = args.source.is_dir()
    page = report.write(
        found, folder, title=f"Scaling law of {args.source.resolve().name}",
        curves=runs.curves(args.source) if is_runs else (),
        settings=runs.settings(args.source) if is_runs else None,
    )  # fmt: skip
    return [path, page]
