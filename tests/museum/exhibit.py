"""A silent bug of the field as data, and the tools to plant it in our code (floor 5)."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

Planted = AbstractContextManager[Any]
"""Within it the mistake is in our code, in this process alone."""

Sizes = tuple[int, int, int]  # pp, dp, tp


@dataclass(frozen=True)
class Exhibit:
    """A published silent bug: where it was, and what a config needs to have it.

    `date` is that of the report (as far as it is known), `source` its repository and number as
    "owner/repository#number", "" for a mistake that the field has always made. `what` is one
    sentence. `mesh` is the smallest of the default sample on which it can be planted; `needs` are
    the features that a config must have, by their names in `museum.needs`.
    """

    date: str
    source: str
    what: str
    mesh: Sizes
    needs: tuple[str, ...] = ()

    @property
    def project(self) -> str:
        """The project that had the bug; "classic" without a report of it."""
        return self.source.partition("#")[0].rpartition("/")[2] or "classic"


def replaced(owner: Any, name: str, value: Any) -> Planted:
    """Have `value` in place of `owner.name` inside the context."""
    return patch.object(owner, name, value)


def wrapped(owner: Any, name: str, around: Callable[..., Any]) -> Planted:
    """Have `around(original, ...)` called in place of `owner.name(...)` inside the context."""
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    return patch.object(owner, name, call)


@contextmanager
def all_of(*planted: Planted) -> Iterator[None]:
    """Plant several mistakes at once."""
    with ExitStack() as stack:
        for one in planted:
            stack.enter_context(one)
        yield
