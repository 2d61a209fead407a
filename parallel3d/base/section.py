"""Base classes of a config's sections: strict frozen models, and problems with a remedy."""

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from typing import Annotated, ClassVar, Protocol, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    ValidationInfo,
    model_validator,
)

from parallel3d.base.counts import read_count
from parallel3d.base.errors import ConfigError
from parallel3d.base.masking import mask
from parallel3d.base.paths import expand_path


class Section(BaseModel):
    """One frozen block of settings: unknown keys and wrong types are errors, never converted."""

    # Only those of the outermost section are used.
    refused: ClassVar[Mapping[str, Mapping[str, "Refusal"]]] = {}
    """Known keys that are refused, by the path of their block."""
    foreign: ClassVar[Mapping[str, str]] = {}
    """Names that other programs have for our settings, and our paths of these."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    def _problems(self) -> "Iterable[Problem]":
        """Return the problems between settings of this block."""
        return ()

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        raise_if_any(self._problems())
        return self


@dataclass(frozen=True)
class Problem:
    """One problem in a config: the path, the value there, the broken rule, and a remedy."""

    path: str
    value: object
    rule: str
    remedy: str

    def under(self, prefix: str) -> "Problem":
        """Return this problem with its path below `prefix`, as seen from an outer section."""
        return replace(self, path=".".join(part for part in (prefix, self.path) if part))

    def __str__(self) -> str:
        value = "" if self.value is ABSENT else f" = {_shown(self.value)}"
        is_visible = self.path.isprintable() and self.path
        path = self.path if is_visible else json.dumps(self.path)
        return f"{path}{value}: {self.rule}; {self.remedy}"

    def error(self) -> "Problems":
        """Return the error of a config with this problem alone, to be raised."""
        return Problems([self])


class Refusal(Protocol):
    """Why a known key cannot be used."""

    def problems(self, path: str, value: object) -> Iterable[Problem]:
        """Return the problems of `value` at `path`."""


def nearest(name: str, known: Collection[str]) -> str:
    """Return a remedy for a name that is not among `known`: the nearest one, or all of them."""
    near = get_close_matches(name, known, n=1)
    return f'the nearest one is "{near[0]}"' if near else f"use {', '.join(known)}"


ABSENT: object = object()  # the value of a missing key
_LONGEST_NAME = 255  # bytes; Linux and its file systems
_LONGEST_PATH = 4095
_MOST_OF_A_LIST = 5  # problems in one list that a message shows


class Problems(ConfigError):
    """All problems of a config in one error."""

    def __init__(self, problems: Sequence[Problem], source: str = "the config") -> None:
        self.problems = tuple(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n  ".join([f"{count} in {source}:", *_lines(self.problems)]))


def raise_if_any(problems: Iterable[Problem], source: str = "the config") -> None:
    """Raise Problems if there are any; `source` says in what."""
    if listed := [*problems]:
        raise Problems(listed, source)


def _lines(problems: Iterable[Problem]) -> list[str]:
    """Return one line per problem; in a list only the first few, and the number of the others."""
    lines = []
    counts = Counter[str]()
    for problem in problems:
        name, *inside = re.split(r"\.\d+(?=\.|$)", problem.path, maxsplit=1)
        counts[name] += len(inside)
        if counts[name] <= _MOST_OF_A_LIST:
            lines.append(str(problem))
    more = {name: count - _MOST_OF_A_LIST for name, count in counts.items()}
    return [
        *lines,
        *(f"{name}: {n} more problems in its entries" for name, n in more.items() if n > 0),
    ]


@dataclass(frozen=True)
class Choice:
    """A validator of a block whose class is chosen by its setting `key`.

    `what` describes a name in messages, `names` returns all names, `class_of` the class of a name.
    With `beside`, the key stands beside the block, and `beside` is its default.
    """

    key: str
    what: str
    names: Callable[[], Iterable[str]]
    class_of: Callable[[str], type[Section]]
    beside: str = ""

    def __call__(self, value: object, info: ValidationInfo) -> object:
        if isinstance(value, Section):
            return value
        names = list(self.names())
        if not isinstance(value, dict):
            name = json.dumps(value) if value in names else "..."
            started = "..." if self.beside else f'"{self.key}": {name}'
            raise ValueError(f"must be a block of settings; write {{{started}}}")
        # A wrong name beside the block has its own problem, and is missing here.
        name = info.data.get(self.key, self.beside) if self.beside else value.get(self.key, ABSENT)
        if name not in names:
            remedy = f"use one of: {', '.join(names)}"
            raise Problems([Problem(self.key, name, f"is not a known {self.what}", remedy)])
        return self.class_of(name).model_validate(value)


Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
# Counts of steps, samples and tokens, and sizes in bytes or elements, as people write them:
# DeepSpeed's documentation has 5e8, which JSON reads as a float; others write "1B".
Count = Annotated[int, BeforeValidator(read_count)]
PositiveCount = Annotated[Count, Field(gt=0)]
NaturalCount = Annotated[Count, Field(ge=0)]
Tokens = Annotated[int, BeforeValidator(partial(read_count, unit="tokens"))]
Size = Annotated[int, BeforeValidator(partial(read_count, unit="bytes"))]
Item = TypeVar("Item")
# A JSON list, frozen; the items stay strict.
Items = Annotated[tuple[Item, ...], Strict(False)]
Strings = Items[str]


def _path_text(text: str) -> str:
    if hidden := next((c for c in text if c < " " or c == "\x7f"), ""):
        raise ValueError(f"contains the control character U+{ord(hidden):04X}; remove it")
    path = expand_path(text)
    longest = max(len(os.fsencode(part)) for part in path.split("/"))
    if "://" not in path and (longest > _LONGEST_NAME or len(os.fsencode(path)) > _LONGEST_PATH):
        raise ValueError(
            f"is longer than file systems allow ({_LONGEST_NAME} bytes a name, {_LONGEST_PATH:,} "
            "in all); write a shorter path"
        )
    return path


def _local_path(path: str) -> str:
    if "://" in path:
        raise ValueError(
            "is a URL, and only files of a mounted file system are written; name a folder of one"
        )
    return path


# A path without control characters, which no terminal or file system should see; ~ and environment
# variables are replaced.
PathText = Annotated[str, AfterValidator(_path_text)]
# A folder that is written to.
FolderText = Annotated[PathText, AfterValidator(_local_path)]


def _shown(value: object) -> str:
    # Before it is cut, which may hide the end of a password.
    text = mask(json.dumps(value, default=str))
    return text if len(text) <= 80 else text[:76] + " ..."
