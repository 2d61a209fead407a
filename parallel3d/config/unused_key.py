"""A key of DeepSpeed's that is not a setting here: which values pass, and why others do not."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches

from parallel3d.base.section import ABSENT, Problem
from parallel3d.config.switch import missing_switch

ANY: object = object()  # stands for every value


@dataclass(frozen=True)
class Key:
    """A DeepSpeed key that is not a setting: which values are accepted, and why others are not."""

    reason: str
    """Why other values are refused: "rule; remedy"."""
    values: tuple[object, ...] = ()
    """Accepted values."""
    items: dict[str, tuple[object, ...]] = field(default_factory=dict)
    """For a block: the accepted values of each of its keys."""
    switch: str = ""
    """For a block: its key that turns it on. It is off if it is empty or this key is false."""
    beside: tuple[str, ...] = ()
    """For a block with a switch: its other keys, which may have any value in a block that is off;
    empty if DeepSpeed passes them on to another library."""
    reasons: dict[str, str] = field(default_factory=dict)
    """For a block: reasons of single keys, in place of `reason`."""

    def problems(self, path: str, value: object) -> Iterator[Problem]:
        """Yield why `value`, at `path` of the config, is refused; nothing if it is accepted."""
        if any(_same(value, accepted) for accepted in self.values):
            return
        if not isinstance(value, dict) or not (self.switch or self.items):
            yield Problem(path, value, *_rule_and_remedy(self.reason))
        elif self.switch:
            yield from self._problems_of_switched(path, value)
        else:
            for name, item in value.items():
                if not any(_same(item, accepted) for accepted in self.items.get(name, ())):
                    reason = self.reasons.get(name, self.reason)
                    yield Problem(f"{path}.{name}", item, *_rule_and_remedy(reason))

    def _problems_of_switched(self, path: str, block: Mapping[str, object]) -> Iterator[Problem]:
        """Yield the problems of a block that must be off."""
        known = (self.switch, *self.beside)
        unknown = [name for name in block if self.beside and name not in known]
        for name in unknown:
            near = get_close_matches(name.lower(), known, 1)
            remedy = f'the nearest one is "{near[0]}"' if near else "remove it"
            yield Problem(f"{path}.{name}", block[name], "is not a setting", remedy)
        switched = block.get(self.switch, ABSENT)
        rule, remedy = _rule_and_remedy(self.reason)
        lowered = [name.lower() for name in unknown]
        is_misspelt = get_close_matches(self.switch, lowered, 1)
        if switched is ABSENT and not is_misspelt:
            whole = remedy.replace("remove it", f"remove {path}")
            off = f"false, or {whole} ({path} {rule})"
            yield from missing_switch(f"{path}.{self.switch}", block, off)
        elif switched not in (ABSENT, False) or type(switched) is int:
            yield Problem(f"{path}.{self.switch}", switched, rule, remedy)


def _rule_and_remedy(reason: str) -> tuple[str, str]:
    rule, _, remedy = reason.partition("; ")
    return rule, remedy


def _same(a: object, b: object) -> bool:
    """Return True if a equals b (or b is ANY) in JSON, where 1 equals 1.0 but not true."""
    return b is ANY or (a == b and isinstance(a, bool) == isinstance(b, bool))
