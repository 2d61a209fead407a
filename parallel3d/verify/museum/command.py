"""What `launch/verify.py --museum` does: a table, line by line, and the JSON report."""

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from parallel3d.config import RunConfig
from parallel3d.errors import ConfigError
from parallel3d.verify.museum import exhibits
from parallel3d.verify.museum.halls import HALLS, hall
from parallel3d.verify.museum.tour import Detector, Hall, Visit, tour

_TYPES = "parallel3d.spmd"
_WIDTHS = (34, 8, 25, 9, 9)


def detectors() -> dict[str, Detector]:
    """The checks that are asked before a process is started, by name."""
    if find_spec(_TYPES) is None:
        return {}
    return {"types": import_module(f"{_TYPES}.check").type_errors}


def show(config: RunConfig | None, folder: Path, console: Console) -> dict[str, Any]:
    """Plant every exhibit that a config can hold, say which is seen, and give the JSON report.

    Without a config each in the first of the museum's own that can hold it. Raises ConfigError.
    """
    console.print(_row("exhibit", "", "by", "size", "seconds"))
    visits = []
    for title, visit in tour(halls_of(config, folder), exhibits.names(), detectors()):
        if visit.not_held:
            console.print(f"{visit.name:<34}not in this config: {visit.not_held}")
            continue
        visits.append(visit)
        if visit.raised:
            console.print(f"{visit.name:<34}RAISES: {visit.raised}")
            continue
        said = "seen" if visit.seen else "MISSED"
        size, seconds = f"{visit.relative_size:.0e}", f"{visit.seconds:.1f}"
        console.print(_row(visit.name, said, visit.by, size, seconds, title if not config else ""))
    if not visits:
        raise ConfigError("no exhibit can be planted in this config; leave --config out")
    return _report(visits, console)


def _report(visits: list[Visit], console: Console) -> dict[str, Any]:
    missed = [visit.name for visit in visits if not visit.seen]
    quick = sum(visit.seconds <= 10 for visit in visits)
    console.print(
        f"{len(visits) - len(missed)} of {len(visits)} seen, {quick} of them within 10 s each"
        + (f"; MISSED: {', '.join(missed)}" if missed else "")
    )
    return {"passed": not missed, "exhibits": [visit.to_dict() for visit in visits]}


def halls_of(config: RunConfig | None, folder: Path) -> Mapping[str, Callable[[], Hall]]:
    """The function that makes each hall of the museum, in a folder of its own."""

    def maker(title: str) -> Callable[[], Hall]:
        own = folder / title.replace(" ", "-")

        def make() -> Hall:
            own.mkdir()
            return Hall(config or hall(title), own)

        return make

    return {title: maker(title) for title in (HALLS if config is None else ["config"])}


def _row(*cells: str) -> str:
    return "".join(
        f"{cell:<{width}}" for cell, width in zip(cells, (*_WIDTHS, 1)[: len(cells)], strict=True)
    )
