"""The exhibits: one file each, found by file name (docs/museum.md)."""

from importlib import import_module
from pkgutil import iter_modules
from typing import Protocol, cast

from tests.museum.exhibit import Exhibit, Planted


class ExhibitFile(Protocol):
    """The names that an exhibit's file must have."""

    EXHIBIT: Exhibit

    def plant(self) -> Planted:
        """Have the mistake in our code inside the context, in this process alone."""


def names() -> tuple[str, ...]:
    """Names of the exhibits there are: the files of this folder."""
    return tuple(sorted(module.name for module in iter_modules(__path__)))


def load(name: str) -> ExhibitFile:
    """The exhibit file of that name."""
    return cast(ExhibitFile, import_module(f"{__name__}.{name}"))
