"""Decides from the sentries' reports whether the run is over and who is at fault (floor 0)."""

from dataclasses import dataclass, field
from typing import NamedTuple

# states of a process
RUNS = "runs"
STOPPED = "stopped"
TRACED = "traced"
GONE = "gone"
LONGEST_LOOK = 2.0  # seconds; a longer pause between two looks is not counted
_NOTICED = 3.0  # seconds until all others have reported that they wait as well
# exit codes: completed, failed, asked to stop
DONE = 0
FAILED = 1
ASKED = 3


class Limits(NamedTuple):
    """Seconds after which a silent, stopped or waiting rank counts as a fault."""

    stopped: float = 20.0
    """A rank is stopped (SIGSTOP) while others run."""
    silent: float = 20.0
    """A machine is silent."""
    store: float = 3.0
    """The store of the process group is gone, and no rank has ended."""
    left: float = 10.0
    """A rank has ended with an error that all ranks should share, and others have not ended."""


class Report(NamedTuple):
    """A sentry's report of its rank."""

    host: str
    state: str
    doing: str
    since: float
    """By the reporter's clock: comparable only with its other reports."""
    waits: bool
    limit: float
    """Seconds that the rank may wait for another; 0 means no limit."""
    left: int | None = None
    """The exit code of a rank that ends by itself; None while it runs."""
    reason: str = ""
    """Why this rank ends, if the other ranks cannot know it."""
    device: str = ""
    """The action in which its device is, if that runs beside the host; "" if it has ended all."""
    device_since: float = 0.0
    """When the device was first seen there, by the reporter's clock."""
    computes: bool = False
    """True if the device waits for no other pipeline stage there."""


class Finding(NamedTuple):
    """Why the run is over, which rank is at fault, and the exit code of the run."""

    text: str = ""
    """Empty while the run goes on."""
    blamed: int | None = None
    code: int = FAILED


@dataclass
class _Rank:
    """A rank's last report, and its seconds in each condition while the arbiter ran."""

    report: Report
    lost: bool = False
    """True if its sentry is gone."""
    silent: float = 0.0
    stopped: float = 0.0
    same: float = 0.0
    """Seconds at the same action."""
    waited: float = 0.0
    """Seconds since it said that it waits."""
    gone: float = 0.0
    stands: float = 0.0
    """Seconds of its device at the same action."""

    @property
    def is_dead(self) -> bool:
        return self.report.state == GONE or self.lost

    @property
    def runs(self) -> bool:
        return self.report.state in (RUNS, TRACED) and self.report.left is None and not self.lost


