"""Scaling laws: plan and run ladders, fit laws to runs, and forecast larger runs.

parallel3d scale plan --ladder configs/ladders/cpu.json
parallel3d scale plan --design --base ds.json --hours 1.5 --out ladder.json
parallel3d scale run --ladder configs/ladders/cpu.json --parallel 2
parallel3d scale fit runs.csv
parallel3d scale predict --fit fit.json --flops 1e24 --register
parallel3d scale coordcheck --config mup.json
parallel3d scale critical-batch --run runs/mine
"""

import argparse
import json
import sys
from dataclasses import asdict

from parallel3d.base import terminal
from parallel3d.base.arguments import DONE, FAILED, Parser, prints_errors_as
from parallel3d.base.step_lines import finite
from parallel3d.scaling import coordinates, flags


@prints_errors_as("scale")
def main() -> int:
    """Run the command `scale` and return its exit code; it is 2 for wrong input."""
    args = parse_args()
    commands = {
        "plan": plan, "run": run, "fit": fit, "predict": predict, "coordcheck": coordcheck,
        "critical-batch": critical_batch,
    }  # fmt: skip
    return commands[args.command](args)


def plan(args: argparse.Namespace) -> int:
    """Print the runs of a ladder with their sizes and costs, and design it first if asked to."""
    from parallel3d.scaling.ladder.design import design
    from parallel3d.scaling.ladder.plan import ladder_of, show, to_json

    console = terminal.console(args.json)
    facts = design(args, console) if args.design or not args.ladder else None
    ladder = ladder_of(str(args.out) if facts else args.ladder)
    show(ladder, console)
    if args.json:
        print(json.dumps(to_json(ladder) | ({"design": facts} if facts else {})))
    return DONE


def run(args: argparse.Namespace) -> int:
    """Train the unfinished runs of a ladder; return 1 if one failed and 3 if they were stopped."""
    from parallel3d.scaling.ladder.plan import ladder_of, show, to_json
    from parallel3d.scaling.ladder.runner import execute

    console = terminal.console(args.json)
    if args.emit:
        from parallel3d.scaling.ladder import slurm

        code, ladder = DONE, ladder_of(args.ladder)
        files = slurm.write(ladder)
        console.print(f"wrote {', '.join(map(str, files))}; submit with {files[-1]}")
    else:
        code, ladder = execute(lambda: ladder_of(args.ladder), args.parallel, console)
    show(ladder, console)
    if args.json:
        print(json.dumps(to_json(ladder)))
    return code


def fit(args: argparse.Namespace) -> int:
    """Fit a law, print it, and write fit.json and the report."""
    from parallel3d.scaling.report_page import show_fit

    console = terminal.console(args.json)
    fitted = flags.fit(args)
    show_fit(fitted, console)
    console.print(f"wrote {', '.join(map(str, flags.write(fitted, args)))}")
    if args.json:
        print(json.dumps(finite(fitted.to_json())))
    return DONE


def predict(args: argparse.Namespace) -> int:
    """Forecast a run from a fit, and register the forecast if asked to."""
    from parallel3d.scaling.report_page import show_forecast

    console = terminal.console(args.json)
    prediction, stored, path = flags.predict(args)
    show_forecast(prediction, stored, console)
    if path is not None:
        console.print(f"registered in {path}")
    if args.json:
        print(json.dumps(prediction.model_dump()))
    return DONE


def coordcheck(args: argparse.Namespace) -> int:
    """Train a config at several widths and print the slopes; return 1 if one is not flat."""
    config = coordinates.prepare(args)
    # Imported late, so that a wrong config is reported before torch and DeepSpeed are loaded.
    from parallel3d.verify.coordinate_check import check_coordinates

    console = terminal.console(args.json)
    check = check_coordinates(
        config, widths=args.widths, seeds=args.seeds, steps=args.steps, say=console.print
    )
    coordinates.report(check, args, console)
    return DONE if check.passed else FAILED


def critical_batch(args: argparse.Namespace) -> int:
    """Train forks of a run with several batches; return 1 if one failed and 3 if stopped."""
    from parallel3d.scaling.ladder.critical_batch import measure

    code, result = measure(args, terminal.console(args.json))
    if args.json and result:
        print(json.dumps(finite(asdict(result))))
    return code


def parse_args() -> argparse.Namespace:
    """Read the command line of `scale`."""
    parser = Parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, add, words in (
        ("plan", flags.add_plan, "print the runs of a ladder and their costs"),
        ("run", flags.add_run, "train the unfinished runs of a ladder"),
        ("fit", flags.add_fit, "fit a law to runs"),
        ("predict", flags.add_predict, "forecast a run from a fit"),
        ("critical-batch", flags.add_critical_batch, "find the largest useful batch of a run"),
        ("coordcheck", coordinates.add, "check that activations do not depend on the width"),
    ):
        add(commands.add_parser(name, help=words, description=words))
    args, overrides = parser.parse_known_args()
    args.overrides = overrides
    if overrides and args.command != "coordcheck":
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    return args


if __name__ == "__main__":
    sys.exit(main())
