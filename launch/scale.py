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
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from rich.console import Console

from parallel3d.base import terminal
from parallel3d.base.arguments import DONE, FAILED, Parser, prints_errors_as
from parallel3d.extras.scaling import coordinates, flags, report_page
from parallel3d.extras.scaling.ladder import critical_batch, design, runner, slurm
from parallel3d.extras.scaling.ladder.plan import ladder_of, show, to_json

Outcome = tuple[int, Any]
"""The exit code, and the object that --json prints; None for nothing."""


@prints_errors_as("scale")
def main() -> int:
    """Run the command `scale` and return its exit code; it is 2 for wrong input."""
    args = parse_args()
    run_command: Callable[[argparse.Namespace, Console], Outcome] = args.run_command
    code, result = run_command(args, terminal.console(args.json))
    if args.json and result is not None:
        terminal.print_json(result)
    return code


def plan(args: argparse.Namespace, out: Console) -> Outcome:
    """Print the runs of a ladder with their sizes and costs, and design it first if asked to."""
    if args.ladder and not args.design:
        ladder = ladder_of(args.ladder)
        show(ladder, out)
        return DONE, to_json(ladder)
    facts = design.design(args, out)
    ladder = ladder_of(str(args.out))
    show(ladder, out)
    return DONE, to_json(ladder) | {"design": facts}


def run(args: argparse.Namespace, out: Console) -> Outcome:
    """Train the unfinished runs of a ladder; return 1 if one failed and 3 if they were stopped."""
    if args.emit:
        code = DONE
        ladder = ladder_of(args.ladder)
        files = slurm.write(ladder)
        out.print(f"wrote {', '.join(map(str, files))}; submit with {files[-1]}")
    else:
        code, ladder = runner.execute(lambda: ladder_of(args.ladder), args.parallel, out)
    show(ladder, out)
    return code, to_json(ladder)


def fit(args: argparse.Namespace, out: Console) -> Outcome:
    """Fit a law, print it, and write fit.json and the report."""
    fitted = flags.fit(args)
    report_page.show_fit(fitted, out)
    out.print(f"wrote {', '.join(map(str, flags.write(fitted, args)))}")
    return DONE, fitted.to_json()


def predict(args: argparse.Namespace, out: Console) -> Outcome:
    """Forecast a run from a fit, and register the forecast if asked to."""
    prediction, stored, path = flags.predict(args)
    report_page.show_forecast(prediction, stored, out)
    if path is not None:
        out.print(f"registered in {path}")
    return DONE, prediction.model_dump()


def coordcheck(args: argparse.Namespace, out: Console) -> Outcome:
    """Train a config at several widths and print the slopes; return 1 if one is not flat."""
    config = coordinates.prepare(args)
    # Imported late, so that a wrong config is reported before torch and DeepSpeed are loaded.
    from parallel3d.extras.scaling.on_ranks.coordinate_check import check_coordinates

    check = check_coordinates(
        config, widths=args.widths, seeds=args.seeds, steps=args.steps, say=out.print
    )
    coordinates.report(check, args, out)
    return (DONE if check.passed else FAILED), check.to_json()


def measure_critical_batch(args: argparse.Namespace, out: Console) -> Outcome:
    """Train forks of a run with several batches; return 1 if one failed and 3 if stopped."""
    code, result = critical_batch.measure(args, out)
    return code, result and asdict(result)


def parse_args() -> argparse.Namespace:
    """Read the command line of `scale`; `run_command` is the function of its command."""
    parser = Parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(
        name: str,
        command: Callable[[argparse.Namespace, Console], Outcome],
        add_flags: Callable[[Parser], None],
        text: str,
    ) -> None:
        subparser = commands.add_parser(name, help=text, description=text)
        add_flags(subparser)
        subparser.add_json()
        subparser.set_defaults(run_command=command)

    add("plan", plan, flags.add_plan, "print the runs of a ladder and their costs")
    add("run", run, flags.add_run, "train the unfinished runs of a ladder")
    add("fit", fit, flags.add_fit, "fit a law to runs")
    add("predict", predict, flags.add_predict, "forecast a run from a fit")
    text = "find the largest useful batch of a run"
    add("critical-batch", measure_critical_batch, flags.add_critical_batch, text)
    text = "check that activations do not depend on the width"
    add("coordcheck", coordcheck, coordinates.add, text)
    args, overrides = parser.parse_known_args()
    args.overrides = overrides
    if overrides and args.command != "coordcheck":
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    return args


if __name__ == "__main__":
    sys.exit(main())