@dataclass
class Arbiter:
    """Receives the reports of every sentry and finds what ends the run.

    Times are summed between two looks, at most two seconds each, so that nobody is blamed after the
    machine slept.
    """

    limits: Limits
    store: str = ""
    """The address of the process group's store."""
    ranks: dict[int, _Rank] = field(default_factory=dict)
    news: bool = False
    """True if something happened since the last check that may end the run at once."""
    _looked: float | None = None
    _store_gone: float | None = None

    def hear(self, rank: int, report: Report) -> None:
        """Record a sentry's report."""
        known = self.ranks.setdefault(rank, _Rank(report))
        old = known.report
        if (report.state, report.left, report.reason) != (old.state, old.left, old.reason):
            self.news = True
        if report.since != old.since:
            known.same = 0.0
        if report.device_since != old.device_since:
            known.stands = 0.0
        if report.state != STOPPED:
            known.stopped = 0.0
        known.report = report
        known.silent = 0.0
        known.lost = False

    def lose(self, rank: int) -> None:
        """Record that a rank's sentry is gone; unless the rank had ended, it is lost with it."""
        if self.ranks[rank].report.state != GONE:
            self.ranks[rank].lost = self.news = True

    def lose_store(self) -> None:
        """Record that the process group's store does not answer."""
        self._store_gone = self._store_gone or 0.0

    def check(self, now: float) -> Finding:
        """Return why the run is over, with an empty text if it is not; `now` is monotonic."""
        passed = min(now - self._looked, LONGEST_LOOK) if self._looked is not None else 0.0
        self._looked = now
        self.news = False
        running = [rank for rank, r in self.ranks.items() if r.runs]
        # While a rank is in a debugger, the others wait for it, and none counts as late.
        is_held = any(r.report.state == TRACED and r.runs for r in self.ranks.values())
        for r in self.ranks.values():
            r.silent += passed
            if not is_held:
                r.same += passed
                r.stands = r.stands + passed if r.report.device else 0.0
            r.waited = r.waited + passed if r.report.waits else 0.0
            if r.is_dead:
                r.gone += passed
            if not running:
                r.stopped = 0.0  # all ranks are stopped, so none waits
            elif r.report.state == STOPPED:
                r.stopped += passed
        if self._store_gone is not None:
            self._store_gone += passed
        if not running:
            return Finding()
        ranks = sorted(self.ranks.items())
        # A launcher asks all ranks to stop when one has died or failed, so the cause comes first.
        causes = (
            self._dead,
            self._failed,
            self._asked,
            self._stopped,
            self._silent,
            self._left,
        )
        for find in causes:
            for rank, r in ranks:
                if text := find(r):
                    code = ASKED if r.report.left == ASKED else FAILED
                    return Finding(f"rank {rank} on {r.report.host} {text}", rank, code)
        if store := self._without_store():
            return Finding(store)
        return self._late()

    def speakers(self, blamed: int | None) -> set[int]:
        """Return the first rank of each machine that can still print a message."""
        first: dict[str, int] = {}
        for rank, r in sorted(self.ranks.items()):
            if r.runs and rank != blamed:
                first.setdefault(r.report.host, rank)
        return set(first.values())

    def _dead(self, r: _Rank) -> str:
        if r.report.left is None and r.is_dead:
            sentry = ", and its sentry with it" if r.lost else ""
            return f"died {_at(r)}: killed, or crashed{sentry}{self._first_to_stand_still()}"
        return ""

    def _failed(self, r: _Rank) -> str:
        if not r.report.reason or r.report.left == ASKED:
            return ""
        return f"failed {_at(r)}: {r.report.reason}{self._first_to_stand_still()}"

    def _asked(self, r: _Rank) -> str:
        return r.report.reason if r.report.left == ASKED else ""

    def _stopped(self, r: _Rank) -> str:
        if r.stopped < self.limits.stopped:
            return ""
        return f"has been stopped (SIGSTOP) for {r.stopped:.0f} s {_at(r)}"

    def _silent(self, r: _Rank) -> str:
        if r.silent < self.limits.silent or not r.runs:
            return ""
        silent = f"has been silent for {r.silent:.0f} s {_at(r)}"
        return f"{silent}: its machine or its network is down"

    def _late(self) -> Finding:
        """Blame the rank that stands still without waiting, else the one that waits longest.

        Where devices run beside their hosts, these wait behind them, and the devices tell.
        """
        standing = [r for r in self.ranks.values() if r.runs and 0 < r.report.limit < r.stands]
        if standing:
            return self._late_device(standing[0].report.limit)
        if any(r.report.device for r in self.ranks.values() if r.runs):
            return Finding()  # they move
        waiting = [
            rank
            for rank, w in self.ranks.items()
            if w.report.waits and 0 < w.report.limit < w.same and w.runs
        ]
        limit = self.ranks[waiting[0]].report.limit if waiting else 0.0
        is_known = any(self.ranks[rank].waited > min(limit, _NOTICED) for rank in waiting)
        slowest = self._slowest() if is_known else None
        if slowest is None:
            return Finding()
        r = self.ranks[slowest]
        others = [rank for rank in sorted(waiting) if rank != slowest]
        who = f"; {_ranks(others)} waited" if others else ""
        late = f"is late: {_at(r)} for {r.same:.0f} s{who} ({limit:.0f} s are allowed)"
        return Finding(f"rank {slowest} on {r.report.host} {late}", slowest)

    def _late_device(self, limit: float) -> Finding:
        """Blame a host that is behind its device, else the device that stands in a compute.

        If no device computes, or several that wait for each other inside one, the link may be.
        """
        still = {n: r for n, r in sorted(self.ranks.items()) if r.runs and r.stands > limit / 2}
        for number, r in sorted(self.ranks.items()):
            is_ahead = r.report.waits or r.report.device
            if r.runs and not is_ahead and r.same > limit / 2:
                text = f"is late: {_at(r)} for {r.same:.0f} s, and its device has nothing to do"
                return Finding(f"rank {number} on {r.report.host} {text}", number)
        computing = {number: r for number, r in still.items() if r.report.computes}
        named = computing or still
        first = next(iter(named.values()))
        where = f'at "{first.report.device}" for {first.stands:.0f} s ({limit:.0f} s are allowed)'
        if len(computing) == 1:
            number = next(iter(computing))
            others = [n for n in still if n != number]
            who = f"; the devices of {_ranks(others)} wait" if others else ""
            text = f"is late: its device stands {where}{who}"
            return Finding(f"rank {number} on {first.report.host} {text}", number)
        guilty = "one of them, or the link between them" if computing else "the link between them"
        return Finding(f"the devices of {_ranks([*named])} stand {where}: {guilty} is to blame")

    def _left(self, r: _Rank) -> str:
        code = r.report.left
        if code in (None, DONE, ASKED) or r.gone < self.limits.left:
            return ""
        return f"ended with exit code {code} {_at(r)}, and others have not"

    def _without_store(self) -> str:
        ended = any(r.report.left is not None for r in self.ranks.values())
        if ended or self._store_gone is None or self._store_gone < self.limits.store:
            return ""
        return f"the store of the process group at {self.store} is gone: its host process died"

    def _slowest(self) -> int | None:
        """Return the rank that has done the same thing longest; waiting ranks only if all wait."""
        ranks = self.ranks
        alive = [n for n, r in ranks.items() if r.report.left is None and not r.is_dead]
        # A host whose device stands may be held up in a launch.
        working = [n for n in alive if not (ranks[n].report.waits or ranks[n].report.device)]
        return max(working or alive, key=lambda n: ranks[n].same, default=None)

    def _first_to_stand_still(self) -> str:
        """Return a note on the rank that one which ended may have waited for."""
        slowest = self._slowest()
        if slowest is None or not 0 < self.ranks[slowest].report.limit < self.ranks[slowest].same:
            return ""
        r = self.ranks[slowest]
        return f"; rank {slowest} on {r.report.host} has stood still for {r.same:.0f} s {_at(r)}"


def _at(r: _Rank) -> str:
    return f'at "{r.report.doing}"'


def _ranks(numbers: list[int]) -> str:
    """Return ranks as text, at most eight of them."""
    shown = ", ".join(map(str, numbers[:8]))
    if len(numbers) > 8:
        shown += ", ..."
    return f"ranks {shown}" if len(numbers) > 1 else f"rank {shown}"
