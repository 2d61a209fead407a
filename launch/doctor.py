"""Check the hosts of a launch before a run: `torchrun --nproc_per_node 4 launch/doctor.py`.

Start it as the run will be started (deepspeed, torchrun, srun, plain python). Compares versions,
devices, clocks, folders, limits, free memory and disk of all ranks, and times the links of each
axis's group. The outlier is named with a remedy, and the exit code is 1.
"""

import argparse
from dataclasses import asdict
from typing import NoReturn

from parallel3d.base import terminal
from parallel3d.base.arguments import DONE, FAILED, Parser
from parallel3d.config import RunConfig
from parallel3d.mesh.launch import Launch
from parallel3d.train.claim import resolve_config
from parallel3d.train.ending import end_with, join, meet_at_the_end


def main() -> NoReturn:
    """Run the command `doctor`, and exit with its code: 1 if a check fails."""
    parser = Parser(
        __doc__, "Every setting of the config is also an option: --mesh.tp 8, --run.directory runs"
    )
    parser.add_argument(
        "--config",
        default="ds.json",
        metavar="FILE",
        help="the run's config: its mesh and its folders (default: ds.json)",
    )
    parser.add_json()
    args, overrides = parser.parse_known_args()
    end_with(lambda end, _: doctor(args, overrides, end.launch))


def doctor(args: argparse.Namespace, overrides: list[str], launch: Launch) -> int:
    """Check all ranks and print the table on rank 0; return the exit code."""
    config = resolve_config(RunConfig.from_json(args.config, overrides), launch)
    mesh = join(config, launch)
    mesh.set_timeouts(60.0)
    from parallel3d.extras.doctor.checks import check  # it loads torch

    checks = check(config, mesh)
    passed = not any(row.remedy for row in checks)
    if mesh.rank == 0:
        console = terminal.console(args.json)
        console.print(f"mesh {config.mesh.sizes.label}")
        width = max(len(row.name) for row in checks)
        for row in checks:
            line = f"{row.name:<{width}}  {'FAILS' if row.remedy else 'ok':<5}  {row.value}"
            terminal.say(console, line, indent=" " * (width + 9))
        for row in checks:
            if row.remedy:
                terminal.say(console, f"{row.name}: {row.remedy}", indent="    ")
        if args.json:
            rows = [asdict(row) for row in checks]
            terminal.print_json({"passed": passed, "mesh": str(config.mesh.sizes), "checks": rows})
    meet_at_the_end(mesh)
    return DONE if passed else FAILED


if __name__ == "__main__":
    main()
