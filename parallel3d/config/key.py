"""A DeepSpeed key that is not a setting of parallel3d."""

from dataclasses import dataclass, field
from typing import Any

from parallel3d.base.section import ABSENT

ANY: Any = object()  # every value


@dataclass(frozen=True)
class Key:
    """A DeepSpeed key that is not a setting, with the reason why values are refused.

    The reason reads "rule; remedy".
    """

    reason: str
    values: tuple[Any, ...] = ()
    items: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    switch: str = ""
    reasons: dict[str, str] = field(default_factory=dict)

    def refused(self, value: Any) -> Any:
        """The part of `value` that is refused; ABSENT if nothing is."""
        if any(_same(value, v) for v in self.values):
            return ABSENT
        if not isinstance(value, dict) or not (self.switch or self.items):
            return value
        if self.switch:
            return ABSENT if value.get(self.switch, False) is False else value
        return {k: v for k, v in value.items() if not self._accepts(k, v)} or ABSENT

    def _accepts(self, item: str, value: Any) -> bool:
        return any(v is ANY or _same(value, v) for v in self.items.get(item, ()))


def _same(a: Any, b: Any) -> bool:
    """Equality as in JSON, where 1 is 1.0 but not true."""
    return a == b and isinstance(a, bool) == isinstance(b, bool)
