"""Evaluate a checkpoint: `parallel3d evaluate runs/first`, or under deepspeed or torchrun.

PATH is a run's folder, of which it takes the newest checkpoint, or that of a checkpoint, step-N.
Without --config it is evaluated by its own: the held-out text and every validation set.
"""

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from parallel3d.base import terminal
from parallel3d.base.arguments import DONE, STOPPED, Parser, whole_number
from parallel3d.config import help_text
from parallel3d.mesh.launch import Launch
from parallel3d.train.claim import ready
from parallel3d.train.stopping import StopRequest, end_with, join

if TYPE_CHECKING:
    from parallel3d.data.evaluation_samples import SetLoss

ALL = 10**12  # more samples than there are
SHOWN = ("loss", "standard_error", "tokens", "perplexity", "bits_per_byte")  # of each set in JSON


def main() -> NoReturn:
    """Run the command `evaluate`, and end with its exit code; the first rank alone speaks."""
    args, overrides = parse_args()
    end_with(lambda end, stop: evaluate(args, overrides, end.launch, stop))


def evaluate(
    args: argparse.Namespace, overrides: list[str], launch: Launch, stop: StopRequest
) -> int:
    """Evaluate, and print what it came to; return the exit code."""
    # They load torch, for which a wrong path does not wait.
    from parallel3d.train.checkpoint_config import checkpoint_in, evaluation_config

    checkpoint = checkpoint_in(args.path)
    asked = evaluation_config(
        checkpoint, launch, file=args.config, overrides=overrides, samples=args.samples
    )
    config = ready(asked, launch)
    from parallel3d.train.evaluate_checkpoint import evaluate as losses_of

    mesh = join(config, launch)
    console = terminal.console(True)
    console.quiet = mesh.rank != 0
    losses = losses_of(config, mesh, checkpoint, stop, console)
    if losses is not None and mesh.rank == 0:
        if args.json:
            print(json.dumps({"sets": {name: numbers(loss) for name, loss in losses.items()}}))
        else:
            width = max(map(len, losses))
            for name, loss in losses.items():
                print(f"{name:<{width}}  {loss.in_words()}")
    mesh.close()
    return STOPPED if losses is None else DONE


def numbers(loss: "SetLoss") -> dict[str, Any]:
    """The numbers of an evaluated set for `--json`; null if not finite, or not known."""
    found = loss.to_json() | {"perplexity": loss.perplexity}
    return {k: x if (x := found[k]) is not None and math.isfinite(x) else None for k in SHOWN}


def number_of_samples(text: str) -> int:
    """Read "all", or a whole number."""
    return ALL if text == "all" else whole_number()(text)


def parse_args() -> tuple[argparse.Namespace, list[str]]:
    """Read the command line of `evaluate`, and what it sets in the config."""
    parser = Parser(__doc__, f"Every value of the config can be set by its path:\n\n{help_text()}")
    parser.add_argument("path", type=Path, metavar="PATH", help="a run, or a checkpoint")
    parser.add_config(required=False)
    parser.add_argument(
        "--samples", type=number_of_samples, metavar="N",
        help="of each set, or all (train.evaluate_samples of the config)",
    )  # fmt: skip
    parser.add_json()
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # deepspeed's launcher appends it
    return parser.parse_known_args()


if __name__ == "__main__":
    main()
