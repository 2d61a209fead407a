"""Flags of launch/scale.py plan and run."""

from parallel3d.base.arguments import Parser, whole_number


def add_plan(parser: Parser) -> None:
    """Add the flags of `plan` to a parser."""
    _add_ladder(parser)
    parser.add_json()


def add_run(parser: Parser) -> None:
    """Add the flags of `run` to a parser."""
    _add_ladder(parser)
    parser.add_argument(
        "--parallel", type=whole_number(), default=1, metavar="N",
        help="so many runs at once, where there are devices for them; else 1",
    )  # fmt: skip
    parser.add_argument(
        "--emit", choices=("slurm",), help="write job arrays for Slurm instead, and train nothing"
    )
    parser.add_json()


def _add_ladder(parser: Parser) -> None:
    parser.add_argument(
        "--ladder", required=True, metavar="FILE",
        help="a ladder file, as those in configs/ladders",
    )  # fmt: skip
