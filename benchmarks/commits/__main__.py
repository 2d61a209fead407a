"""Does a commit do the same as an earlier one, and as fast? For changes that must not be seen.

    python -m benchmarks.commits BEFORE AFTER [--only train plan] [--keep FOLDER] [--json]
    python -m benchmarks.commits BEFORE AFTER --speed

BEFORE and AFTER are commits, or folders of checkouts. In each, the real commands run, in processes
of their own that import that checkout: ten training runs, three runs that BEFORE stopped and AFTER
resumes, the plans of all shipped configs, the published runs, and --json of every command. Compared
are losses, norms, digests, weights, checkpoints, plans and messages, without times and paths. One
line is printed for each comparison, and the exit code is 1 if any differs. `--speed` times steps
and plan searches of both in turns.

Names for --only are parts, such as "train", or single comparisons, such as "train/llama-muon".
--keep keeps what commits recorded, so that it is run once; folders with changes that are not
committed are run again. All of it takes about 5 minutes a commit on two idle cores.
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.commits import commands, speed
from benchmarks.commits.checkout import (
    Checkout,
    CommandFailed,
    Place,
    checkout_of,
    one_at_a_time,
)
from benchmarks.commits.recording import first_difference
from benchmarks.commits.runs import (
    RESUMED,
    RUNS,
    record_resumed,
    record_run,
    stopped,
    write_texts,
)

Record = Callable[[Place, frozenset[str]], None]


def cases() -> dict[str, Record]:
    """Return what is recorded of each commit alone, by the names of the comparisons."""
    by_name: dict[str, Record] = {}
    for config in commands.HARDWARE:
        name = f"plan/{config.removesuffix('.json')}"
        by_name[name] = partial(_of, commands.record_plan, config)
    for table in commands.PUBLISHED:
        by_name[f"published/{table}"] = partial(_of, commands.record_published, table)
    by_name["texts"] = commands.record_texts
    for run in RUNS:
        by_name[f"train/{run.name}"] = partial(_of, record_run, run.name)
    for name, record in commands.JSON.items():
        by_name[f"json/{name}"] = record
    return by_name


def _of(
    record: Callable[[Place, str, frozenset[str]], None],
    name: str,
    place: Place,
    without: frozenset[str],
) -> None:
    record(place, name, without)


def is_wanted(name: str, only: Sequence[str]) -> bool:
    """Return True if a comparison is one of `only`, or of a part that is; all are by default."""
    return not only or any(name == part or name.startswith(f"{part}/") for part in only)


def place_of(checkout: Checkout, keep: Path, without: frozenset[str]) -> Place:
    """Return the folders of a checkout below `keep`; those of changed files start empty."""
    folder = keep / checkout.key
    if not checkout.is_committed and folder.exists():
        shutil.rmtree(folder)
    results = "-".join(["results", *sorted(without)])
    place = Place(checkout, keep / "shared", folder / "work", folder / results)
    place.work.mkdir(parents=True, exist_ok=True)
    place.results.mkdir(exist_ok=True)
    checkout.check_imports(place.environment, place.work)
    return place


def recorded(place: Place, case: str, record: Record, without: frozenset[str]) -> str:
    """Record a case of a checkout, unless it was before; return the error of a command that failed.

    The results of a case are complete once the file `<case>/done` is there.
    """
    done = place.results / case / "done"
    with one_at_a_time(place.work.parent / "lock"):  # another comparison may run the same commit
        if done.exists():
            return ""
        shutil.rmtree(place.results / case, ignore_errors=True)
        try:
            record(place, without)
        except CommandFailed as error:
            return str(error)
        done.parent.mkdir(parents=True, exist_ok=True)
        done.touch()
    return ""


class Comparison:
    """Compares case by case, prints a line for each, and keeps what closes the output."""

    def __init__(self, before: Place, after: Place, without: frozenset[str]) -> None:
        self.rows: list[dict[str, object]] = []
        self._before = before
        self._after = after
        self._without = without

    def compare(self, case: str, before: Record, after: Record) -> None:
        """Record a case with both checkouts, compare, and print a line."""
        start = time.perf_counter()
        difference = ""
        for place, record, name in (
            (self._before, before, "before"),
            (self._after, after, "after"),
        ):
            if error := recorded(place, case, record, self._without):
                difference = difference or f"{name}: {error}"
        difference = difference or first_difference(
            self._before.results / case, self._after.results / case
        )
        seconds = time.perf_counter() - start
        self.rows.append({"name": case, "same": not difference, "difference": difference})
        verdict = "DIFFERS" if difference else "same"
        print(f"{verdict:<8}{case:<40}{seconds:6.1f} s  {difference}", file=sys.stderr, flush=True)

    def compare_resumed(self, name: str) -> None:
        """Compare how both checkouts go on with a run that the first one has stopped."""
        case = f"resume/{name}"
        # Not the second checkout's alone: it goes on from what the first one saved.
        shutil.rmtree(self._after.results / case, ignore_errors=True)

        def record(place: Place, without: frozenset[str]) -> None:
            record_resumed(place, name, stopped(self._before, name), without)

        self.compare(case, record, record)


def main() -> int:
    """Compare two commits; return 1 if anything differs."""
    args = parse_args()
    without = frozenset(args.without)
    with ExitStack() as stack:
        keep = args.keep or Path(stack.enter_context(TemporaryDirectory(prefix="parallel3d-")))
        keep = keep.resolve()
        keep.mkdir(parents=True, exist_ok=True)
        write_texts(keep / "shared")
        checkouts = [stack.enter_context(checkout_of(name)) for name in (args.before, args.after)]
        before, after = (place_of(checkout, keep, without) for checkout in checkouts)
        if args.speed:
            rows = speed.compare(before, after, args.rounds)
            if args.json:
                print(json.dumps({"before": checkouts[0].key, "after": checkouts[1].key} | rows))
            return 0
        comparison = Comparison(before, after, without)
        for case, record in cases().items():
            if is_wanted(case, args.only):
                comparison.compare(case, record, record)
        for name in RESUMED:
            if is_wanted(f"resume/{name}", args.only):
                comparison.compare_resumed(name)
    differing = [row["name"] for row in comparison.rows if not row["same"]]
    if not comparison.rows:
        sys.exit(f"--only: no comparison is named {' or '.join(args.only)}")
    same = len(comparison.rows) - len(differing)
    print(f"{same} of {len(comparison.rows)} comparisons are the same", file=sys.stderr)
    if args.json:
        report = {"before": checkouts[0].key, "after": checkouts[1].key, "same": not differing}
        print(json.dumps(report | {"comparisons": comparison.rows}))
    return 1 if differing else 0


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.commits",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("before", metavar="BEFORE", help="a commit, or the folder of a checkout")
    parser.add_argument("after", metavar="AFTER", help="a commit, or the folder of a checkout")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="parts or comparisons to run"
    )
    parser.add_argument(
        "--without",
        nargs="+",
        default=[],
        metavar="KEY",
        help="settings that only one of the commits has: they are left out of configs and texts",
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep what is recorded here")
    parser.add_argument("--speed", action="store_true", help="time steps and searches in turns")
    parser.add_argument(
        "--rounds", type=int, default=5, metavar="N", help="turns of --speed (default: 5)"
    )
    parser.add_argument("--json", action="store_true", help="print one object of JSON at the end")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
