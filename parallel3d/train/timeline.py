"""The timeline of a profile: the recorded steps of ranks on one clock, and torch's events.

Times are seconds since the epoch on rank 0's clock, in traces microseconds. Needs no torch.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from parallel3d.base.atomic import replaced
from parallel3d.base.errors import ConfigError
from parallel3d.base.mesh_sizes import AXES, WITHOUT_CP
from parallel3d.schedule.schedule import Action, Span

LANES, TIMELINE = "lanes.json", "timeline.json"


@dataclass(frozen=True)
class Step:
    """A step as recorded by one rank, in unix seconds; spans are relative to `actions`."""

    number: int
    start: float
    end: float
    actions: float
    spans: list[tuple[str, float, float]]


@dataclass(frozen=True)
class Lane:
    """The recorded steps of one rank, and how many seconds its clock is ahead of rank 0's."""

    rank: int
    coords: tuple[int, ...]  # along AXES, or without cp
    steps: list[Step]
    ahead: float

    def spans(self, step: int) -> tuple[Span, ...]:
        """Return the actions of the `step`-th recorded step, on rank 0's clock."""
        seen = self.steps[step]
        zero = seen.actions - self.ahead
        return tuple(Span(Action.parse(a), zero + s, zero + e) for a, s, e in seen.spans)


def trace_of(folder: Path, rank: int) -> Path:
    """Return the path of torch's own trace of a rank."""
    return folder / f"rank-{rank}.json"


def write_lanes(folder: Path, lanes: list[Lane]) -> None:
    """Write the recorded steps, and a timeline of them without torch's events."""
    (folder / LANES).write_text(json.dumps([asdict(lane) for lane in lanes]) + "\n")
    _write(folder, lanes, [])


def merge(folder: Path) -> tuple[Path, list[int]]:
    """Rewrite the timeline of a profile with torch's events of every rank whose trace is there.

    Returns its path, and the ranks whose trace is missing. One trace at a time is in memory. Raises
    ConfigError if the folder is no profile.
    """
    try:
        rows = json.loads((folder / LANES).read_text())
        lanes = [Lane(**row | {"steps": [Step(**step) for step in row["steps"]]}) for row in rows]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{folder / LANES}: {error}; use the folder runs/NAME/profile") from None
    with_trace = [lane for lane in lanes if trace_of(folder, lane.rank).exists()]
    path = _write(folder, lanes, with_trace)
    return path, [lane.rank for lane in lanes if lane not in with_trace]


def _write(folder: Path, lanes: list[Lane], with_trace: Iterable[Lane]) -> Path:
    origin = min(step.start - lane.ahead for lane in lanes for step in lane.steps)
    path = folder / TIMELINE
    with replaced(path) as partial, partial.open("w") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [')
        events = [event for lane in lanes for event in _own_events(lane, origin)]
        file.write(",\n".join(map(json.dumps, events)))
        for lane in with_trace:
            trace = json.loads(trace_of(folder, lane.rank).read_text())
            file.writelines(f",\n{json.dumps(e)}" for e in _torch_events(trace, lane, origin))
        file.write("]}\n")
    return path


def _own_events(lane: Lane, origin: float) -> Iterator[dict[str, object]]:
    """Yield a rank's name, steps and actions as trace events, in microseconds since `origin`."""
    axes = WITHOUT_CP if len(lane.coords) == len(WITHOUT_CP) else AXES
    coords = (f"{axis} {coord}" for axis, coord in zip(axes, lane.coords, strict=True))
    name = f"rank {lane.rank} ({', '.join(coords)})"
    yield _name("process", lane.rank, 0, name)
    yield _name("thread", lane.rank, 0, "pipeline")
    zero = origin + lane.ahead

    def event(name: str, category: str, start: float, end: float) -> dict[str, object]:
        times = {"ts": round((start - zero) * 1e6, 3), "dur": round((end - start) * 1e6, 3)}
        return {"name": name, "cat": category, "ph": "X", "pid": lane.rank, "tid": 0} | times

    for step in lane.steps:
        yield event(f"step {step.number}", "step", step.start, step.end)
        for text, start, end in step.spans:
            op = Action.parse(text).op.value
            yield event(text, op, step.actions + start, step.actions + end)


def _torch_events(trace: dict[str, Any], lane: Lane, origin: float) -> Iterator[dict[str, object]]:
    """Yield torch's events of a rank in the rank's lane, in microseconds since `origin`."""
    shift = (trace.get("baseTimeNanoseconds", 0) - round((origin + lane.ahead) * 1e9)) / 1e3
    named = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in trace["traceEvents"]
        if event.get("ph") == "M" and event["name"] == "thread_name"
    }
    threads: dict[tuple[int, int], int] = {}
    for event in trace["traceEvents"]:
        place = event.get("pid"), event.get("tid")
        # Events about the recording itself have names instead of numbers for pid and tid.
        if event["ph"] == "M" or not all(isinstance(number, int) for number in place):
            continue
        if place not in threads:
            threads[place] = len(threads) + 1
            name = named.get(place) or f"device {place[0]}, stream {place[1]}"
            yield _name("thread", lane.rank, threads[place], name)
        moved = {"pid": lane.rank, "tid": threads[place], "ts": round(event["ts"] + shift, 3)}
        if "id" in event:  # an arrow between events; each rank counts them from 1
            moved["id"] = f"{lane.rank}.{event['id']}"
        yield event | moved


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, object]:
    place = {"ph": "M", "pid": pid, "tid": tid}
    return {"name": f"{kind}_name", **place, "args": {"name": name}}
