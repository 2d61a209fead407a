"""What every section of a config is made of: strict frozen models, and problems with a remedy."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Strict

from parallel3d.base.errors import ConfigError


@dataclass(frozen=True)
class Beyond:
    """What a file's classes do not tell of its settings, for their list and their errors.

    `choices`: sections of one class or another, by path: the key that tells, and the classes by its
    value. `refused`: keys that are known and refused, by section: "rule; remedy". `autos`: paths
    where "auto" may stand, besides those whose type or text says so.
    """

    choices: Mapping[str, tuple[str, Callable[[], Mapping[str, Any]]]] = field(default_factory=dict)
    refused: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    autos: Sequence[str] = ()


class Section(BaseModel):
    """One frozen block of settings: unknown keys and wrong types are errors, never converted."""

    beyond: ClassVar[Beyond] = Beyond()  # read of the outermost section alone

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a config: where, the value found there, the rule, and the remedy."""

    path: str
    value: Any
    rule: str
    remedy: str

    def under(self, prefix: str) -> "Problem":
        """A problem as seen from the section around its own, which stands there at `prefix`."""
        return replace(self, path=".".join(part for part in (prefix, self.path) if part))

    def __str__(self) -> str:
        value = "" if self.value is ABSENT else f" = {_shown(self.value)}"
        return f"{self.path}{value}: {self.rule}; {self.remedy}"


ABSENT: Any = object()  # the value of a key that is not there


class Problems(ConfigError):
    """All that is wrong with a config, at once."""

    def __init__(self, problems: Sequence[Problem], source: str = "the config") -> None:
        self.problems = tuple(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n  ".join([f"{count} in {source}:", *map(str, self.problems)]))


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


# DeepSpeed's documentation writes sizes as 5e8, which JSON reads as a float.
Size = Annotated[int, BeforeValidator(_whole)]
# A JSON list, frozen; the items stay strict.
Strings = Annotated[tuple[str, ...], Strict(False)]


def _path_text(text: str) -> str:
    if hidden := next((c for c in text if c < " " or c == "\x7f"), ""):
        raise ValueError(f"holds the invisible character U+{ord(hidden):04X}; write it without")
    return text


# A path that can be typed: what no file system or terminal takes is seen before anything starts.
PathText = Annotated[str, AfterValidator(_path_text)]


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:76] + " ..."
