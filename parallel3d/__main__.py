"""The program `parallel3d`: `parallel3d train` runs `launch/train.py`, and so on for each command.

`python -m parallel3d`, `torchrun -m parallel3d` and `deepspeed --module parallel3d` do the same.
"""

import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import version

import parallel3d
from parallel3d.base.arguments import BAD_INPUT

COMMANDS = {
    "train": "train a model",
    "plan": "predict memory and speed, and find the best mesh, before a run",
    "verify": "compare small runs of a config with plain transformers on the CPU",
    "draw": "draw a pipeline schedule, or a measured step",
    "prepare": "tokenise the corpus of a config",
    "checkpoint": "inspect and verify checkpoints",
    "convert": "convert weights to and from transformers",
    "generate": "generate text with a trained model",
    "evaluate": "evaluate a checkpoint on held-out text and validation sets",
    "report": "write a page with the curves of runs",
    "runs": "compare two runs",
    "replay": "train a step of a run again, and name what differs",
    "doctor": "check the hosts of a launch: versions, links, clocks, folders, limits",
    "scale": "plan, run and fit scaling ladders",
    "quick": "choose a run for the time at hand, and train it",
}


def main() -> int:
    """Run the command that the first word names; return its exit code, 2 if it is unknown."""
    words = sys.argv[1:]
    # deepspeed's launcher puts its own flag before the user's arguments.
    launchers = [word for word in words[:1] if word.startswith("--local_rank=")]
    command, *rest = words[len(launchers) :] or ["--help"]
    if command in ("-h", "--help"):
        print(_help())
        return 0
    if command == "--version":
        print("\n".join(_versions()))
        return 0
    if command not in COMMANDS:
        known = ", ".join(COMMANDS)
        print(f"parallel3d: unknown command {command}; use one of {known}", file=sys.stderr)
        return BAD_INPUT
    # The name of the command in its help and its messages.
    sys.argv = [f"parallel3d {command}", *rest, *launchers]
    code: int = import_module(f"parallel3d.launch.{command}").main()
    return code


def _versions() -> Iterator[str]:
    """Yield the versions that a report of a fault needs."""
    yield f"parallel3d {parallel3d.__version__}"
    import torch  # it takes seconds

    yield f"torch {torch.__version__}"
    yield f"DeepSpeed {version('deepspeed')}"
    yield f"CUDA {torch.version.cuda or 'none (torch is built without it)'}"


def _help() -> str:
    width = max(map(len, COMMANDS))
    rows = (f"  {name:<{width}}  {text}" for name, text in COMMANDS.items())
    usages = ("parallel3d COMMAND --help", "parallel3d --version")
    return "\n".join(("usage: parallel3d COMMAND ...", "", *rows, "", *usages))


if __name__ == "__main__":
    sys.exit(main())
