"""Scaling laws: plan and run ladders, fit laws to runs, and forecast runs that are to come.

parallel3d scale plan --ladder configs/ladders/cpu.json
parallel3d scale run --ladder configs/ladders/cpu.json --parallel 2
parallel3d scale fit runs.csv
parallel3d scale predict --fit fit.json --flops 1e24 --register
parallel3d scale coordcheck --config mup.json
"""

import argparse
import json
import sys

from parallel3d.base import terminal
from parallel3d.base.arguments import DONE, FAILED, Parser, named
from parallel3d.scaling import coordinates, flags


@named("scale")
def main() -> int:
    """Run the command `scale`: gives 0, or 2 for input that tells no law."""
    args = parse_args()
    commands = {
        "plan": plan, "run": run, "fit": fit, "predict": predict, "coordcheck": coordcheck,
    }  # fmt: skip
    return commands[args.command](args)


def plan(args: argparse.Namespace) -> int:
    """Print a ladder's runs with sizes, tokens, FLOPs, mesh, memory and hours; write nothing."""
    from parallel3d.scaling.ladder.plan import ladder_of, show, to_json

    console = terminal.console(args.json)
    ladder = ladder_of(args.ladder)
    show(ladder, console)
    if args.json:
        print(json.dumps(to_json(ladder)))
    return DONE


def run(args: argparse.Namespace) -> int:
    """Train the runs of a ladder that are not finished; 1 where one failed, 3 where one stopped."""
    from parallel3d.scaling.ladder.execute import execute
    from parallel3d.scaling.ladder.plan import ladder_of, show, to_json

    console = terminal.console(args.json)
    if args.emit:
        from parallel3d.scaling.ladder import slurm

        code, ladder = DONE, ladder_of(args.ladder)
        files = slurm.write(ladder)
        console.print(f"written: {', '.join(map(str, files))}; submit with {files[-1]}")
    else:
        code, ladder = execute(args.ladder, args.parallel, console)
    show(ladder, console)
    if args.json:
        print(json.dumps(to_json(ladder)))
    return code


def fit(args: argparse.Namespace) -> int:
    """Fit a law, print it, and write fit.json."""
    from parallel3d.scaling.report_page import show_fit
    from parallel3d.scaling.result import finite

    console = terminal.console(args.json)
    found = flags.fit(args)
    show_fit(found, console)
    console.print(f"written: {', '.join(map(str, flags.write(found, args)))}")
    if args.json:
        print(json.dumps(finite(found.to_json())))
    return DONE


def predict(args: argparse.Namespace) -> int:
    """Forecast a run from a fit, and register the forecast if asked to."""
    from parallel3d.scaling.report_page import show_forecast

    console = terminal.console(args.json)
    made, stored, path = flags.predict(args)
    show_forecast(made, stored, console)
    if path is not None:
        console.print(f"registered in {path}")
    if args.json:
        print(json.dumps(made.to_json()))
    return DONE


def coordcheck(args: argparse.Namespace) -> int:
    """Train a config at several widths, and print how sizes of activations go with them; 0 or 1."""
    config = coordinates.prepare(args)
    # Only now: torch and DeepSpeed wait for a config that is right.
    from parallel3d.verify.coordinate_check import check_coordinates

    console = terminal.console(args.json)
    found = check_coordinates(
        config, widths=args.widths, seeds=args.seeds, steps=args.steps, say=console.print
    )
    coordinates.report(found, args, console)
    return DONE if found.passed else FAILED


def parse_args() -> argparse.Namespace:
    """Read the command line of `scale`."""
    parser = Parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, add, words in (
        ("plan", flags.add_plan, "print the runs of a ladder, and what they take"),
        ("run", flags.add_run, "train the runs of a ladder that are not finished"),
        ("fit", flags.add_fit, "fit a law to runs"),
        ("predict", flags.add_predict, "forecast a run from a fit"),
        ("coordcheck", coordinates.add, "see whether activations depend on the width"),
    ):
        add(commands.add_parser(name, help=words, description=words))
    args, overrides = parser.parse_known_args()
    args.overrides = overrides
    if overrides and args.command != "coordcheck":
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    return args


if __name__ == "__main__":
    sys.exit(main())
