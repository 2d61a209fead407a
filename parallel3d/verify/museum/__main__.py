"""The museum's measurement, into a file of JSON, and docs/museum.md made from it."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from parallel3d.atomic import replace_text
from parallel3d.verify.museum import exhibits
from parallel3d.verify.museum.command import detectors, halls_of
from parallel3d.verify.museum.page import page
from parallel3d.verify.museum.tour import tour


def main() -> None:
    """Run `measure FILE [NAME ...]` or `page FILE`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["measure", "page"])
    parser.add_argument("file", type=Path)
    parser.add_argument("names", nargs="*", help="of exhibits; all without one")
    args = parser.parse_args()
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    known = json.loads(args.file.read_text()) if args.file.exists() else {}
    if args.what == "page":
        sys.stdout.write(page(known))
        return
    records = known.get("exhibits", {})
    with TemporaryDirectory(prefix="parallel3d-museum-") as folder:
        names, place = args.names or exhibits.names(), Path(folder)
        measure(names, records, args.file, place)


def measure(names: Sequence[str], records: dict[str, Any], file: Path, folder: Path) -> None:
    """Plant each exhibit and note what came of it; written as it goes."""
    for title, visit in tour(halls_of(None, folder), names, detectors()):
        records[visit.name] = {**visit.to_dict(), "hall": title}
        print(records[visit.name], file=sys.stderr, flush=True)
        _write(file, records)


def _write(file: Path, records: dict[str, Any]) -> None:
    load = max(os.getloadavg())
    measured = {"machine": f"{os.cpu_count()} cores, load average {load:.0f}", "exhibits": records}
    replace_text(file, json.dumps(measured, indent=1, sort_keys=True, allow_nan=False) + "\n")


if __name__ == "__main__":
    main()
