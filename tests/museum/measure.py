"""The museum's measurement into files of JSON, and docs/museum.md made from them."""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from parallel3d.base.atomic import replace_text
from tests.museum import exhibits
from tests.museum.command import halls_of
from tests.museum.curve import planted_curves, right_curves
from tests.museum.page import page
from tests.museum.shown import FILE, mark, stored
from tests.museum.tour import tour


def main() -> None:
    """Run `measure FILE [NAME ...]`, `curves FILE [NAME ...]` or `page FILE`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["measure", "curves", "page"])
    parser.add_argument("file", type=Path, help="what `measure` writes")
    parser.add_argument("names", nargs="*", help="of exhibits; all without one")
    args = parser.parse_args()
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    known = json.loads(args.file.read_text()) if args.file.exists() else {}
    if args.what == "page":
        sys.stdout.write(page(known, stored()))
        return
    records = known.get("exhibits", {})
    with TemporaryDirectory(prefix="parallel3d-museum-") as folder:
        names = args.names or exhibits.names()
        place = Path(folder)
        if args.what == "measure":
            measure(names, records, args.file, place)
        else:
            draw({name: records[name]["hall"] for name in names}, place, not args.names)


def measure(names: Sequence[str], records: dict[str, Any], file: Path, folder: Path) -> None:
    """Plant each exhibit and note what came of it; written as it goes."""
    for title, visit in tour(halls_of(None, folder), names):
        records[visit.name] = {**visit.to_dict(), "hall": title}
        print(records[visit.name], file=sys.stderr, flush=True)
        machine = f"{os.cpu_count()} cores, load average {max(os.getloadavg()):.0f}"
        measured = {"machine": machine, "exhibits": records}
        replace_text(file, json.dumps(measured, indent=1, sort_keys=True, allow_nan=False) + "\n")


def draw(halls: dict[str, str], folder: Path, anew: bool) -> None:
    """Train each exhibit in its hall for a hundred steps, and note the loss curve as it goes.

    The right runs' are those that are stored, unless all is measured `anew`.
    """
    known: dict[str, Any] = {} if anew or not FILE.exists() else dict(stored())
    measured = {"right": known.get("right", {}), "exhibits": known.get("exhibits", {})}
    for title in dict.fromkeys(halls.values()):
        names = [name for name, hall in halls.items() if hall == title]
        if title not in measured["right"]:
            measured["right"][title] = right_curves(title, folder)
        for name, curve in planted_curves(title, names, folder):
            measured["exhibits"][name] = {"hall": title, "curve": curve}
            replace_text(FILE, "".join(_lines(measured)))
            print(name, mark(name, measured), file=sys.stderr, flush=True)


def _lines(measured: dict[str, Any]) -> Iterator[str]:
    """JSON, a line for each hall and exhibit."""
    for number, (title, entries) in enumerate(sorted(measured.items())):
        yield ("{\n" if number == 0 else ",\n") + f'"{title}": {{\n'
        lines = (f" {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(entries.items()))
        yield ",\n".join(lines) + "\n}"
    yield "\n}\n"


if __name__ == "__main__":
    main()
