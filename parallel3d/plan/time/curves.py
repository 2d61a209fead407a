"""The fitted efficiency curves, and those that never saw one group of published runs (floor 0).

benchmarks/fit_curves.py writes curves.json; docs/planner.md has its output.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from parallel3d.hardware import Hardware
from parallel3d.plan.time.operators import Curves

FILE = Path(__file__).with_name("curves.json")


def fitted() -> Curves:
    """The curves fitted on all published runs, with which the planner plans."""
    return _curves(tuple(_file().get("all", {}).get("curves", {}).items()))


def without(group: str) -> Curves:
    """The curves fitted on all groups but this one; those of all for a group nobody fitted."""
    fit = _file().get("without", {}).get(group)
    return _curves(tuple(fit["curves"].items())) if fit else fitted()


def seen_by(group: str | None) -> Mapping[str, str]:
    """The groups, and a digest of their rows, that the fit without `group` (None: of all) saw."""
    file = _file()
    fit = file.get("all") if group is None else file.get("without", {}).get(group)
    return fit["saw"] if fit else {}


def curves_for(hardware: Hardware) -> Curves:
    """The curves measured on this very machine, or else the fitted ones."""
    return _curves(tuple(hardware.curves.items())) if hardware.curves else fitted()


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
