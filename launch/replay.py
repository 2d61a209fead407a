"""Train a step of a run again: `parallel3d replay runs/first --step 120`, or under torchrun.

Starts from the checkpoint before the step, and says whether loss, gradient norm and digests are the
run's: in every bit on the run's own mesh, within a bound on another (--mesh). The replay stays in
RUN/replays. A second one, on any mesh, names the first stage, layer, microbatch and tensor in which
the two differ.
"""

import argparse
from typing import NoReturn

from parallel3d.base import terminal
from parallel3d.base.arguments import DONE, FAILED, Parser, path_of, whole_number
from parallel3d.base.mesh_sizes import MeshSizes
from parallel3d.mesh.launch import Launch
from parallel3d.train.claim import resolve_config
from parallel3d.train.digests import in_words
from parallel3d.train.ending import end_with, join, meet_at_the_end


def main() -> NoReturn:
    """Run the command `replay`, and exit with its code: 1 if something differs."""
    args, overrides = parse_args()
    end_with(lambda end, _: replay(args, overrides, end.launch))


def replay(args: argparse.Namespace, overrides: list[str], launch: Launch) -> int:
    """Train the step again and print what differs; return the exit code."""
    from parallel3d.extras.guard import replay as replaying  # it loads torch

    requested, checkpoint = replaying.replay_config(args.run, args.step, args.mesh, overrides)
    config = resolve_config(requested, launch)
    mesh = join(config, launch)
    console = terminal.console(True)
    console.quiet = mesh.rank != 0
    difference = replaying.replay(config, mesh, args.run, checkpoint, console)
    if mesh.rank == 0 and args.json:
        terminal.print_json(difference)
    elif mesh.rank == 0:
        rule = f"within {difference['bound']:g}" if difference["bound"] else "in every bit"
        print(*in_words(difference, rule), sep="\n")
        if first := difference["first_tensor"]:
            print(
                "differs from the replay on {replay} at first in stage {stage}, layer {layer}, "
                "microbatch {microbatch}: the {tensor} has norm {norms[0]} and {norms[1]}".format(
                    **first
                )
            )
    meet_at_the_end(mesh)
    return DONE if difference["same"] else FAILED


def mesh_sizes(text: str) -> MeshSizes:
    """Return the mesh that a text such as 2x1x4 names."""
    try:
        return MeshSizes.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f": {error}") from None


def parse_args() -> tuple[argparse.Namespace, list[str]]:
    """Return the options of `replay`, and the rest of the command line: settings by path."""
    parser = Parser(__doc__)
    add = parser.add_argument
    step = whole_number()
    add("run", type=path_of, metavar="RUN", help="folder of a run")
    add("--step", type=step, required=True, metavar="N", help="the step, counted from 1")
    add("--mesh", type=mesh_sizes, metavar="PPxDPxTP", help="another mesh than the run's")
    parser.add_json()
    return parser.parse_known_args()


if __name__ == "__main__":
    main()
