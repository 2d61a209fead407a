"""The result of a fit, as `scale fit` prints it and stores it in fit.json."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from parallel3d.base.errors import ConfigError
from parallel3d.scaling.points import Array, Points

LEVEL = 95  # per cent of the bootstrap that an interval covers
_COLUMNS = ("params", "tokens", "flops", "loss")


@dataclass(frozen=True)
class Fit:
    """The fitted parameters of a law, their bootstrap, and diagnostics.

    objective: its minimum.
    optimal: exponents with which the best N and D grow with FLOPs.
    samples, optimal_samples: parameters and exponents of each bootstrap draw, as arrays [draws].
    scatter: log(loss) - log(law) of the points.
    path: the file that the fit was read from.
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
    path: Path = Path("fit.json")

    @property
    def standard_errors(self) -> dict[str, float | None]:
        """Standard error of each parameter: the standard deviation of its bootstrap draws."""
        drawn = {name: self.samples.get(name, ()) for name in self.parameters}
        return {
            name: float(np.std(draws, ddof=1)) if len(draws) > 1 else None
            for name, draws in drawn.items()
        }

    @property
    def intervals(self) -> dict[str, list[float] | None]:
        """Interval of each parameter: the middle 95 % of its bootstrap draws."""
        return {name: interval(self.samples.get(name)) for name in self.parameters}

    def to_json(self) -> dict[str, object]:
        """Return the object that `--json` prints; its keys are published and do not change."""
        exponents = {name: interval(draws) for name, draws in self.optimal_samples.items()}
        return {
            "law": self.law, "estimator": self.estimator, "parameters": dict(self.parameters),
            "standard_errors": self.standard_errors, "intervals": self.intervals,
            "objective": self.objective, "points": len(self.points),
            "dropped": [gone._asdict() for gone in self.points.dropped],
            "diagnostics": dict(self.diagnostics) | {"optimal_exponents_intervals": exponents},
            "optimal_exponents": dict(self.optimal),
        }  # fmt: skip

    def document(self) -> dict[str, object]:
        """Return the contents of fit.json: `to_json` with the data that forecasts need."""
        points = self.points
        return self.to_json() | {
            "data": {
                "sha256": points.digest, "names": list(points.names),
                **{name: getattr(points, name).tolist() for name in _COLUMNS},
            },
            "scatter": self.scatter.tolist(),
            "samples": {name: draws.tolist() for name, draws in self.samples.items()},
        }  # fmt: skip

    @classmethod
    def read(cls, path: Path) -> "Fit":
        """Read a fit.json; raise ConfigError for a file that `scale fit` did not write."""
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            data = raw["data"]
            columns: dict[str, Any] = {name: np.array(data[name], dtype=float) for name in _COLUMNS}
            return cls(
                law=str(raw["law"]), estimator=str(raw["estimator"]),
                parameters={str(k): float(v) for k, v in raw["parameters"].items()},
                objective=raw["objective"], optimal=dict(raw["optimal_exponents"]),
                points=Points(**columns, names=tuple(data["names"]), columns={}),
                samples={str(k): np.array(v, dtype=float) for k, v in raw["samples"].items()},
                scatter=np.array(raw["scatter"], dtype=float),
                diagnostics=dict(raw["diagnostics"]), path=path,
            )  # fmt: skip
        except OSError as problem:
            why = problem.strerror or str(problem)
        except (ValueError, KeyError, TypeError, AttributeError):
            why = "not a fit"
        raise ConfigError(f"--fit {path}: cannot be used ({why}); name a fit.json of `scale fit`")


def interval(draws: Array | None) -> list[float] | None:
    """Return the percentiles 2.5 and 97.5 of the draws; None if there are no draws."""
    if draws is None or not len(draws):
        return None
    rest = (100 - LEVEL) / 2
    low, high = np.percentile(draws, [rest, 100 - rest])
    return [float(low), float(high)]


def finite(value: object) -> object:
    """Replace numbers that are not finite by None, since JSON has no NaN."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
