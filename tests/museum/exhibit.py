"""A silent bug of the field as data, and the tools to plant it in our code (floor 5)."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from unittest.mock import patch

from parallel3d.base.mesh_sizes import MeshSizes
from tests.meshes import sizes_of

Planted = AbstractContextManager[Any]
"""Within it the mistake is in our code, in this process alone."""


Kind = Literal["parallel", "shared", "size", "beside", "half", "loop"]
KINDS: dict[Kind, str] = {
    "parallel": "executor, collectives, optimizer state, checkpoints",
    "shared": "samples, labels, documents, decay, schedule, first weights",
    "size": "paths that small runs do not take by themselves",
    "beside": "evaluation, dropout, loss scale, weighted loss",
    "half": "bf16 and fp16",
    "loop": "lines of metrics, saves while training goes on",
}


@dataclass(frozen=True)
class Exhibit:
    """A published silent bug: where it was, and what a config needs to have it.

    `doc` is its file's docstring, whose first paragraph says in one sentence what was wrong. `date`
    is that of the report (as far as it is known), `source` its repository and number as
    "owner/repository#number"; both are "" for a mistake that the field has always made. `mesh` is
    the smallest of the default sample on which it can be planted; `needs` are the features that a
    config must have, by their names in `museum.needs`. `kind` is a key of `KINDS`.
    """

    doc: str
    date: str = ""
    source: str = ""
    mesh: tuple[int, int, int] = (1, 1, 1)
    needs: tuple[str, ...] = ()
    kind: Kind = "parallel"

    @property
    def sizes(self) -> MeshSizes:
        """The sizes of `mesh`."""
        return sizes_of(self.mesh)

    @property
    def what(self) -> str:
        """The sentence that says what was wrong."""
        return " ".join(self.doc.partition("\n\n")[0].split())


def check_fits(original: Any, patch: Any, *before: Any) -> None:
    """Raise TypeError unless a patch takes the arguments of the function that it replaces.

    They are bound twice: all of them, and only those that have no default, by position where that
    is possible. `before` are passed first. Without this, a patch that no longer fits is noticed
    only where the whole museum is run.
    """
    if not callable(original) or not callable(patch):
        return
    try:
        parameters = inspect.signature(original).parameters.values()
    except ValueError:  # written in C
        return
    by_position = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    for taken in (parameters, [p for p in parameters if p.default is inspect.Parameter.empty]):
        given = [p.name for p in taken if p.kind in by_position]
        named = {p.name: p for p in taken if p.kind is inspect.Parameter.KEYWORD_ONLY}
        try:
            inspect.signature(patch).bind(*before, *given, **named)
        except TypeError as error:
            name = getattr(original, "__qualname__", original)
            raise TypeError(f"the patch of {name} does not fit its arguments: {error}") from None


def replaced(owner: Any, name: str, value: Any) -> Planted:
    """Have `value` in place of `owner.name` inside the context."""
    check_fits(getattr(owner, name), value)
    return patch.object(owner, name, value)


def wrapped(owner: Any, name: str, around: Callable[..., Any]) -> Planted:
    """Have `around(original, ...)` called in place of `owner.name(...)` inside the context."""
    original = getattr(owner, name)
    check_fits(original, around, original)
    return replaced(owner, name, lambda *args, **kwargs: around(original, *args, **kwargs))


def in_place_of(owner: Any, name: str) -> Callable[[Callable[..., Any]], Callable[[], Planted]]:
    """Make `plant` of the function that is called in place of `owner.name(...)` (`wrapped`)."""
    return lambda around: lambda: wrapped(owner, name, around)


@contextmanager
def all_of(*planted: Planted) -> Iterator[None]:
    """Plant several mistakes at once."""
    with ExitStack() as stack:
        for one in planted:
            stack.enter_context(one)
        yield
