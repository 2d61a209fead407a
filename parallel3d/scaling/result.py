"""Result of a fit, as data: printed by `scale.py fit` and stored in fit.json."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from parallel3d.base.errors import ConfigError
from parallel3d.scaling.points import Array, Dropped, Points

LEVEL = 95  # per cent that an interval holds


@dataclass(frozen=True)
class Fit:
    """A law's fitted values, their intervals, and diagnostics.

    `parameters`: name -> value. `samples`: the same of each draw of the bootstrap, [draws];
    empty where the points are too few for one. `objective`: what was minimised, at its minimum.
    `optimal`: what the best N and D grow with, as a power of FLOPs; of each draw in `samples` as
    "N exponent" and "D exponent". `scatter`: residuals of the points, log(loss) - log(law).
    """

    law: str
    estimator: str
    parameters: Mapping[str, float]
    objective: float
    points: Points
    optimal: Mapping[str, float]
    samples: Mapping[str, Array] = field(default_factory=dict)
    optimal_samples: Mapping[str, Array] = field(default_factory=dict)
    scatter: Array = field(default_factory=lambda: np.zeros(0))
    diagnostics: Mapping[str, Any] = field(default_factory=dict)

    @property
    def standard_errors(self) -> dict[str, float | None]:
        """Standard error of each parameter: the standard deviation of its bootstrap."""
        return {name: _deviation(self.samples.get(name)) for name in self.parameters}

    @property
    def intervals(self) -> dict[str, list[float] | None]:
        """Interval of each parameter: the middle 95 % of its bootstrap."""
        return {name: interval(self.samples.get(name)) for name in self.parameters}

    @property
    def dropped(self) -> tuple[Dropped, ...]:
        """The rows that were left out of the fit, and why."""
        return self.points.dropped

    def to_json(self) -> dict[str, Any]:
        """The object that `--json` prints; its keys are published and do not change."""
        exponents = {name: interval(draws) for name, draws in self.optimal_samples.items()}
        return {
            "law": self.law,
            "estimator": self.estimator,
            "parameters": dict(self.parameters),
            "standard_errors": self.standard_errors,
            "intervals": self.intervals,
            "objective": self.objective,
            "points": len(self.points),
            "dropped": [gone._asdict() for gone in self.dropped],
            "diagnostics": dict(self.diagnostics) | {"optimal_exponents_intervals": exponents},
            "optimal_exponents": dict(self.optimal),
        }

    def document(self) -> dict[str, Any]:
        """The contents of fit.json: `to_json`, and the input of forecasts."""
        points = self.points
        return self.to_json() | {
            "data": {
                "sha256": points.digest,
                "params": points.params.tolist(),
                "tokens": points.tokens.tolist(),
                "flops": points.flops.tolist(),
                "loss": points.loss.tolist(),
                "names": list(points.names),
            },
            "scatter": self.scatter.tolist(),
            "samples": {name: draws.tolist() for name, draws in self.samples.items()},
        }


@dataclass(frozen=True)
class StoredFit:
    """A fit read from its fit.json, with the same fields as Fit."""

    path: Path
    law: str
    estimator: str
    parameters: dict[str, float]
    samples: dict[str, Array]
    scatter: Array
    sha256: str
    params: Array
    tokens: Array
    flops: Array
    held_out: Array
    """N and D of runs that were there, and not fitted for a forecast of theirs: [runs, 2]."""

    @classmethod
    def read(cls, path: Path) -> "StoredFit":
        """The fit in a file; raises ConfigError for a file that `scale.py fit` did not write."""
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            data = raw["data"]
            sworn = raw.get("diagnostics", {}).get("forecasts", ())
            held = [[x["params"], x["tokens"]] for x in sworn if x["loss"] is not None]
            return cls(
                path, str(raw["law"]), str(raw["estimator"]),
                {str(k): float(v) for k, v in raw["parameters"].items()},
                {str(k): np.array(v, dtype=float) for k, v in raw["samples"].items()},
                np.array(raw["scatter"], dtype=float), str(data["sha256"]),
                np.array(data["params"], dtype=float), np.array(data["tokens"], dtype=float),
                np.array(data["flops"], dtype=float), np.array(held, dtype=float).reshape(-1, 2),
            )  # fmt: skip
        except OSError as problem:
            why = problem.strerror or str(problem)
        except (ValueError, KeyError, TypeError, AttributeError):
            why = "it is no fit"
        raise ConfigError(f"--fit {path}: cannot be used ({why}); give a fit.json of scale.py fit")


def interval(draws: Array | None) -> list[float] | None:
    """The percentiles that enclose the middle 95 % of the draws; None for too few draws."""
    if draws is None or not len(draws):
        return None
    rest = (100 - LEVEL) / 2
    low, high = np.percentile(draws, [rest, 100 - rest])
    return [float(low), float(high)]


def _deviation(draws: Array | None) -> float | None:
    return None if draws is None or len(draws) < 2 else float(np.std(draws, ddof=1))


def finite(value: Any) -> Any:
    """The value with None in place of numbers that are not finite, as JSON has no NaN."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
