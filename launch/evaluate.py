"""Evaluate a checkpoint: `parallel3d evaluate runs/first`, also under deepspeed or torchrun.

PATH is a checkpoint (a folder step-N), or a run's folder for its newest checkpoint. Evaluates the
held-out text and every validation set of the run's config, or of --config.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from parallel3d.base import terminal
from parallel3d.base.arguments import DONE, STOPPED, Parser, path_of, whole_number
from parallel3d.config import help_text
from parallel3d.mesh.launch import Launch
from parallel3d.train.claim import resolve_config
from parallel3d.train.ending import StopRequest, end_with, join, meet_at_the_end

if TYPE_CHECKING:
    from rich.console import Console

    from parallel3d.config import ResolvedConfig
    from parallel3d.data.evaluation_samples import SetLoss
    from parallel3d.mesh.mesh import Mesh

ALL = 10**12  # more samples than any set has
SHOWN = ("loss", "standard_error", "tokens", "perplexity", "bits_per_byte")  # keys of a set in JSON


def main() -> NoReturn:
    """Run the command `evaluate`, and exit with its code; only rank 0 prints."""
    args, overrides = parse_args()
    end_with(lambda end, stop: evaluate(args, overrides, end.launch, stop))


def evaluate(
    args: argparse.Namespace, overrides: list[str], launch: Launch, stop: StopRequest
) -> int:
    """Evaluate the checkpoint and print the losses; return the exit code."""
    # These load torch, which is slow; invalid arguments have been refused before.
    from parallel3d.checkpoint.describe import find_checkpoints
    from parallel3d.train import evaluate_checkpoint

    checkpoint = find_checkpoints(args.path)[0]
    requested = evaluate_checkpoint.evaluation_config(
        checkpoint, launch, file=args.config, overrides=overrides, samples=args.samples
    )
    config = resolve_config(requested, launch)
    mesh = join(config, launch)
    console = terminal.console(True)
    console.quiet = mesh.rank != 0
    if args.tasks:
        return score(args, config, mesh, checkpoint, stop, console)
    losses = evaluate_checkpoint.evaluate(config, mesh, checkpoint, stop, console)
    if losses is not None and mesh.rank == 0:
        if args.json:
            terminal.print_json({"sets": {name: numbers(loss) for name, loss in losses.items()}})
        else:
            width = max(map(len, losses))
            for name, loss in losses.items():
                print(f"{name:<{width}}  {loss.in_words()}")
    meet_at_the_end(mesh)
    return STOPPED if losses is None else DONE


def score(
    args: argparse.Namespace,
    config: "ResolvedConfig",
    mesh: "Mesh",
    checkpoint: Path,
    stop: StopRequest,
    console: "Console",
) -> int:
    """Score the checkpoint on tasks and print the scores; return the exit code."""
    from parallel3d.extras.tasks.score import in_words, score_checkpoint

    scores = score_checkpoint(config, mesh, checkpoint, args.tasks, stop, console)
    if scores is not None and mesh.rank == 0:
        if args.json:
            terminal.print_json({"tasks": scores})
        else:
            print("\n".join(in_words(scores)))
    meet_at_the_end(mesh)
    return STOPPED if scores is None else DONE


def numbers(loss: "SetLoss") -> dict[str, float | None]:
    """Return the numbers of an evaluated set for `--json`; None if not known."""
    fields = loss.to_json() | {"perplexity": loss.perplexity}
    return {name: fields[name] for name in SHOWN}


def number_of_samples(text: str) -> int:
    """Return the number of samples that a text means: a whole number, or "all"."""
    return ALL if text == "all" else whole_number()(text)


def parse_args() -> tuple[argparse.Namespace, list[str]]:
    """Return the options of `evaluate`, and the rest of the command line: settings by path."""
    parser = Parser(__doc__, help_text)
    add = parser.add_argument
    add("path", type=path_of, metavar="PATH", help="folder of a run or a checkpoint")
    parser.add_config(required=False)
    text = 'samples of each set, or "all" (default: train.evaluate_samples of the config)'
    add("--samples", type=number_of_samples, metavar="N", help=text)
    text = "score on these tasks of lm_eval instead: names, or task files (docs/after-training.md)"
    add("--tasks", nargs="+", metavar="NAME_OR_FILE", help=text)
    parser.add_json()
    return parser.parse_known_args()


if __name__ == "__main__":
    main()
