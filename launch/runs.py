"""Compare two runs: `parallel3d runs diff A B`.

A and B are folders of runs. Names the first step whose loss or gradient norm differs in any bit
and, if train.digest_every was set, the first digest of the state that differs, with its parameters.
"""

import argparse
import sys

from parallel3d.base import terminal
from parallel3d.base.arguments import DONE, FAILED, Parser, path_of, prints_errors_as
from parallel3d.train.digests import compare_runs, in_words


@prints_errors_as("runs")
def main() -> int:
    """Run the command `runs`; return 1 if the runs differ, 2 if they cannot be compared."""
    args = parse_args()
    difference = compare_runs(args.one, args.other)
    if args.json:
        terminal.print_json(difference)
    else:
        print("\n".join(in_words(difference)))
    return DONE if difference["same"] else FAILED


def parse_args() -> argparse.Namespace:
    """Return the options of `runs`."""
    parser = Parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    text = "name the first step in which two runs differ"
    command = commands.add_parser("diff", help=text, description=text)
    command.add_argument("one", type=path_of, metavar="A", help="folder of a run")
    command.add_argument("other", type=path_of, metavar="B", help="folder of another run")
    command.add_json()
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
