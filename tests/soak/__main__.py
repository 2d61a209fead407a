"""Strike a run with faults: `python -m tests.soak --faults 42 --seed 1 --folder soak`.

The same command goes on where it was ended. Prints a table by type, and the largest difference to
the run without faults.
"""

import argparse
import os
import sys
import time
from pathlib import Path

from tests.soak.faults import KINDS
from tests.soak.soak import TOLERANCE, Soak, counts, drawn


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=42)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--minutes", type=float, default=None, help="end after so many; to go on")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, metavar="TYPE")
    parser.add_argument("--draw", action="store_true", help="print the counts by type, run nothing")
    args = parser.parse_args()
    if args.draw:
        print(*counts(drawn(args.faults, args.seed, args.kinds)).items(), sep="\n")
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    folder = args.folder or Path(f"soak-{args.faults}-{args.seed}")
    soak = Soak(folder.absolute(), args.faults, args.seed, args.kinds)
    limit = time.monotonic() + 60 * args.minutes if args.minutes else None
    if not soak.run_all(limit):
        sys.exit(f"{len(soak.done())} of {args.faults} faults so far; the same command goes on")
    differences = soak.compare()
    table, missed = soak.table()
    print(table, f"largest differences of weights: {differences}", sep="\n")
    sys.exit(bool(missed) or differences["same meshes"] > 0 or differences["one mesh"] > TOLERANCE)


if __name__ == "__main__":
    main()
