"""The program `parallel3d`: `parallel3d train` is `launch/train.py`, and so on for each command.

`python -m parallel3d`, `torchrun -m parallel3d` and `deepspeed --module parallel3d` start the same.
"""

import sys
from importlib import import_module

import parallel3d
from parallel3d.base.arguments import BAD_INPUT

COMMANDS = {
    "train": "train a model",
    "plan": "memory, speed and the best mesh of a run, before it is started",
    "verify": "prove a config on this machine's CPU",
    "draw": "show a pipeline schedule, or a measured step",
    "prepare": "tokenise the corpus of a config",
    "checkpoint": "look into checkpoints, and check them",
    "convert": "to and from folders of transformers",
    "generate": "have a trained model write on",
    "evaluate": "losses of a checkpoint",
    "scale": "plan, run and fit ladders of runs",
}


def main() -> int:
    """Run the command that the first word names; gives its exit code, 2 for a word that is none."""
    words = sys.argv[1:]
    # deepspeed's launcher puts its own flag before all that the user wrote.
    launchers = [word for word in words[:1] if word.startswith("--local_rank=")]
    command, *rest = words[len(launchers) :] or ["--help"]
    if command in ("-h", "--help"):
        print(_help())
        return 0
    if command == "--version":
        print(f"parallel3d {parallel3d.__version__}")
        return 0
    if command not in COMMANDS:
        known = ", ".join(COMMANDS)
        print(f"parallel3d: {command} is no command; use one of {known}", file=sys.stderr)
        return BAD_INPUT
    # What the command calls itself in its help and its messages.
    sys.argv = [f"parallel3d {command}", *rest, *launchers]
    code: int = import_module(f"parallel3d.launch.{command}").main()
    return code


def _help() -> str:
    width = max(map(len, COMMANDS))
    rows = (f"  {name:<{width}}  {text}" for name, text in COMMANDS.items())
    return "\n".join(("usage: parallel3d COMMAND ...", "", *rows, "", "parallel3d COMMAND --help"))


if __name__ == "__main__":
    sys.exit(main())
