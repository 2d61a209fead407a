"""Fitted efficiency curves: of all published runs, or measured on this machine.

benchmarks/fit_curves.py writes curves.json; docs/planner/validation.md has its output.
"""

import json
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path

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


@lru_cache(maxsize=1)
def fitted() -> Curves:
    """Return the curves fitted on all published runs, with which the planner plans."""
    return Curves(**json.loads(FILE.read_text(encoding="utf-8"))["all"]["curves"])


def curves_for(hardware: Hardware) -> Curves:
    """The curves measured on this machine, if it was calibrated, else the fitted ones.

    Raises ConfigError for an unknown curve, and for an impossible value.
    """
    if problems := [p for item in (hardware.curves or {}).items() if (p := _problem(*item))]:
        raise Problems(problems, f"the hardware {hardware.name}")
    return Curves(**hardware.curves) if hardware.curves else fitted()


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
