"""The flags that several commands have, in one vocabulary, and one message for a wrong one."""

import argparse
import os
import re
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn

from parallel3d.base.errors import Parallel3DError, TrainingError
from parallel3d.base.masking import mask

DONE, FAILED, BAD_INPUT, STOPPED = 0, 1, 2, 3  # exit codes; scripts rely on them
_MOST = 10**9  # no flag counts further

_OF_ARGPARSE = (
    (r"argument (\S+?): expected .*", r"\1: has no value; write \1 VALUE"),
    (r"argument (\S+?): ignored explicit argument (.*)", r"\1 = \2: takes no value; write \1"),
    (r"the following arguments are required: (.*)", r"\1: is missing; add it"),
    (r"unrecognized arguments: (.*)", r"\1: is no argument; see --help"),
    (r"argument (\S+?): invalid choice: (.*) \(choose from (.*)\)", r"\1 = \2: use one of \3"),
    (r"argument (\S+?): not allowed with argument (\S+)", r"\1: not with \2; take one of them"),
    (r"argument ([^:]+): (.*)", r"\1\2"),
)


class Parser(argparse.ArgumentParser):
    """A command line: no abbreviations, its help as it is written, and one message for an error."""

    def __init__(
        self, description: str | None = None, epilog: str | None = None, **options: Any
    ) -> None:
        super().__init__(
            description=description, epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options,
        )  # fmt: skip

    def error(self, message: str) -> NoReturn:
        """End with the exit code 2 and the place, the rule and the remedy, without the usage."""
        message = re.sub(r"^argument (--[\w-]+)(/--[\w-]+)+", r"argument \1", message)
        for pattern, said in _OF_ARGPARSE:
            if re.fullmatch(pattern, message, re.DOTALL):
                message = re.sub(pattern, said, message, flags=re.DOTALL)
                break
        name, *command = self.prog.split()
        print(f"{' '.join([name.removesuffix('.py'), *command])}: {mask(message)}", file=sys.stderr)
        sys.exit(BAD_INPUT)

    def add_alias(self, action: argparse.Action, *flags: str) -> None:
        """Add other spellings of a flag, which the help leaves out."""
        kind: dict[str, Any] = {"type": action.type}
        if action.nargs == 0:
            kind = {"action": "store_true"}
        hidden = argparse.SUPPRESS
        self.add_argument(*flags, dest=action.dest, default=hidden, help=hidden, **kind)

    def add_config(self, required: bool = True) -> None:
        """Add `--config FILE`: the file that trains."""
        self.add_argument(
            "--config",
            required=required,
            metavar="FILE",
            help="a config file, or a name in configs/",
        )

    def add_json(self) -> None:
        """Add `--json`: the result as one object of JSON, for scripts."""
        self.add_argument(
            "--json", action="store_true",
            help="print one JSON object on standard output, all else on standard error",
        )  # fmt: skip

    def add_pictures(self, of: str) -> None:
        """Add `--svg FILE` and `--trace FILE`: drawings of a timeline, `of` which the help says."""
        self.add_argument("--svg", type=output_file, metavar="FILE", help=f"draw {of} to this file")
        self.add_argument(
            "--trace", type=output_file, metavar="FILE", help="write its trace for Perfetto to it"
        )


def named(command: str) -> Callable[[Callable[[], int]], Callable[[], int]]:
    """Have a `main` print an error as "<command>: <error>", and return the exit code for it."""

    def decorate(main: Callable[[], int]) -> Callable[[], int]:
        @wraps(main)
        def run() -> int:
            try:
                return main()
            except (Parallel3DError, TrainingError, OSError) as error:
                print(f"{command}: {mask(str(error))}", file=sys.stderr)
                return FAILED if isinstance(error, TrainingError) else BAD_INPUT

        return run

    return decorate


def whole_number(least: int = 1, most: int = _MOST) -> Callable[[str], int]:
    """Read a whole number from `least` to `most`."""

    def read(text: str) -> int:
        if not re.fullmatch(r"[+-]?\d+", text, re.ASCII):
            rule, remedy = "must be a whole number", f"use {least} or more"
        elif len(text) > 30 or int(text) > most:
            text = text if len(text) <= 30 else f"{text[:26]} ..."
            rule, remedy = "is too many", f"use {most:,} or less"
        elif int(text) < least:
            rule, remedy = "is too few", f"use {least} or more"
        else:
            return int(text)
        raise argparse.ArgumentTypeError(f" = {text}: {rule}; {remedy}")

    return read


def output_file(text: str) -> Path:
    """Read the path of a file to write; refuses what cannot be written before any work is done."""
    path = Path(text)
    try:
        folder = path.parent
        if not text or path.is_dir():
            rule, remedy = "is a folder", "name a file in it"
        elif not folder.is_dir():
            rule, remedy = f"there is no folder {str(folder)!r}", "make it, or name another one"
        elif not os.access(path if path.exists() else folder, os.W_OK):
            rule, remedy = "must not be written", "name another file"
        elif "\0" in text:
            rule, remedy = "holds a NUL", "name another file"
        else:
            return path
    except (OSError, ValueError) as error:
        rule = (error.strerror if isinstance(error, OSError) else None) or str(error)
        remedy = "name another file"
    shown = text if len(text) <= 80 else f"{text[:76]} ..."
    raise argparse.ArgumentTypeError(f' = "{shown}": {rule}; {remedy}')
