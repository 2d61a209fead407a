"""The table that `python -m tests.museum` prints, line by line, and its JSON report."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from parallel3d.base.errors import ConfigError
from parallel3d.config import RunConfig
from tests.museum import exhibits
from tests.museum.exhibit import KINDS, Kind
from tests.museum.halls import HALLS, hall
from tests.museum.shown import StoredCurves, mark, stored
from tests.museum.tour import Hall, Visit, tour

_WIDTHS = (34, 25, 6, 7, 8)  # 80 in all


def show(config: RunConfig | None, folder: Path, console: Console) -> dict[str, Any]:
    """Plant every exhibit that a config can hold, say which is seen, and give the JSON report.

    Without a config each in the first of the museum's own that can hold it. Raises ConfigError.
    """
    console.print(_row("exhibit", "seen by", "size", "s", "curve"))
    visits = []
    curves = stored()
    for _, visit in tour(halls_of(config, folder), exhibits.names()):
        if visit.not_held:
            console.print(f"{visit.name:<34}needs {visit.not_held}")
            continue
        visits.append(visit)
        if visit.raised:
            console.print(f"{visit.name:<34}RAISES: {visit.raised}")
            continue
        size = f"{visit.relative_size:.0e}".replace("e-0", "e-").replace("e+0", "e")
        seconds = f"{visit.seconds:.1f}"
        curve = mark(visit.name, curves)
        shown = "-"
        if curve is not None:
            shown = "shown" if curve.shows else "nothing"
        console.print(_row(visit.name, visit.by or "MISSED", size, seconds, shown))
    if not visits:
        raise ConfigError("no exhibit can be planted in this config; leave --config out")
    return _report(visits, curves, console)


def _report(visits: list[Visit], curves: StoredCurves, console: Console) -> dict[str, Any]:
    missed = [visit.name for visit in visits if not visit.seen]
    quick = sum(visit.seen and visit.seconds <= 10 for visit in visits)
    console.print(
        f"{len(visits) - len(missed)} of {len(visits)} seen, {quick} of them within 10 s each"
        + (f"; MISSED: {', '.join(missed)}" if missed else "")
    )
    by_kind = score(visits)
    for kind, (seen, total) in by_kind.items():
        console.print(f"{seen:>3} of {total:>2}  {KINDS[kind]}")
    marks = {visit.name: mark(visit.name, curves) for visit in visits}
    shown = {name: None if of is None else of.shows for name, of in marks.items()}
    console.print(
        f"{sum(of is True for of in shown.values())} of "
        f"{sum(of is not None for of in shown.values())} shown by the curve of 100 "
        "training steps (docs/museum.md)"
    )
    records = [visit.to_dict() | {"curve_shows": shown[visit.name]} for visit in visits]
    kinds = {kind: {"seen": seen, "total": total} for kind, (seen, total) in by_kind.items()}
    return {"passed": not missed, "exhibits": records, "kinds": kinds}


def score(visits: Sequence[Visit]) -> dict[Kind, tuple[int, int]]:
    """Return the numbers of exhibits that were seen and planted, by kind."""
    of_kind: dict[Kind, list[bool]] = {kind: [] for kind in KINDS}
    for visit in visits:
        of_kind[exhibits.load(visit.name).EXHIBIT.kind].append(visit.seen)
    return {kind: (sum(seen), len(seen)) for kind, seen in of_kind.items()}


def halls_of(config: RunConfig | None, folder: Path) -> Mapping[str, Callable[[], Hall]]:
    """The function that makes each hall of the museum, in a folder of its own."""

    def make(title: str) -> Hall:
        own = folder / title.replace(" ", "-")
        own.mkdir()
        return Hall(config or hall(title), own)

    return {title: partial(make, title) for title in (HALLS if config is None else ["config"])}


def _row(*cells: str) -> str:
    padded = (f"{cell:<{width}}" for cell, width in zip(cells, _WIDTHS, strict=True))
    return "".join(padded).rstrip()
