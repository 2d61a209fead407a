"""Fitted efficiency curves: of all published runs, and with each group of runs left out.

benchmarks/fit_curves.py writes curves.json; docs/planner/validation.md has its output.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any

from parallel3d.base.section import Problem, Problems
from parallel3d.config.hardware import Hardware
from parallel3d.plan.time.operators import Curves

FILE = Path(__file__).with_name("curves.json")
# Fractions that no device passes. Calibrated ones of a CPU's work can: what is in its caches is
# faster than the memory that it was measured against.
_FRACTIONS = frozenset({"datasheet", "fp8", "ported", "fused", "network", "host"})
_MAY_BE_0 = frozenset({"overlap", "tensor_overlap", "congestion"})  # and every overhead
_MOST = dict.fromkeys((*_FRACTIONS, "overlap", "tensor_overlap"), 1.0)
_MOST_OF_ALL = 1e12  # a size in elements, say; beyond it sums overflow


def fitted() -> Curves:
    """The curves fitted on all published runs, with which the planner plans."""
    return _curves(tuple(_file().get("all", {}).get("curves", {}).items()))


def without(group: str) -> Curves:
    """The curves fitted on all groups but `group`; for an unknown group, those fitted on all."""
    fit = _file().get("without", {}).get(group)
    return _curves(tuple(fit["curves"].items())) if fit else fitted()


def seen_by(group: str | None) -> Mapping[str, str]:
    """The groups used in the fit without `group` (None: of all), each with a digest of its rows."""
    file = _file()
    fit = file.get("all") if group is None else file.get("without", {}).get(group)
    return fit["saw"] if fit else {}


def curves_for(hardware: Hardware) -> Curves:
    """The curves measured on this machine, if it was calibrated, else the fitted ones.

    Raises ConfigError for an unknown curve, and for an impossible value.
    """
    if problems := [p for item in (hardware.curves or {}).items() if (p := _problem(*item))]:
        raise Problems(problems, f"the hardware {hardware.name}")
    return _curves(tuple(hardware.curves.items())) if hardware.curves else fitted()


def _problem(name: str, value: float) -> Problem | None:
    path, known = f"curves.{name}", Curves.__dataclass_fields__
    if name not in known:
        near = get_close_matches(name, known, n=1)
        remedy = f'the nearest one is "{near[0]}"' if near else f"use {', '.join(known)}"
        return Problem(path, value, "is no curve", remedy)
    least = "at least 0" if name in _MAY_BE_0 or name.startswith("overhead") else "above 0"
    most = _MOST.get(name, _MOST_OF_ALL)
    if (value > 0 or (least == "at least 0" and value == 0)) and value <= most:
        return None
    return Problem(path, value, f"must be {least} and at most {most:g}", "measure it again")


@lru_cache(maxsize=1)
def _file() -> dict[str, Any]:
    if not FILE.exists():
        return {}
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


@lru_cache(maxsize=64)
def _curves(values: tuple[tuple[str, float], ...]) -> Curves:
    known = Curves.__dataclass_fields__
    return replace(Curves(), **{name: x for name, x in values if name in known})
