"""The judge: finds in sentries' reports that the run is over, and whose fault it is (floor 0)."""

from dataclasses import dataclass, field
from typing import NamedTuple

RUNS, STOPPED, TRACED, GONE = "runs", "stopped", "traced", "gone"  # what a process is
LONGEST_LOOK = 2.0  # seconds: more between two looks, and this machine slept or the judge did
DONE, FAILED, ASKED = 0, 1, 3  # exit codes: of a run that is done, fails, was asked to stop


class Limits(NamedTuple):
    """Seconds after which silence, a stop or a wait of a rank is a fault."""

    stopped: float = 20.0
    """A rank is stopped (SIGSTOP), while others run."""
    silent: float = 20.0
    """A machine is silent."""
    store: float = 3.0
    """The store of the process group is gone, and no rank has ended well."""
    left: float = 10.0
    """A rank has ended with an error that should be that of all, and others have not."""


class Report(NamedTuple):
    """A sentry's report of its rank."""

    host: str
    state: str
    doing: str
    since: float
    """The reporter's clock: to be compared with its other reports only."""
    waits: bool
    limit: float
    """Seconds that the rank may wait for another; 0: for ever."""
    left: int | None = None
    """The exit code of a rank that ends by itself."""
    reason: str = ""
    """Why this rank ends, where the others cannot know it."""


class Finding(NamedTuple):
    """Why the run is over, which rank is to blame, and the exit code of the run."""

    text: str = ""
    """Empty while the run goes on."""
    blamed: int | None = None
    code: int = FAILED


@dataclass
class _Rank:
    report: Report
    lost: bool = False  # nobody is left to report
    # Seconds for which it has been so, as far as the judge was awake.
    silent: float = 0.0
    stopped: float = 0.0
    same: float = 0.0  # doing the same
    gone: float = 0.0

    @property
    def is_dead(self) -> bool:
        return self.report.state == GONE or self.lost

    @property
    def runs(self) -> bool:
        return self.report.state in (RUNS, TRACED) and self.report.left is None and not self.lost


@dataclass
class Judge:
    """The judge of one run: hears every sentry, and finds what ends the run.

    Times are summed from look to look, each by two seconds at most: after a sleep it accuses
    nobody.
    """

    limits: Limits
    store: str = ""
    """The address of the process group's store."""
    ranks: dict[int, _Rank] = field(default_factory=dict)
    news: bool = False
    """Whether something has happened since the last verdict that may change it at once."""
    _looked: float | None = None
    _store_gone: float | None = None

    def hear(self, rank: int, report: Report) -> None:
        """Take a sentry's report."""
        known = self.ranks.setdefault(rank, _Rank(report))
        new, old = report, known.report
        self.news |= (new.state, new.left, new.reason) != (old.state, old.left, old.reason)
        if report.since != known.report.since:
            known.same = 0.0
        if report.state != STOPPED:
            known.stopped = 0.0
        known.report, known.silent, known.lost = report, 0.0, False

    def lose(self, rank: int) -> None:
        """Note that a rank's sentry is gone; the rank had reported its end, or is lost with it."""
        if self.ranks[rank].report.state != GONE:
            self.ranks[rank].lost = self.news = True

    def lose_store(self) -> None:
        """Note that the process group's store does not answer."""
        self._store_gone = self._store_gone or 0.0

    def verdict(self, now: float) -> Finding:
        """Return why the run is over, if it is; `now` is a monotonic clock's."""
        passed = min(now - self._looked, LONGEST_LOOK) if self._looked is not None else 0.0
        self._looked, self.news = now, False
        running = [rank for rank, r in self.ranks.items() if r.runs]
        # A person looks at one of them, and the others wait for it: nobody is late meanwhile.
        is_held = any(r.report.state == TRACED and r.runs for r in self.ranks.values())
        for r in self.ranks.values():
            r.silent += passed
            r.same += passed * (not is_held)
            r.gone += passed * r.is_dead
            # Where everything is stopped, nobody waits.
            r.stopped = r.stopped + passed * (r.report.state == STOPPED) if running else 0.0
        if self._store_gone is not None:
            self._store_gone += passed
        if not running:
            return Finding()
        ranks = sorted(self.ranks.items())
        # A launcher asks all to stop when one has died or failed: what came first is the reason.
        first = self._dead, self._failed, self._asked
        for find in (*first, self._stopped, self._silent, self._left):
            for rank, r in ranks:
                if text := find(r):
                    code = ASKED if r.report.left == ASKED else FAILED
                    return Finding(f"rank {rank} on {r.report.host} {text}", rank, code)
        if store := self._without_store():
            return Finding(store)
        return self._late()

    def speakers(self, blamed: int | None) -> set[int]:
        """The first rank of each machine that can still say something."""
        first: dict[str, int] = {}
        for rank, r in sorted(self.ranks.items()):
            if r.runs and rank != blamed:
                first.setdefault(r.report.host, rank)
        return set(first.values())

    def _dead(self, r: _Rank) -> str:
        if r.report.left is None and r.is_dead:
            whole = ", and its sentry with it" if r.lost else ""
            return f"died {_at(r)}: killed, or crashed{whole}{self._first_to_stand_still()}"
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
        """Blame the one that stands still without waiting, else the one that waits longest."""
        waiting = [
            rank
            for rank, w in self.ranks.items()
            if w.report.waits and 0 < w.report.limit < w.same and w.runs
        ]
        slowest = self._slowest() if waiting else None
        if slowest is None:
            return Finding()
        r, limit = self.ranks[slowest], self.ranks[waiting[0]].report.limit
        others = [rank for rank in sorted(waiting) if rank != slowest]
        who = f"; {_ranks(others)} waited" if others else ""
        late = f"is late: {_at(r)} for {r.same:.0f} s{who} ({limit:.0f} s are allowed)"
        return Finding(f"rank {slowest} on {r.report.host} {late}", slowest)

    def _left(self, r: _Rank) -> str:
        code = r.report.left
        if code in (None, DONE, ASKED) or r.gone < self.limits.left:
            return ""
        return f"ended with exit code {code} {_at(r)}, and others have not"

    def _without_store(self) -> str:
        ended = any(r.report.left is not None for r in self.ranks.values())
        if ended or self._store_gone is None or self._store_gone < self.limits.store:
            return ""
        return f"the store of the process group at {self.store} is gone: its keeper died"

    def _slowest(self) -> int | None:
        """The rank that has done the same for longest, of those that do not wait if any."""
        ranks = self.ranks
        alive = [n for n, r in ranks.items() if r.report.left is None and not r.is_dead]
        working = [n for n in alive if not ranks[n].report.waits]
        return max(working or alive, key=lambda n: ranks[n].same, default=None)

    def _first_to_stand_still(self) -> str:
        """Name the rank for which one that ended may have waited too long."""
        slowest = self._slowest()
        if slowest is None or not 0 < self.ranks[slowest].report.limit < self.ranks[slowest].same:
            return ""
        r = self.ranks[slowest]
        return f"; rank {slowest} on {r.report.host} has stood still for {r.same:.0f} s {_at(r)}"


def _at(r: _Rank) -> str:
    return f'at "{r.report.doing}"'


def _ranks(numbers: list[int]) -> str:
    """Names at most eight."""
    shown = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    return f"rank{'s'[: len(numbers) > 1]} {shown}"
