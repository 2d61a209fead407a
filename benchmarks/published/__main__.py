"""Compare the planner with published runs of other programs.

`python -m benchmarks.published FILE.csv` predicts each row's step time and memory
(docs/planner/validation.md says which columns a table has).
"""

import json
import sys
from pathlib import Path

from benchmarks.published.validate import show, validate
from benchmarks.published.validation_tables import markdown
from parallel3d.base import terminal
from parallel3d.base.arguments import Parser
from parallel3d.base.errors import Parallel3DError

DONE = 0
BAD_INPUT = 2


def main() -> int:
    """Run the comparison: 0, or 2 where the table cannot be read."""
    parser = Parser(__doc__)
    parser.add_argument("file", type=Path, metavar="FILE.csv", help="published runs")
    parser.add_argument("--program", metavar="NAME", help="what runs without a program in it ran")
    parser.add_argument("--markdown", action="store_true", help="print the table of the docs")
    parser.add_json()
    args = parser.parse_args()
    try:
        report = validate(args.file, args.program)
    except (Parallel3DError, OSError) as error:
        print(f"published: {error}", file=sys.stderr)
        return BAD_INPUT
    if args.markdown:
        print(markdown(report))
        return DONE
    show(report, terminal.console(args.json))
    if args.json:
        print(json.dumps(report))
    return DONE


if __name__ == "__main__":
    sys.exit(main())
