"""Errors that a user can cause. Each message names the place, the value, the rule and a remedy."""

import errno

from parallel3d.base.masking import mask


class Parallel3DError(ValueError):
    """Invalid input; commands print the message without a traceback and exit with code 2."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(mask(arg) if isinstance(arg, str) else arg for arg in args))


class ConfigError(Parallel3DError):
    """A setting that cannot be used: its path and value, the rule it breaks, and a remedy."""


class UnknownFigure(ConfigError):
    """A figure that the planner needs and a hardware's description lacks."""


class DataError(Parallel3DError):
    """A corpus or tokenizer that cannot be used."""


class CheckpointError(Parallel3DError):
    """A checkpoint that cannot be used: the file, what is wrong with it, and what to do."""


class ScheduleError(Parallel3DError):
    """A pipeline program that breaks a rule; the message prints the programs, the action marked."""


class TrainingError(RuntimeError):
    """A run that cannot go on (a non-finite loss, a lost rank); commands exit with code 1."""


class RankError(RuntimeError):
    """An error of a single rank, such as a file that shrank; commands exit with code 1."""


def remedy_of(error: OSError, otherwise: str) -> str:
    """Return what helps against an error of writing: room, rights, or `otherwise`."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some space"
    if error.errno in (errno.EACCES, errno.EPERM):
        return "give this user the right to write there"
    return otherwise


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none.

    A line that ends with a colon has the next one with it.
    """
    line, *others = (str(error).strip() or type(error).__name__).splitlines()
    if line.endswith(":") and others:
        line = f"{line} {others[0].strip()}"
    # Python's advice to programmers, about numbers of thousands of digits.
    return line.partition("; use sys.set_int_max_str_digits")[0]


def pack_error(error: Exception) -> str:
    """Return one of this module's errors as text for another process; "" for any other error."""
    kinds = (kind.__name__ for kind in type(error).__mro__ if kind.__module__ == __name__)
    return next((f"{kind} {error}" for kind in kinds), "")


def unpack_error(text: str) -> Exception:
    """Return the error that `pack_error` turned into text."""
    kind, _, message = text.partition(" ")
    error: Exception = globals()[kind](message)
    return error
