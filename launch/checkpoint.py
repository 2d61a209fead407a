"""Inspect, verify or average checkpoints: `parallel3d checkpoint inspect PATH`, `verify PATH`.

PATH is a checkpoint (a folder step-N) or a run's folder. If there are several checkpoints, inspect
shows the newest, and verify reads all of them. Nothing is changed. Without --json, inspect leaves
out the config and the lists of parameters and files. `average RUN --last 5 --to OUT` writes the
mean of the weights of several checkpoints to a folder for transformers, and checks it.
"""

import argparse
import json
import sys
import time
from pathlib import Path

from rich.console import Console

from parallel3d.base import terminal
from parallel3d.base.arguments import (
    DONE,
    FAILED,
    Parser,
    amount,
    path_of,
    prints_errors_as,
    whole_number,
)
from parallel3d.launch import convert

LONG = ("config", "parameters", "files")  # parts of a description that only --json has


@prints_errors_as("checkpoint")
def main() -> int:
    """Run the command `checkpoint`; return 1 if a checkpoint is damaged, 2 if there is none."""
    args = parse_args()
    console = terminal.console(args.json)
    if args.command == "average":
        return average(args, console)
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
        terminal.print_json(description)
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
        terminal.print_json({"ok": not bad, "bad": bad, "left_over": left_over})
    return FAILED if bad else DONE


def average(args: argparse.Namespace, console: Console) -> int:
    """Write the mean of checkpoints' weights to a new folder; return the exit code."""
    from parallel3d.data.prepare_progress import shown_progress
    from parallel3d.huggingface import averages, conversion
    from parallel3d.huggingface.weight_files import DTYPES, WeightFiles, bytes_of

    conversion.check_new(args.to)
    size = bytes_of(args.shard_size)
    folders = averages.choose(args.path, args.last, args.steps)
    weights = averages.weights_for(folders, args.weights)
    conversion.quiet()
    with shown_progress() as progress:
        source = averages.AveragedCheckpoints(folders, weights)
        files = WeightFiles(source.config.model, DTYPES[args.dtype], size)
        proof = conversion.export(source, source.about(), files, args.to, progress)
    convert.say(proof, f"in {args.dtype}, from {len(folders)} checkpoints", args, console)
    return DONE if proof.ok else FAILED


def parse_args() -> argparse.Namespace:
    """Return the options of `checkpoint`."""
    parser = Parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, help_text in (
        ("inspect", "print the contents of a checkpoint (of a run's newest one)"),
        ("verify", "read every byte and compare with the manifest (all checkpoints of a run)"),
    ):
        command = commands.add_parser(name, help=help_text, description=help_text)
        command.add_argument(
            "path", type=path_of, help="folder of a checkpoint (step-N) or of a run"
        )
        command.add_json()
        if name == "inspect":
            command.add_argument(
                "--show-config", action="store_true", help="print the config of the run"
            )
    help_text = "write the mean of several checkpoints' weights for transformers, and check it"
    add_average(commands.add_parser("average", help=help_text, description=help_text))
    return parser.parse_args()


def add_average(command: Parser) -> None:
    """Add the options of `average`."""
    add = command.add_argument
    add("path", type=path_of, metavar="RUN", help="the folder of a run")
    chosen = command.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--last", type=whole_number(), metavar="N", help="the N newest checkpoints")
    text = "the checkpoints of these steps"
    number = whole_number(0)
    chosen.add_argument("--steps", type=number, nargs="+", default=(), metavar="STEP", help=text)
    text = "the weight of each, the oldest or first named first (default: equal)"
    add("--weights", type=amount, nargs="+", metavar="X", help=text)
    text = "type of the weights (default: fp32)"
    add("--dtype", choices=convert.DTYPES, default="fp32", help=text)
    convert.add_outputs(command)


if __name__ == "__main__":
    sys.exit(main())
