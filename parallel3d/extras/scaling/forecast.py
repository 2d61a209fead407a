"""Forecast runs, register the forecasts in files, and compare them with the outcomes."""

import json
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, Field, ValidationError

from parallel3d.base import reader
from parallel3d.base.errors import ConfigError
from parallel3d.extras.scaling import data_constrained, frontier
from parallel3d.extras.scaling.estimator import LAWS, PARAMETRIC
from parallel3d.extras.scaling.points import FLOPS_PER_ND, Array, Fit, Interval, Points, interval
from parallel3d.extras.scaling.posterior import LEAST, back_test, posterior

ONE_RUN = "loss_of_a_run"


class Forecast(BaseModel, frozen=True):
    """The forecast loss of a run with `params` parameters on `tokens` tokens.

    Its names are keys of `--json` and of registered forecasts, which do not change.
    """

    flops: float  # 6ND
    params: float
    tokens: float
    loss: float | None  # nats per token
    intervals: dict[str, Interval]
    """95 % intervals of the best "params" and "tokens", of "loss" (the uncertainty of the law
    alone), and of "loss_of_a_run" (with the scatter between runs)."""
    by: str = ""
    """The law of the loss: "frontier", "frontier x surface" or the name of the fit's law."""
    back_test: list[dict[str, Any]] = []
    """As `posterior.back_test` returns it."""
    warnings: list[str] = []
    beyond: float = Field(exclude=True)
    """FLOPs of the run divided by those of the largest fitted run."""


class Registered(Forecast, frozen=True):
    """A forecast in the file that `register` wrote, with the names there that are compared."""

    loss: float
    registered_at: str
    law: str
    data_sha256: str


def forecast(
    fit: Fit,
    *,
    flops: float | None = None,
    params: float | None = None,
    tokens: float | None = None,
    unique: float | None = None,
) -> Forecast:
    """Forecast the loss of a run; with `flops` alone, of the run with the best N and D.

    The loss is that of the frontier, times the surface's loss of the run over that of the best run
    of its budget; it is the law's own if the fit's law has no frontier, or its budgets are too few.

    - `unique`: unique training tokens of the run, for the data-constrained law.

    Raises ConfigError if the fit cannot forecast this run.
    """
    is_best = flops is not None
    if {params is None, tokens is None} != {is_best}:
        raise ConfigError(
            "--flops, --params, --tokens: give --flops alone for the best run of a budget, or "
            "--params and --tokens for one run"
        )
    if fit.law == frontier.BEST_VALUE:
        raise ConfigError(
            f"--fit {fit.path}: the {fit.law} law does not predict a loss; use the fit of another"
        )
    spread: dict[str, Interval] = dict.fromkeys(("params", "tokens", "loss", ONE_RUN))
    drawn = {**fit.parameters, **{name: draws[:, None] for name, draws in fit.samples.items()}}
    if flops is not None:
        params, tokens = (float(x) for x in _best(fit, fit.parameters, flops))
        if fit.samples:
            for name, draws in zip(("params", "tokens"), _best(fit, drawn, flops), strict=True):
                spread[name] = interval(np.ravel(draws))
    assert params is not None and tokens is not None
    flops = flops or FLOPS_PER_ND * params * tokens
    losses, _ = frontier.losses_of(fit.points, fit.law)
    law = posterior(losses)
    surface = fit.diagnostics.get("surface", fit.parameters)
    is_off = law is not None and not is_best and "beta" in (surface or ())
    texts = {
        "fewer than 4 budgets have their best size between others, so the surface makes the "
        "forecast; on published ladders it was off by 9 % at 10 times the FLOPs": len(losses)
        < LEAST
        and fit.law == PARAMETRIC.name,
        "the best losses fall ever faster with FLOPs, so no law E + A C^-gamma, E > 0, describes "
        "them and the surface makes the forecast; add larger budgets or leave out the smallest": law
        is None
        and len(losses) >= LEAST,
        "no loss: the fit has too few budgets for a law of it": law is None
        and fit.law in frontier.NAMES,
        "no parametric law fits these runs; the loss is that of the best run of the budget": law
        is not None
        and not is_best
        and not is_off,
    }
    by = fit.law
    loss = None
    if law is not None:
        ratio = ratios = np.ones(1)
        if is_off:
            ratio = _ratio(surface, params, tokens)
            ratios = _ratio(drawn, params, tokens) if "beta" in fit.samples else ratio
        draws = law.loss(flops)
        by = "frontier x surface" if is_off else "frontier"
        loss = ratio * np.median(draws)
        draws = draws * np.random.default_rng(2).choice(ratios, size=len(draws))
        spread |= {"loss": interval(draws), ONE_RUN: interval(law.run(draws))}
    elif fit.law not in frontier.NAMES:
        loss = _loss(fit, fit.parameters, params, tokens, unique)
        if fit.samples:
            draws = np.ravel(_loss(fit, drawn, params, tokens, unique))
            spread |= {"loss": interval(draws), ONE_RUN: interval(_with_scatter(fit, draws))}
    warnings = [text for text, is_true in texts.items() if is_true]
    return Forecast(
        flops=flops,
        params=params,
        tokens=tokens,
        intervals=spread,
        by=by,
        loss=None if loss is None else float(np.ravel(loss)[0]),
        back_test=back_test(losses),
        warnings=[*fit.diagnostics.get("forecast_warnings", ()), *warnings],
        beyond=flops / float(fit.points.flops.max()),
    )


