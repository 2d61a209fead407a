"""The program `parallel3d`: `parallel3d train` runs `launch/train.py`, and so on for each command.

`python -m parallel3d`, `torchrun -m parallel3d` and `deepspeed --module parallel3d` do the same.
"""

import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import version

import parallel3d
from parallel3d.base.arguments import BAD_INPUT

# In the order of the help: what training needs, then what a run may want (parallel3d/extras).
CORE = {
    "train": "train a model",
    "prepare": "tokenise the corpus of a config",
    "plan": "predict memory and speed, and find the best mesh, before a run",
    "draw": "draw a pipeline schedule, or a measured step",
    "verify": "compare small runs of a config with plain transformers on the CPU",
    "checkpoint": "inspect, verify and average checkpoints",
    "convert": "convert weights to and from transformers",
    "evaluate": "evaluate a checkpoint on held-out text and validation sets",
    "generate": "generate text with a trained model",
    "runs": "name the first step and parameter in which two runs differ",
}
EXTRAS = {
    "quick": "train without a config, for the time at hand",
    "report": "write a page with the curves of runs",
    "scale": "plan, run and fit scaling ladders",
    "doctor": "check the hosts of a launch: versions, links, clocks, folders",
    "replay": "train a step of a run again, and name what differs",
}
COMMANDS = CORE | EXTRAS


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
    """Return the screen of `parallel3d --help`."""
    lines = ["usage: parallel3d COMMAND ..."]
    width = max(map(len, COMMANDS))
    for heading, commands in (("Commands", CORE), ("Extras, which training does not need", EXTRAS)):
        lines += ["", f"{heading}:"]
        for name, text in commands.items():
            lines.append(f"  {name:<{width}}  {text}")
    lines += ["", "parallel3d COMMAND --help   the flags of a command, and an example"]
    lines.append("parallel3d --version        versions of parallel3d, torch, DeepSpeed and CUDA")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
