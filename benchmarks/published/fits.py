"""The planner's curves as fitted with one group of published runs left out, and what each fit saw.

benchmarks/fit_curves.py writes them into the planner's curves.json.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from parallel3d.plan.time.operators import FILE, Curves, fitted


@lru_cache(maxsize=64)
def without(group: str) -> Curves:
    """Return the curves fitted on all groups but `group`; if it is unknown, those fitted on all."""
    fit = _file()["without"].get(group)
    return Curves(**fit["curves"]) if fit else fitted()


@lru_cache(maxsize=64)
def without_device(name: str) -> Curves:
    """Return the curves whose time of experts was fitted on the rows of other devices."""
    own = _file()["experts_without"].get(name, fitted().overhead_per_experts)
    return replace(fitted(), overhead_per_experts=own)


def seen_by(group: str | None) -> Mapping[str, str]:
    """Return the groups that the fit without `group` saw, each with a digest of its rows.

    None: those that the fit on all of them saw.
    """
    fit = _file()["all"] if group is None else _file()["without"][group]
    seen: dict[str, str] = fit["saw"]
    return seen


@lru_cache(maxsize=1)
def _file() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found
