"""Train for the time at hand, without a config: `parallel3d quick --minutes 20`.

Measures the machine, chooses model, batch, learning rate and mesh of a run that ends then, prints
why, writes its config, and starts its ranks. Give --minutes, --params or --tokens, or two of them.
"""

import argparse
import os
import shlex
import sys

from parallel3d.base.arguments import Parser, amount, prints_errors_as
from parallel3d.base.errors import ConfigError
from parallel3d.config import RunConfig, help_text
from parallel3d.mesh.launch import Launch
from parallel3d.train.ending import say

WISHES = {
    "--minutes": "end after about N minutes on this machine",
    "--params": "train the largest model of up to N parameters, such as 5M",
    "--tokens": "train on N tokens, such as 100M",
}


@prints_errors_as("quick")
def main() -> int:
    """Choose a run, and become the launcher of its ranks; return 2 for bad input."""
    args, overrides = parse_args()
    world_size = Launch.from_environment().world_size
    if world_size > 1:
        raise ConfigError(
            f"WORLD_SIZE = {world_size}: the command starts the ranks of its run by itself; start "
            "`parallel3d quick` without a launcher"
        )
    from parallel3d.data.sources import write_stories
    from parallel3d.extras.calibrate.dial import Wishes, dial  # it loads torch

    if args.data:
        overrides = ["--data.source=text", f"--data.paths={write_stories()}", *overrides]
    base = RunConfig.from_json("ds.json", overrides)
    path, ranks = dial(base, Wishes(args.minutes, args.params, args.tokens), say)
    # The pace was measured with these threads; torchrun would set 1.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    words = ["-m", "parallel3d", "train", "--config", str(path)]
    if ranks > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        words = [*launcher, *words]
    if args.json:
        words.append("--json")
    words += overrides  # the user's settings come last and win
    say(f"to resume the run: {shlex.join(['python', *words])}")
    os.execv(sys.executable, [sys.executable, *words])


def is_meant_by(words: list[str]) -> bool:
    """Return True if arguments of `train` choose a run, as they could before; print the command."""
    flags = {word.partition("=")[0] for word in words}
    texts = " ".join(words)
    has_block = "--data {" in texts or "--data={" in texts  # the setting parallel3d.data as a whole
    if flags.isdisjoint(WISHES if has_block else [*WISHES, "--data"]):
        return False
    command = shlex.join(["parallel3d", "quick", *words])
    say(f"choosing a run is a command of its own, which runs now: {command}")
    return True


def parse_args() -> tuple[argparse.Namespace, list[str]]:
    """Return the options of `quick`, and the rest of the command line: settings by their path."""
    parser = Parser(__doc__, help_text)
    for flag, text in WISHES.items():
        parser.add_argument(flag, type=amount, metavar="N", help=text)
    parser.add_argument(
        "--data",
        choices=("stories",),
        help="train on prose, the King James Bible of Debian's bible-kjv",
    )
    parser.add_json()
    args, overrides = parser.parse_known_args()
    wishes = [flag for flag in WISHES if getattr(args, flag.removeprefix("--")) is not None]
    if not wishes:
        parser.error("--minutes: is missing; add it, or --params 5M or --tokens 100M")
    if len(wishes) == len(WISHES):
        parser.error(f"{', '.join(WISHES)}: one follows from the others; remove one")
    for word in overrides:
        flag = word.partition("=")[0]
        if flag in ("--config", "--dry-run"):
            parser.error(f"{wishes[0]}: cannot be combined with {flag}; use one of the two")
    return args, overrides


if __name__ == "__main__":
    sys.exit(main())
