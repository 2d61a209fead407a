"""Command-line flags that several commands share, and one form of message for a wrong one."""

import argparse
import os
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn

from parallel3d.base.counts import read_count, read_number
from parallel3d.base.errors import Parallel3DError, TrainingError
from parallel3d.base.masking import mask
from parallel3d.base.paths import expand_path

# exit codes; scripts rely on them
DONE = 0
FAILED = 1
BAD_INPUT = 2
STOPPED = 3
_MOST = 10**9  # the largest number that a flag accepts by default

_OF_ARGPARSE = (
    (r"argument (\S+?): expected .*", r"\1: has no value; write \1 VALUE"),
    (r"argument (\S+?): ignored explicit argument (.*)", r"\1 = \2: takes no value; write \1"),
    (r"the following arguments are required: (.*)", r"\1: is missing; add it"),
    (r"unrecognized arguments: (.*)", r"\1: unknown argument; see --help"),
    (r"argument (\S+?): invalid choice: (.*) \(choose from (.*)\)", r"\1 = \2: use one of \3"),
    (
        r"argument (\S+?): not allowed with argument (\S+)",
        r"\1: cannot be combined with \2; use one of them",
    ),
    (r"argument ([^:]+): (.*)", r"\1\2"),
)


class Parser(argparse.ArgumentParser):
    """An argument parser without abbreviations that prints its help texts unwrapped.

    Errors are one line: command, flag, rule and remedy.
    """

    def __init__(
        self,
        description: str | None = None,
        epilog: str | Callable[[], str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            description=_fitted(description or "") or None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            **options,
        )
        self._end_of_help = epilog
        # The launchers of DeepSpeed and of torch add it, each in its spelling.
        self.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)

    def format_help(self) -> str:
        """Return the help; a long list of settings at its end is made only where it is shown."""
        self.epilog = self._end_of_help() if callable(self._end_of_help) else self._end_of_help
        return super().format_help()

    def parse_known_args(  # type: ignore[override]  # its overloads are for other namespaces
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse as argparse does, with DeepSpeed's own names of `--config`."""
        words = []
        for word in sys.argv[1:] if args is None else args:
            name, equals, value = word.partition("=")
            # argparse takes an unknown option with a space for the value of the option before it.
            is_taken = word.startswith("--") and equals and " " in value and value[:2] != "--"
            words += [name, value] if is_taken else [word]
        if "--config" in self._option_string_actions:
            words = _with_config(words)
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        """Print flag, rule and remedy without the usage, and exit with code 2."""
        for pattern, wording in _OF_ARGPARSE:
            if re.fullmatch(pattern, message, re.DOTALL):
                message = re.sub(pattern, wording, message, flags=re.DOTALL)
                break
        name, *command = self.prog.split()
        print(f"{' '.join([name.removesuffix('.py'), *command])}: {mask(message)}", file=sys.stderr)
        sys.exit(BAD_INPUT)

    def add_config(self, required: bool = True) -> None:
        """Add `--config FILE`, the training config."""
        self.add_argument(
            "--config",
            required=required,
            action=_Once,
            metavar="FILE",
            help="path of a config file, or a name in configs/ (also --deepspeed_config FILE)",
        )

    def add_json(self) -> None:
        """Add `--json`, which prints the result as one JSON object."""
        self.add_argument(
            "--json",
            action="store_true",
            help="print one JSON object on standard output, everything else on standard error",
        )

    def add_pictures(self, of: str) -> None:
        """Add `--svg FILE` and `--trace FILE`, which draw the timeline that `of` names."""
        self.add_argument("--svg", type=output_file, metavar="FILE", help=f"draw {of} as SVG")
        self.add_argument(
            "--trace", type=output_file, metavar="FILE", help="write a trace for Perfetto"
        )


class _Once(argparse.Action):
    """Stores a value; another one by the same or another name of the option is an error."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        before = getattr(namespace, self.dest)
        if before not in (None, values):
            parser.error(f"{option_string}: names {before} and {values}; keep one of them")
        setattr(namespace, self.dest, values)


def _with_config(words: Sequence[str]) -> list[str]:
    """Return the words with `--config` for `--deepspeed_config FILE` and `--deepspeed FILE`.

    Scripts for DeepSpeed take `--deepspeed` alone, too, as the switch that turns it on.
    """
    result = []
    for word, following in zip(words, [*words, "--"][1:], strict=True):
        name, equals, value = word.partition("=")
        is_switch = name == "--deepspeed" and not equals and following.startswith("-")
        if is_switch:
            continue
        if name in ("--deepspeed", "--deepspeed_config"):
            word = f"--config{equals}{value}"
        result.append(word)
    return result


def _fitted(text: str) -> str:
    """Return a text whose lines fit into 79 columns, without broken words; indents stay.

    A paragraph that is too wide is filled anew. Lines that fit, or are indented, stay as they are.
    """
    return "\n\n".join(_fitted_paragraph(paragraph) for paragraph in text.split("\n\n"))


def _fitted_paragraph(paragraph: str) -> str:
    lines = paragraph.splitlines()
    # A command that is too long is copied more easily in one line.
    if all(len(line) < 80 or line.startswith(" ") for line in lines):
        return paragraph
    if not any(line.startswith((" ", "- ")) for line in lines):
        lines = [" ".join(lines)]
    wrapper = textwrap.TextWrapper(79, break_on_hyphens=False, break_long_words=False)
    return "\n".join(wrapper.fill(line) for line in lines)


def prints_errors_as(command: str) -> Callable[[Callable[[], int]], Callable[[], int]]:
    """Decorate a `main` so that it prints errors as "<command>: <error>" and returns a code.

    The code is FAILED for a TrainingError, BAD_INPUT for other errors that a user can cause.
    """

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
    """Return an argparse type that reads a whole number from `least` to `most`."""

    def read(text: str) -> int:
        number: int | None
        try:
            number = int(read_count(text))
        except ValueError:
            number = most + 1 if text.isdecimal() else None  # thousands of digits
        if number is None:
            rule = "must be a whole number"
            remedy = f"use {least} or more"
        elif number > most:
            rule = "is too large"
            remedy = f"use {most:,} or less"
        elif number < least:
            rule = "is too small"
            remedy = f"use {least} or more"
        else:
            return number
        raise argparse.ArgumentTypeError(f" = {text}: {rule}; {remedy}")

    return read


def amount(text: str) -> float:
    """Read a number above 0, such as 20, 0.5, 5M, 1e24 or 1.2B."""
    try:
        number = float(read_number(text))
    except (ValueError, OverflowError):
        number = 0.0
    if number <= 0:
        rule = "must be a number above 0"
        remedy = "write one such as 20, 500k, 1.2B or 1e24"
        raise argparse.ArgumentTypeError(f" = {text}: {rule}; {remedy}")
    return number


def path_of(text: str) -> Path:
    """Return a path with ~ and environment variables replaced, as the paths of a config.

    A shell leaves the ~ of --to=~/out as it is.
    """
    try:
        return Path(expand_path(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f' = "{text}": {error}') from None


def output_file(text: str) -> Path:
    """Return the path of a file to write; raise ArgumentTypeError if its folder does not exist.

    The check comes before any work is done.
    """
    path = path_of(text)
    if not text or os.path.isdir(text):  # False for invalid names; Path.is_dir would raise
        rule = "is a folder"
        remedy = "name a file in it"
    elif not os.path.isdir(path.parent):
        rule = f"the folder {str(path.parent)!r} does not exist"
        remedy = "create it"
    else:
        return path
    raise argparse.ArgumentTypeError(f' = "{text}": {rule}; {remedy}')
