"""Forecasts of future runs: made, registered, and compared with the outcome.

A registered forecast is a file that is written once, before its run; nothing writes it again.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from parallel3d.base.errors import ConfigError
from parallel3d.scaling import data_constrained, frontier
from parallel3d.scaling.laws import LAWS
from parallel3d.scaling.points import FLOPS_PER_PARAM_AND_TOKEN, Array, Points
from parallel3d.scaling.result import StoredFit, interval

SAME_RUN = 0.02
"""A run whose N and D are within so much, relative, is the one that a forecast is about."""
ONE_RUN = "loss_of_a_run"


@dataclass(frozen=True)
class Forecast:
    """Loss in nats per token of a run of `params` on `tokens`; `flops` is 6ND.

    `intervals`: 95 %, of params and tokens where they are the best of the budget; of `loss`, the
    law alone; and of `loss_of_a_run`, which has the scatter of runs about the law besides. None
    where the fit has no bootstrap. `beyond`: flops over those of the largest fitted run.
    """

    flops: float
    params: float
    tokens: float
    loss: float | None
    intervals: Mapping[str, list[float] | None]
    beyond: float

    def to_json(self) -> dict[str, Any]:
        """The object that `--json` prints; its keys are published and do not change."""
        return {
            "flops": self.flops, "params": self.params, "tokens": self.tokens, "loss": self.loss,
            "intervals": dict(self.intervals),
        }  # fmt: skip


def forecast(
    fit: StoredFit, *, flops: float | None = None, params: float | None = None,
    tokens: float | None = None, unique: float | None = None,
) -> Forecast:  # fmt: skip
    """The forecast of a run's loss; with `flops` alone, at the best N and D.

    `unique`: tokens of the corpus, of the data-constrained law. Raises ConfigError where the fit
    says nothing of such a run.
    """
    given = {"--flops": flops, "--params": params, "--tokens": tokens}
    known = [flag for flag, value in given.items() if value is not None]
    if known != ["--flops"] and len(known) != 2:
        said = ", ".join(known) or "none"
        raise ConfigError(
            f"{said} of --flops, --params, --tokens: give --flops for the best run of a budget, or "
            "two of the three for one run"
        )
    six = FLOPS_PER_PARAM_AND_TOKEN
    spread: dict[str, list[float] | None] = {"params": None, "tokens": None}
    if flops is not None and len(known) == 1:
        params, tokens = (float(x) for x in _best(fit, fit.parameters, flops))
        if fit.samples:
            drawn = _best(fit, _values(fit), flops)
            spread = {k: interval(np.ravel(v)) for k, v in zip(spread, drawn, strict=True)}
    elif params is None:
        assert flops is not None and tokens is not None
        params = flops / (six * tokens)
    elif tokens is None:
        assert flops is not None
        tokens = flops / (six * params)
    assert params is not None and tokens is not None
    flops = flops if flops is not None else six * params * tokens
    loss = _loss(fit, fit.parameters, params, tokens, unique)
    if fit.samples and loss is not None:
        draws = np.ravel(_loss(fit, _values(fit), params, tokens, unique))
        spread["loss"] = interval(draws)
        spread[ONE_RUN] = interval(_with_scatter(fit, draws))
    else:
        spread |= {"loss": None, ONE_RUN: None}
    value = None if loss is None else float(np.ravel(loss)[0])
    return Forecast(flops, params, tokens, value, spread, flops / float(fit.flops.max()))


def _values(fit: StoredFit) -> dict[str, Any]:
    """The parameters of each draw, [draws, 1]; those that were not drawn as they are."""
    return {**fit.parameters, **{name: draws[:, None] for name, draws in fit.samples.items()}}


def _best(fit: StoredFit, values: Mapping[str, Any], flops: float) -> tuple[Array, Array]:
    if fit.law in LAWS:
        return LAWS[fit.law].best(values, flops)
    if fit.law in frontier.NAMES:
        return (
            values["N_coefficient"] * flops ** values["N_exponent"],
            values["D_coefficient"] * flops ** values["D_exponent"],
        )
    if fit.law == data_constrained.NAME:
        raise ConfigError(
            "--flops: the data-constrained law says what a run loses, not which is best; give "
            "--params and --tokens besides --unique-tokens"
        )
    raise ConfigError(f"--fit {fit.path}: the {fit.law} law tells no loss; give another law's fit")


def _loss(
    fit: StoredFit, values: Mapping[str, Any], params: float, tokens: float, unique: float | None
) -> Any:
    """None of a frontier of too few budgets for a law of the loss."""
    one, other = np.array([params]), np.array([tokens])
    if fit.law in LAWS:
        return LAWS[fit.law].loss(values, one, other)
    if fit.law in frontier.NAMES:
        return frontier.FRONTIER.loss(values, one, other) if "gamma" in values else None
    if fit.law != data_constrained.NAME:
        raise ConfigError(f"--fit {fit.path}: the {fit.law} law tells no loss; give another's fit")
    if unique is None:
        raise ConfigError("--unique-tokens: is missing; the law is of runs that repeat tokens")
    corpus = np.array([min(unique, tokens)])
    flops = FLOPS_PER_PARAM_AND_TOKEN * one * other
    run = Points(one, other, flops, np.ones(1), ("",), {}, unique=corpus)
    model = data_constrained.DecayModel(run, fit.parameters)
    theta = np.log(np.column_stack([np.ravel(values[n]) for n in data_constrained.DECAYS]))
    return np.exp([model(row)[0] for row in theta])


def _with_scatter(fit: StoredFit, losses: Array) -> Array:
    """The losses with residuals of the fitted runs, widened for the freedom that the fit took."""
    if not len(fit.scatter):
        return losses
    drawn = [name for name in fit.samples if not name.startswith(("N_", "D_"))]  # of the loss
    count, free = len(fit.scatter), len(drawn)
    wider = np.sqrt(count / max(count - free, 1))
    random = np.random.default_rng(0)
    many = np.repeat(losses, max(1, 20_000 // len(losses)))
    with_one: Array = many * np.exp(wider * random.choice(fit.scatter, size=len(many)))
    return with_one


def register(path: Path, made: Forecast, fit: StoredFit) -> None:
    """Write the forecast to a new file; ConfigError where the file, or the run, exists already."""
    known = np.concatenate([np.column_stack([fit.params, fit.tokens]), fit.held_out])
    same = _same_run(known[:, 0], known[:, 1], made.params, made.tokens)
    if np.any(same):
        raise ConfigError(
            f"--register {path}: a run of N = {made.params:.4g} and D = {made.tokens:.4g} is among "
            f"the points of {fit.path}; a forecast is of a run that is still to come"
        )
    if made.loss is None:
        raise ConfigError(f"--register {path}: {fit.path} has no law of the loss; fit more budgets")
    text = json.dumps(
        made.to_json()
        | {
            "law": fit.law, "estimator": fit.estimator, "parameters": fit.parameters,
            "data_sha256": fit.sha256, "fit": str(fit.path), "points": len(fit.flops),
            "fitted_flops": [float(fit.flops.min()), float(fit.flops.max())],
            "beyond": made.beyond, "registered_at": datetime.now(UTC).isoformat(timespec="seconds"),
        },
        indent=1,
    )  # fmt: skip
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(f"{text}\n")
            file.flush()
            os.fsync(file.fileno())
        path.chmod(0o444)
    except FileExistsError:
        raise ConfigError(
            f"--register {path}: exists; a forecast is never written again; name another file"
        ) from None


def default_path(fit: StoredFit, flops: float) -> Path:
    """Path of a forecast's file: beside the fit, named after the budget and the time."""
    now = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    return fit.path.parent / f"forecast-{flops:.3g}-{now}.json"