def _ratio(surface: Mapping[str, Any], params: float, tokens: float) -> Array:
    """Return the surface's loss of a run over that of the best run of its budget [draws or 1]."""
    best = PARAMETRIC.best(surface, FLOPS_PER_ND * params * tokens)
    run = PARAMETRIC.loss(surface, np.array([params]), np.array([tokens]))
    return np.ravel(run / PARAMETRIC.loss(surface, *best))


def _best(fit: Fit, values: Mapping[str, Any], flops: float) -> tuple[Array, Array]:
    if fit.law in LAWS:
        return LAWS[fit.law].best(values, flops)
    if fit.law in frontier.NAMES:
        return (
            values["N_coefficient"] * flops ** values["N_exponent"],
            values["D_coefficient"] * flops ** values["D_exponent"],
        )
    raise ConfigError(
        "--flops: the data-constrained law cannot say which N and D are best; give --params and "
        "--tokens as well as --unique-tokens"
    )


def _loss(
    fit: Fit, values: Mapping[str, Any], params: float, tokens: float, unique: float | None
) -> Any:
    """Return the law's loss [draws, 1] or [1]."""
    one = np.array([params])
    other = np.array([tokens])
    if fit.law in LAWS:
        return LAWS[fit.law].loss(values, one, other)
    if unique is None:
        raise ConfigError(
            "--unique-tokens: is missing; the data-constrained law needs it to count repeats"
        )
    return data_constrained.loss(values, one, other, np.array([min(unique, tokens)]))


def _with_scatter(fit: Fit, losses: Array) -> Array:
    """Return losses of single runs: `losses` times Student-t noise as large as the residuals."""
    free = max(len(fit.scatter) - len(fit.samples), 1)
    scale = np.sqrt(fit.scatter @ fit.scatter / free)
    losses = np.resize(losses, max(len(losses), 20_000))  # few draws would make coarse percentiles
    noise = np.random.default_rng(0).standard_t(free, len(losses))
    return np.asarray(losses * np.exp(scale * noise))


def register(path: Path, forecast: Forecast, fit: Fit) -> None:
    """Write the forecast to a new, read-only file.

    Raises ConfigError if the file or the run exists already, or if there is no loss to forecast.
    """
    runs = [
        (run["params"], run["tokens"])
        for run in fit.diagnostics.get("forecasts", ())
        if run["loss"] is not None
    ]
    known = np.array([*zip(fit.points.params, fit.points.tokens, strict=True), *runs])
    if np.any(_same_run(known[:, 0], known[:, 1], forecast)):
        raise ConfigError(
            f"--register {path}: a run of N = {forecast.params:.4g} and D = {forecast.tokens:.4g} "
            f"is among the points of {fit.path}; register the forecast of a run that is not there"
        )
    if forecast.loss is None:
        raise ConfigError(f"--register {path}: {fit.path} has no law of the loss; fit more budgets")
    fitted = fit.points.flops
    document = forecast.model_dump() | {
        "law": fit.law,
        "estimator": fit.estimator,
        "parameters": dict(fit.parameters),
        "data_sha256": fit.points.digest,
        "fit": str(fit.path),
        "points": len(fitted),
        "fitted_flops": [float(fitted.min()), float(fitted.max())],
        "beyond": forecast.beyond,
        "registered_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(f"{json.dumps(document, indent=1)}\n")
            file.flush()
            os.fsync(file.fileno())
        path.chmod(0o444)
    except FileExistsError:
        raise ConfigError(
            f"--register {path}: exists, and a registered forecast is never overwritten; name "
            "another file"
        ) from None


def compare(files: Sequence[Path], points: Points) -> list[dict[str, object]]:
    """Compare registered forecasts with their runs among the points.

    Returns a row for each forecast and run, with the error and True if the interval held. They are
    None for a forecast without a run. Raises ConfigError for a file that holds no forecast.
    """
    rows = []
    for file in files:
        registered = _read(file)
        bounds = registered.intervals.get(ONE_RUN)
        names = {"registered_at", "law", "data_sha256", "flops", "params", "tokens"}
        line = registered.model_dump(include=names) | {
            "beyond": registered.beyond,
            "file": str(file),
            "predicted": registered.loss,
            "interval": bounds,
            "row": None,
            "loss": None,
            "error": None,
            "held": None,
        }
        runs = np.flatnonzero(_same_run(points.params, points.tokens, registered))
        for run in runs:
            truth = float(points.loss[run])
            outcome = {
                "row": points.names[run],
                "loss": truth,
                "error": registered.loss / truth - 1,
                "held": None if bounds is None else bounds[0] <= truth <= bounds[1],
            }
            rows.append(line | outcome)
        if not len(runs):
            rows.append(line)
    return rows


def _same_run(params: Array, tokens: Array, forecast: Forecast) -> npt.NDArray[np.bool_]:
    """Return the mask of the runs with N and D within 2 % of the forecast's [runs]."""
    far = np.maximum(np.abs(params / forecast.params - 1), np.abs(tokens / forecast.tokens - 1))
    return np.asarray(far < 0.02)


def _read(file: Path) -> Registered:
    try:
        return Registered.model_validate_json(reader.text_of(file))
    except ValidationError:
        raise ConfigError(
            f"--forecasts {file}: is not a forecast; name a file that --register wrote"
        ) from None
