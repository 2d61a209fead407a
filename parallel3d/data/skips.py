"""A record of the documents left out of a source: counts by reason, the first ones listed."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

from parallel3d.base.errors import DataError
from parallel3d.data.pieces import EMPTY, Flaw

LISTED = 20
LEAVE_OUT = 'or set data.on_error to "skip"'


class Listed(NamedTuple):
    """A flaw of the file `name`, with which `message` begins; row 0 means the whole file."""

    name: str
    row: int
    reason: str
    message: str


@dataclass
class Skips:
    """The documents left out so far: `counts` by reason, and the first LISTED of them."""

    counts: Counter[str] = field(default_factory=Counter)
    listed: list[Listed] = field(default_factory=list)

    @property
    def num_flawed(self) -> int:
        """Number of unusable documents; empty documents do not count."""
        return self.counts.total() - self.counts[EMPTY]

    def add(self, name: str, flaw: Flaw, dropped: int = 0) -> None:
        """Count a flaw, and the documents of its file that were `dropped` for it."""
        self.counts[flaw.reason] += max(flaw.num_rows, dropped)
        if flaw.reason != EMPTY and len(self.listed) < LISTED:
            self.listed.append(Listed(name, flaw.row, flaw.reason, str(flaw)))

    def join(self, other: "Skips") -> None:
        """Add the counts of another file or source."""
        self.counts.update(other.counts)
        self.listed += other.listed[: LISTED - len(self.listed)]

    def packed(self) -> str:
        """Return the record as text, in which the file has no name."""
        listed = [(x.row, x.reason, x.message.removeprefix(x.name)) for x in self.listed]
        return json.dumps([self.counts, listed])

    @classmethod
    def unpacked(cls, text: str, name: str) -> "Skips":
        """Return the record of a file called `name` from what `packed` returned."""
        counts, listed = json.loads(text)
        return cls(Counter(counts), [Listed(name, x[0], x[1], name + x[2]) for x in listed])

    def summary(self) -> dict[str, Any]:
        """Return counts by reason, and the first flaws, as a command prints them."""
        listed = [
            {"file": x.name, "line": x.row or None, "reason": x.reason, "message": x.message}
            for x in self.listed
        ]
        return {"skipped": dict(sorted(self.counts.items())), "skipped_first": listed}

    def refuse(self) -> DataError:
        """Return the error that lists the flaws."""
        messages = list(told(self.listed))
        if len(self.listed) == 1:
            return DataError(f"{messages[0]}; {LEAVE_OUT}")
        count = f"{self.num_flawed:,} documents cannot be used; mend them, {LEAVE_OUT}:"
        return DataError("\n  ".join([count, *messages]))

    def check_share(self, num_documents: int, limit: float, unseen: int = 0) -> None:
        """Raise DataError if more than `limit` of all documents are unusable.

        `unseen` is an estimate of those in unreadable files that were not counted.
        """
        flawed = self.num_flawed + unseen
        total = num_documents + flawed
        if flawed > limit * total:
            about = "about " if unseen else ""
            share = f"{about}{flawed:,} of {total:,} documents ({flawed / total:.1%})"
            rule = f"cannot be used, more than data.max_skipped = {limit} allows"
            messages = told(self.listed)
            raise DataError("\n  ".join([f"{share} {rule}; mend them, or raise it:", *messages]))


def told(listed: Iterable[Listed]) -> Iterable[str]:
    """Yield one message for each file and reason."""
    for (name, _), group in groupby(listed, lambda x: (x.name, x.reason)):
        first, *more = group
        rows = ", ".join(str(x.row) for x in more)
        if more and not first.row:
            rows = f"{len(more)} more"
        yield first.message + (f" ({name}: so are {rows})" if more else "")