def judged(files: Sequence[Path], points: Points) -> list[dict[str, Any]]:
    """Registered forecasts beside the runs that they were about: whether each interval held.

    A forecast without a run yet has None for row, loss, error and held; `error` is that of the
    forecast, relative to the truth. Raises ConfigError for a file that is no forecast.
    """
    found = []
    for file in files:
        made = _read(file)
        line = {
            "file": str(file), "registered_at": made["registered_at"], "law": made["law"],
            "data_sha256": made["data_sha256"], "flops": made["flops"], "params": made["params"],
            "tokens": made["tokens"], "beyond": made["beyond"], "predicted": made["loss"],
            "interval": made["intervals"].get(ONE_RUN),
        }  # fmt: skip
        runs = np.flatnonzero(
            _same_run(points.params, points.tokens, made["params"], made["tokens"])
        )
        none = {"row": None, "loss": None, "error": None, "held": None}
        for run in runs:
            truth = float(points.loss[run])
            both = line["interval"]
            held = None if both is None else bool(both[0] <= truth <= both[1])
            error = made["loss"] / truth - 1
            found.append(
                line | {"row": points.names[run], "loss": truth, "error": error, "held": held}
            )
        if not len(runs):
            found.append(line | none)
    return found


def _same_run(
    params: Array, tokens: Array, own_params: float, own_tokens: float
) -> npt.NDArray[np.bool_]:
    far = np.maximum(np.abs(params / own_params - 1), np.abs(tokens / own_tokens - 1))
    return np.asarray(far < SAME_RUN)


def _read(file: Path) -> dict[str, Any]:
    try:
        made = json.loads(file.read_text(encoding="utf-8"))
        for key in ("registered_at", "law", "data_sha256"):
            made[key] = str(made[key])
        for key in ("flops", "params", "tokens", "beyond", "loss"):
            made[key] = float(made[key])
        made["intervals"].get(ONE_RUN)
        return dict(made)
    except OSError as problem:
        why = problem.strerror or str(problem)
    except (ValueError, KeyError, TypeError, AttributeError):
        why = "it is no forecast"
    raise ConfigError(f"--forecasts {file}: cannot be used ({why}); give what --register wrote")
