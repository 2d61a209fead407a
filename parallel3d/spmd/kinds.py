"""What the ranks of a tensor-parallel group hold of one value (floor 4).

The vocabulary of GSPMD and DTensor (arXiv:2105.04663): each rank's tensor is a part of one value,
that which a group of one rank would compute.
"""

from dataclasses import dataclass
from typing import Literal


class Mismatch(Exception):
    """The error that an operator gives what no group of one rank would; says why."""


class NoRule(Exception):
    """The error that no rule is known for an operator on operands of these kinds."""


class PerRank(tuple[int, ...]):
    """A number of the program that differs between the ranks that were traced."""


@dataclass(frozen=True)
class Mark:
    """A place between the elements of a dim: before the last of its factors, runs x rest.

    A dim that is cut there holds `runs` pieces, one of each of as many equal runs of the whole:
    query, key and value side by side are three.
    """

    dim: int
    runs: int = 1


class Kind:
    """What the ranks hold of a value; `str` says it in a message."""


@dataclass(frozen=True)
class Replicated(Kind):
    """A value that is the same on each rank; a cut at the place `free`, if any, is no cut."""

    free: Mark | None = None

    def __str__(self) -> str:
        return "replicated"


@dataclass(frozen=True)
class Zero(Kind):
    """Zeros, which may be taken for any kind."""

    def __str__(self) -> str:
        return "zero"


@dataclass(frozen=True)
class Partial(Kind):
    """A rank's part of a sum over the ranks, or of a maximum.

    `masked`: it is zero but for the ids that are this rank's.
    """

    op: Literal["sum", "max"] = "sum"
    masked: bool = False

    def __str__(self) -> str:
        return f"partial (a {self.op} over the ranks is due)"


@dataclass(frozen=True)
class Cut(Kind):
    """A value of which each rank holds its part of a dim."""

    mark: Mark

    def __str__(self) -> str:
        runs = f" in {self.mark.runs} runs" if self.mark.runs > 1 else ""
        return f"cut along dim {self.mark.dim}{runs}"


@dataclass(frozen=True)
class Gathered(Kind):
    """All ranks' parts on each rank, the ranks' dim not yet moved to its place, `home`."""

    ranks: Mark
    home: Mark

    def __str__(self) -> str:
        return "gathered parts that are not yet put in order"


@dataclass(frozen=True)
class Random(Kind):
    """Numbers that each rank has drawn for itself."""

    def __str__(self) -> str:
        return "random, and another on each rank"


@dataclass(frozen=True)
class Bounds(Kind):
    """Where ids lie: "below" the rank's first, "above" its last, "outside" or "inside" of both."""

    side: Literal["below", "above", "outside", "inside"]
    first: tuple[int, ...] = ()
    stop: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"a mask of the ids {self.side} the rank's own"


@dataclass(frozen=True)
class LocalIds(Kind):
    """Ids counted from the rank's first; `bounded`: those of other ranks are made 0."""

    first: tuple[int, ...]
    bounded: bool = False

    def __str__(self) -> str:
        return "ids counted from the rank's first" + ("" if self.bounded else ", out of bounds")


@dataclass(frozen=True)
class Picked(Kind):
    """Rows that local ids picked from a cut table: wrong where an id is another rank's."""

    first: tuple[int, ...]

    def __str__(self) -> str:
        return "rows that are wrong where an id is another rank's (a mask is due)"


@dataclass(frozen=True)
class Shifted(Kind):
    """The value `of` less each rank's own maximum, or (`exp`) its exponential, or sums of that."""

    of: Kind
    exp: bool = False

    def __str__(self) -> str:
        return f"{self.of}, and counted from each rank's own maximum"


@dataclass(frozen=True)
class Shift(Kind):
    """A rank's own maximum less the maximum of all, or (`exp`) its exponential."""

    exp: bool = False

    def __str__(self) -> str:
        return "the distance of each rank's own maximum from that of all"


@dataclass(frozen=True)
class Piece(Kind):
    """Elements [start, stop) of each rank's part of a cut dim, of use only there."""

    of: Cut
    start: int
    stop: int

    def __str__(self) -> str:
        return f"elements {self.start} to {self.stop} of each rank's part of a value {self.of}"


@dataclass(frozen=True)
class Empty(Kind):
    """Memory that nobody has written."""

    def __str__(self) -> str:
        return "not yet written"


@dataclass(frozen=True)
class Unknown(Kind):
    """The kind behind a mismatch, or an operator without a rule, of which no more is said."""

    def __str__(self) -> str:
        return "unknown"


REPLICATED, ZERO, PARTIAL, UNKNOWN, EMPTY = Replicated(), Zero(), Partial(), Unknown(), Empty()
MASKED = Partial(masked=True)


def cut(dim: int, runs: int = 1) -> Cut:
    """The kind of what is cut along a dim."""
    return Cut(Mark(dim, runs))
