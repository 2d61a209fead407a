"""Look into checkpoints: `parallel3d checkpoint inspect PATH`, or `verify PATH`.

PATH is a checkpoint's folder, step-N, or that of a run: of several checkpoints, inspect shows the
newest, and verify reads all. Nothing is changed.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.filesize import decimal

from parallel3d.base import terminal
from parallel3d.base.arguments import DONE, FAILED, Parser, named

SHOWN_FROM = 2**28  # bytes of a checkpoint whose checking shows its progress


@named("checkpoint")
def main() -> int:
    """Run the command `checkpoint`: 0, 1 where something is damaged, 2 without a checkpoint."""
    args = parse_args()
    console = terminal.console(args.json)
    if args.command == "verify":
        return verify_all(args.path, args.json, console)
    return inspect(args, console)


def inspect(args: argparse.Namespace, console: Console) -> int:
    """Print what is in a checkpoint, or in the newest of a run."""
    from parallel3d.checkpoint import describe

    found = describe.describe(describe.find_checkpoints(args.path)[0])
    if args.show_config:
        print(json.dumps(found["config"], indent=2))
    elif args.json:
        print(json.dumps(found))
    else:
        describe.show(found, console)
    return DONE


def verify_all(path: Path, as_json: bool, console: Console) -> int:
    """Read every checkpoint that the path means to its end, and say of each whether it holds."""
    from parallel3d.checkpoint.describe import find_checkpoints, find_left_over

    bad: list[dict[str, Any]] = []
    for folder in find_checkpoints(path):
        wrong, said = verify_one(folder)
        bad += [{"file": f"{folder.absolute().name}/{f}", "reason": reason} for f, reason in wrong]
        console.print(_row(folder.absolute().name, f"{'DAMAGED' if wrong else 'ok':<10}{said}"))
        for file, reason in wrong:
            console.print(_row("", f"{file}: {reason}"))
    rest = find_left_over(path)
    for folder, why in rest:
        console.print(_row(folder.name, why))
    if as_json:
        left_over = [{"folder": folder.name, "reason": why} for folder, why in rest]
        print(json.dumps({"ok": not bad, "bad": bad, "left_over": left_over}))
    return FAILED if bad else DONE


def _row(name: str, text: str) -> str:
    return f"{name:<22}{text}"


def verify_one(folder: Path) -> tuple[list[Any], str]:
    """The faults of a checkpoint, and how much was read in what time."""
    from parallel3d.checkpoint.manifest import verify
    from parallel3d.data.prepare_progress import shown_progress

    total = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    done, start = 0, time.perf_counter()
    with shown_progress() as show:

        def progress(count: int) -> None:
            nonlocal done
            done += count
            if total >= SHOWN_FROM:
                show(f"{folder.absolute().name}, MiB", done >> 20, total >> 20)

        wrong = verify(folder, progress)
    return wrong, f"{decimal(done)} read in {time.perf_counter() - start:.1f} s"


def parse_args() -> argparse.Namespace:
    """Read the command line of `checkpoint`."""
    parser = Parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, help_text in (
        ("inspect", "print what is in a checkpoint; of several the newest"),
        ("verify", "read every byte and compare it with the manifest; of several all"),
    ):
        command = commands.add_parser(name, help=help_text, description=help_text)
        command.add_argument("path", type=Path, help="a folder step-N, or a run's folder")
        command.add_json()
        if name == "inspect":
            shown = command.add_argument(
                "--show-config", action="store_true", help="print the config of the run"
            )
            command.add_alias(shown, "--config")  # elsewhere the file that trains
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
