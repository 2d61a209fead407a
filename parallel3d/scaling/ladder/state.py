"""State of each run of a ladder, by the contents of its folder."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from parallel3d.base.errors import ConfigError
from parallel3d.config.digest import PLACED, digest_of
from parallel3d.scaling.ladder.expand import LadderRun
from parallel3d.scaling.runs import CONFIG, METRICS, NoEnd, config_of, last_line

# What training fills in besides the mesh: the tokens that a tokenizer came out with.
_APART = (*PLACED, "parallel3d.data.vocab_size")
FRESH = ("auto", "none")  # checkpoint.resume of runs that begin at step 0


@dataclass(frozen=True)
class State:
    """State of a run: "new", "unfinished" or "finished", with steps, held-out loss and error."""

    name: str
    step: int = 0
    loss: float | None = None
    standard_error: float | None = None


def state_of(run: LadderRun) -> State:
    """The state of a run; it is finished only where its config is the ladder's.

    Two configs are the same whatever their paths, mesh and offload. Raises ConfigError where the
    run's folder holds another config's.
    """
    if not (run.folder / CONFIG).exists():
        return State("new")
    try:
        own = config_of(run.folder)
    except NoEnd as why:
        raise ConfigError(f"{run.folder}: {why}; remove it") from None
    if digest_of(own, _APART) != digest_of(run.config, _APART):
        changed = ", ".join(_changes(own.to_dict(), run.config.to_dict())) or "its settings"
        raise ConfigError(
            f"{run.folder}: is of another config than the ladder's run of that name ({changed}); "
            "remove it, or give the ladder another directory"
        )
    try:
        last = last_line(run.folder / METRICS)
    except NoEnd:
        return State("unfinished")
    step = int(last["step"])
    if step < run.steps:
        return State("unfinished", step)
    if run.kind == "trunk":  # its loss at a constant rate is nobody's
        needed = set(run.config.checkpoint.at)
        return State("finished" if needed <= set(checkpoints(run)) else "unfinished", step)
    if "held_out_loss" not in last:
        return State("unfinished", step)
    found = (last.get("validation") or {}).get("held_out") or {}
    return State("finished", step, last.get("held_out_loss"), found.get("standard_error"))


def checkpoints(run: LadderRun) -> list[int]:
    """Steps of the run's own complete checkpoints, ascending."""
    found = (run.folder / "checkpoints").glob("step-*/manifest.json")
    steps = (path.parent.name.removeprefix("step-") for path in found)
    return sorted(int(step) for step in steps if step.isdecimal())  # others were set aside


def resume_of(run: LadderRun) -> str:
    """The value of checkpoint.resume with which a run is to be started now.

    A run that begins from another's checkpoint goes on with its own newest by number, and is
    refused by name where that is damaged: "auto" would start it afresh, from step 0.
    """
    first, own = str(run.config.checkpoint.resume), checkpoints(run)
    if not own:
        return first
    return "auto" if first in FRESH else str(own[-1])


def _changes(was: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The settings that tell two configs apart, as "path: old -> new"."""
    for name in now:
        path = f"{prefix}{name}"
        there, here = was.get(name), now[name]
        if there == here or path in (*_APART, "parallel3d.run", "parallel3d.checkpoint"):
            continue
        if isinstance(there, Mapping) and isinstance(here, Mapping):
            yield from _changes(there, here, f"{path}.")
        else:
            yield f"{path}: {json.dumps(there)} -> {json.dumps(here)}"
