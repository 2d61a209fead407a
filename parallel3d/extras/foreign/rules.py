"""Rules that say what becomes of each setting of another framework, and the rows of the report.

A framework is one table: setting -> `Rule`. A value that needs arithmetic, such as a warm-up as a
fraction of the steps, has a name: `convert` computes our setting from it.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal, NamedTuple

Verdict = Literal["taken", "assumed", "dropped", "DIFFERS", "REFUSED", "UNKNOWN"]
"""taken: it is in our config. assumed: it is not in the file; the framework's default. dropped: it
does not change what is trained. DIFFERS: our run trains differently. REFUSED: no config can express
it. UNKNOWN: the table has no such setting, or its value cannot be read."""


class Row(NamedTuple):
    """One line of the report: a setting of the file, and what became of it."""

    verdict: Verdict
    setting: str
    value: Any
    path: str = ""
    why: str = ""

    def __str__(self) -> str:
        path = self.path and f" -> {self.path}"
        why = self.why and f": {self.why}"
        return f"{self.setting} = {json.dumps(self.value, default=str):.60}{path}{why}"


def _as_it_is(value: object) -> object:
    return value


class Rule(NamedTuple):
    """How to carry one setting over.

    - `path`: our setting, or "setting@name" for a value that `convert` reads by its name; "" if we
      have none.
    - `read`: translates the value; a dictionary lists all values that have a counterpart.
    - `plain`: values that need no setting here.
    - `why`: the reason for `verdict`.
    - `verdict`: of values that are neither plain nor translated.
    """

    path: str = ""
    read: Callable[[Any], object] | dict[object, object] = _as_it_is
    plain: tuple[object, ...] = ()
    why: str = "this value has no counterpart"
    verdict: Verdict = "DIFFERS"

    @property
    def key(self) -> str:
        """The name of the translated value: our setting, or "@name"."""
        return self.path[max(0, self.path.find("@")) :]

    def apply(self, setting: str, value: object, found: Verdict, values: dict[str, object]) -> Row:
        """Return the row of a value, and add its translation, if there is one, to `values`.

        - `found`: the verdict in that case, "taken" or "assumed".
        - `values`: translated values by our setting, or by "@name".
        """
        if value is None or value in self.plain:
            return Row(
                "dropped", setting, value, why="not set" if value is None else "always so here"
            )
        read = self.read.__getitem__ if isinstance(self.read, dict) else self.read
        with suppress(KeyError, TypeError, ValueError):
            if self.path:
                values[self.key] = read(value)
                return Row(found, setting, value, self.path.partition("@")[0])
        return Row(self.verdict, setting, value, why=self.why)


def renamed(lines: str) -> dict[str, Rule]:
    """Return rules of settings that we have, too: a line has a setting and our path of it."""
    rules = {}
    for line in lines.strip().splitlines():
        setting, path = line.split(maxsplit=1)
        rules[setting] = Rule(path)
    return rules


def same(names: str, block: str, prefix: str = "") -> dict[str, Rule]:
    """Return rules of settings, separated by spaces, that a block of ours has by these names."""
    return {f"{prefix}{name}": Rule(f"{block}.{name}") for name in names.split()}


def dropped(names: str, why: str) -> dict[str, Rule]:
    """Return rules of settings, separated by spaces, that do not change what is trained."""
    return dict.fromkeys(names.split(), Rule(why=why, verdict="dropped"))


def missing(names: str, why: str, *plain: object, verdict: Verdict = "DIFFERS") -> dict[str, Rule]:
    """Return rules of features, separated by spaces, that we lack; `plain` does not use them."""
    return dict.fromkeys(names.split(), Rule(plain=plain, why=why, verdict=verdict))
