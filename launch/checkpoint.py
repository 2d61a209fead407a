"""Inspect or verify checkpoints: `parallel3d checkpoint inspect PATH`, or `verify PATH`.

PATH is a checkpoint (a folder step-N) or a run's folder. If there are several checkpoints, inspect
shows the newest, and verify reads all of them. Nothing is changed. Without --json, inspect leaves
out the config and the lists of parameters and files.
"""

import argparse
import json
import sys
import time
from pathlib import Path

from rich.console import Console

from parallel3d.base import terminal
from parallel3d.base.arguments import DONE, FAILED, Parser, prints_errors_as

LONG = ("config", "parameters", "files")  # parts of a description that only --json has


@prints_errors_as("checkpoint")
def main() -> int:
    """Run the command `checkpoint`; return 1 if a checkpoint is damaged, 2 if there is none."""
    args = parse_args()
    console = terminal.console(args.json)
    if args.command == "verify":
        return verify_all(args.path, args.json, console)
    return inspect(args, console)


def inspect(args: argparse.Namespace, console: Console) -> int:
    """Print the contents of a checkpoint, or of the newest of a run; return the exit code."""
    from parallel3d.checkpoint import describe

    description = describe.describe(describe.find_checkpoints(args.path)[0])
    if args.show_config:
        print(json.dumps(description["config"], indent=2))
    elif args.json:
        print(json.dumps(description))
    else:
        for name, value in description.items():
            if name not in LONG:
                terminal.say(console, f"{name.replace('_', ' '):<16} {_words(value)}", " " * 17)
    return DONE


def _words(value: object) -> str:
    """Return a value of a description as text for people."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_words(inner)}" for name, inner in value.items())
    if value is None:
        return "none"
    return f"{value:,}" if isinstance(value, int) else str(value)


def verify_all(path: Path, as_json: bool, console: Console) -> int:
    """Read every checkpoint at `path` and print whether it is intact; return the exit code."""
    from parallel3d.checkpoint.describe import find_checkpoints, find_leftovers
    from parallel3d.checkpoint.manifest import verify

    bad: list[dict[str, str]] = []
    for folder in find_checkpoints(path):
        start = time.perf_counter()
        wrong = verify(folder)
        bad += [{"file": f"{folder.absolute().name}/{f}", "reason": reason} for f, reason in wrong]
        verdict = "DAMAGED" if wrong else "ok"
        console.print(
            f"{folder.absolute().name:<22}{verdict:<10}read in {time.perf_counter() - start:.1f} s"
        )
        for file, reason in wrong:
            console.print(f"{'':<22}{file}: {reason}")
    rest = find_leftovers(path)
    for folder, why in rest:
        console.print(f"{folder.name:<22}{why}")
    if as_json:
        left_over = [{"folder": folder.name, "reason": why} for folder, why in rest]
        print(json.dumps({"ok": not bad, "bad": bad, "left_over": left_over}))
    return FAILED if bad else DONE


def parse_args() -> argparse.Namespace:
    """Return the options of `checkpoint`."""
    parser = Parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, help_text in (
        ("inspect", "print the contents of a checkpoint (of a run's newest one)"),
        ("verify", "read every byte and compare with the manifest (all checkpoints of a run)"),
    ):
        command = commands.add_parser(name, help=help_text, description=help_text)
        command.add_argument("path", type=Path, help="folder of a checkpoint (step-N) or of a run")
        command.add_json()
        if name == "inspect":
            command.add_argument(
                "--show-config", action="store_true", help="print the config of the run"
            )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
