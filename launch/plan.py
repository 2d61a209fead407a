"""Predict the memory and speed of a run, and find its best mesh.

`parallel3d plan --config gpt3-175b.json --hardware a100-80gb --devices 1024` prints a ranked
table of meshes. --calibrate measures this machine, for --hardware this-machine.
"""

import argparse
import sys

from parallel3d.base import terminal
from parallel3d.base.arguments import DONE, FAILED, Parser, path_of, prints_errors_as, whole_number
from parallel3d.base.errors import ConfigError
from parallel3d.config import RunConfig, hardware
from parallel3d.plan.report import explain_run, plan_rows, plan_table


@prints_errors_as("plan")
def main() -> int:
    """Run `plan`. Return 0, or 1 if nothing fits; bad input exits with 2."""
    args, overrides = parse_args()
    console = terminal.console(args.json)
    if args.calibrate:
        from parallel3d.extras.calibrate.describe import calibrate  # it loads torch

        measured = calibrate(console.print)
        if args.json:
            print(measured.model_dump_json())
        return DONE
    if args.explain_run:
        explained, planned = plan_rows.compare_run(args.explain_run, args.hardware)
        explain_run.show(explained, planned, console)
        if args.json:
            terminal.print_json(explained.to_json())
        return DONE
    if args.from_run and not args.config:
        args.config = str(args.from_run / "config.json")
    if not args.config:
        raise ConfigError("--config: is missing; set a config file, or the name of one in configs/")
    config = RunConfig.from_json(args.config, overrides)
    machine = plan_rows.hardware_of(config, args.hardware)
    if args.from_run:
        machine = plan_rows.corrected(machine, args.from_run, console)
    devices = args.devices if args.devices is not None else plan_rows.devices_of(config, machine)
    request = plan_rows.make_request(config, machine, devices, args.fix)
    ranking = plan_rows.rank_plans(request, args.rows)
    if args.explain:
        plan_rows.explain(ranking, args.explain, args.svg, args.trace, console)
    else:
        plan_table.show(ranking, request, console)
    if args.json:
        terminal.print_json(plan_rows.to_json(ranking, request))
    return DONE if ranking.plans else FAILED


def parse_args() -> tuple[argparse.Namespace, list[str]]:
    """Parse the command line of `plan`. Return its options and the overrides of the config."""
    parser = Parser(
        __doc__, "Every config value can be overridden by its path: --train_batch_size 512."
    )
    if "--validate" in sys.argv:
        remedy = "run `python -m benchmarks.published FILE` in a checkout"
        parser.error(f"--validate: was removed; {remedy}")
    parser.add_config(required=False)
    add = parser.add_argument
    text = f"{hardware.THIS_MACHINE}, {', '.join(hardware.names())}, or a hardware file's path"
    add("--hardware", metavar="NAME", help=text)
    text = "number of devices (default: those of the config's mesh, else of one node)"
    add("--devices", type=whole_number(most=plan_rows.MOST_DEVICES), metavar="N", help=text)
    text = f"rows to show (default: {plan_rows.ROWS} that fit, and faster ones that do not)"
    add("--rows", type=whole_number(), metavar="N", help=text)
    text = plan_rows.FIX
    add("--fix", nargs="+", action="extend", default=[], metavar="NAME=VALUE", help=text)
    add("--explain", type=whole_number(), metavar="N", help="show row N in detail")
    text = "compare a measured step of a run with its plan (needs wall_clock_breakdown)"
    add("--explain-run", type=path_of, metavar="RUN", help=text)
    text = "correct the plan by a measured step of a run (needs wall_clock_breakdown)"
    add("--from-run", type=path_of, metavar="RUN", help=text)
    parser.add_pictures("the timeline of --explain's row")
    add("--calibrate", action="store_true", help="measure this machine")
    parser.add_json()
    args, overrides = parser.parse_known_args()
    for flag, picture in (("--svg", args.svg), ("--trace", args.trace)):
        if picture and not args.explain:
            parser.error(f"{flag} = {picture}: needs a row to draw; add --explain 1")
    return args, overrides


if __name__ == "__main__":
    sys.exit(main())
