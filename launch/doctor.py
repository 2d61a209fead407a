"""Check the hosts of a launch before a run: `torchrun --nproc_per_node 4 launch/doctor.py`.

Start it as the run will be started (deepspeed, torchrun, srun, plain python). Compares versions,
devices, clocks, folders, limits, free memory and disk of all ranks, and times the links of each
axis's group. The outlier is named with a remedy, and the exit code is 1.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, NoReturn

from rich.console import Console
from rich.text import Text

from parallel3d.base import terminal
from parallel3d.base.arguments import DONE, FAILED, Parser
from parallel3d.config import RunConfig
from parallel3d.mesh.launch import Launch
from parallel3d.mesh.pulse import rank as pulse
from parallel3d.train.claim import resolve_config
from parallel3d.train.stopping import end_with, join, meet_at_the_end

if TYPE_CHECKING:  # it loads torch, which is slow; an invalid config is refused before
    from parallel3d.doctor.checks import Check

_PATIENCE = 60.0  # seconds that ranks wait for each other


def main() -> NoReturn:
    """Run the command `doctor`, and exit with its code: 1 if a check fails."""
    args, overrides = parse_args()
    end_with(lambda end, _: doctor(args, overrides, end.launch))


def doctor(args: argparse.Namespace, overrides: list[str], launch: Launch) -> int:
    """Check all ranks and print the table on rank 0; return the exit code."""
    config = resolve_config(RunConfig.from_json(args.config, overrides), launch)
    mesh = join(config, launch)
    mesh.set_timeouts(_PATIENCE)
    from parallel3d.calibrate.measure_device import Effort
    from parallel3d.doctor import checks, facts, links
    from parallel3d.mesh.nodes import find_nodes
    from parallel3d.train.known_hardware import described_hardware

    nodes, hardware = find_nodes(mesh), described_hardware(config, mesh.device)
    pulse.doing("comparing hosts")
    states = facts.gather_facts(config, mesh)
    pulse.doing("measuring links")
    effort = Effort(seconds=0.5, copied_bytes=2**22 if mesh.device.type == "cpu" else 2**26)
    timed = list(links.measure(mesh, nodes, effort))
    rows = list(checks.judge(config, states, timed, nodes, hardware))
    passed = not any(row.remedy for row in rows)
    if mesh.rank == 0:
        show(rows, f"mesh {config.mesh.sizes.label}", terminal.console(args.json))
        if args.json:
            checked = [asdict(row) for row in rows]
            mesh_sizes = str(config.mesh.sizes)
            print(json.dumps({"passed": passed, "mesh": mesh_sizes, "checks": checked}))
    meet_at_the_end(mesh)
    return DONE if passed else FAILED


def show(rows: Sequence["Check"], title: str, console: Console) -> None:
    """Print a row per check, and the remedy of each that fails."""
    console.print(title)
    columns = [
        terminal.Column("check", right=False),
        terminal.Column("", right=False),
        terminal.Column("measured", right=False, wraps=True),
    ]
    marks = {True: Text("FAILS", "bold red"), False: Text("ok", "green")}
    terminal.show(console, columns, [(r.name, marks[bool(r.remedy)], r.value) for r in rows])
    for row in rows:
        if row.remedy:
            terminal.say(console, f"{row.name}: {row.where}: {row.remedy}", indent="    ")


def parse_args() -> tuple[argparse.Namespace, list[str]]:
    """Return the options of `doctor`, and the rest of the command line: settings by path."""
    parser = Parser(
        __doc__, "Every setting of the config is also an option: --mesh.tp 8, --run.directory runs"
    )
    parser.add_argument(
        "--config", default="ds.json", metavar="FILE",
        help="the run's config: its mesh and its folders (default: ds.json)",
    )  # fmt: skip
    parser.add_json()
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # deepspeed's launcher appends it
    return parser.parse_known_args()


if __name__ == "__main__":
    main()
