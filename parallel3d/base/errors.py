"""The errors that a user can cause; each message gives place, value, rule and remedy."""

from parallel3d.base.masking import mask


class Parallel3DError(ValueError):
    """What the user's input broke; commands print it without a traceback and exit with code 2."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(mask(arg) if isinstance(arg, str) else arg for arg in args))


class ConfigError(Parallel3DError):
    """A setting that cannot be used: what it is, the rule it breaks, and what to write instead."""


class DataError(Parallel3DError):
    """A corpus or tokenizer that cannot be used."""


class CheckpointError(Parallel3DError):
    """A checkpoint that cannot be used: the file, what is wrong with it, and what to do."""


class ScheduleError(Parallel3DError):
    """A pipeline program that breaks a rule; the message prints the programs, the action marked."""


class TrainingError(RuntimeError):
    """A run that cannot go on (a non-finite loss, a lost rank); commands exit with code 1."""


class RankError(RuntimeError):
    """What one rank met alone, such as a file that shrank; commands exit with code 1."""


def packed(error: Exception) -> str:
    """One of parallel3d's errors as text, for another process to raise; "" for any other error."""
    kinds = (kind.__name__ for kind in type(error).__mro__ if kind.__module__ == __name__)
    kind = next(kinds, "")
    return f"{kind} {error}" if kind else ""


def unpacked(text: str) -> Exception:
    """The error that `packed` made text of."""
    kind, _, message = text.partition(" ")
    error: Exception = globals()[kind](message)
    return error
