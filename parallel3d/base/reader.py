"""Reader of ds.json (JSON with comments and trailing commas) and of command-line settings.

DeepSpeed reads its file with hjson, which reads `lr: 1e-3 # fast` as a string and trains with it.
Here only comments and trailing commas are allowed; anything else is an error with its line.
"""

import json
import os
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import parallel3d
from parallel3d.base.errors import ConfigError, first_line
from parallel3d.base.section import ABSENT

JsonObject = dict[str, object]  # a block of settings as it is read or written

CONFIGS = Path(parallel3d.__file__).parent / "configs"

_STRING = r'"(?:\\.|[^"\\\n])*"'
_BRACKET = re.compile(rf"{_STRING}|([\[\]{{}}])")
MOST_NESTED = 100
_DECIMAL = re.compile(r"[+-]?(?:\.\d+|\d+\.\d*)(?:[eE][+-]?\d+)?|\+\d+[eE][+-]?\d+", re.ASCII)
_COMMENT = re.compile(rf"{_STRING}|(//[^\n]*|/\*.*?\*/)", re.DOTALL)
# The middle alternative keeps `[,` and `,,`, which are errors.
_TRAILING_COMMA = re.compile(rf"{_STRING}|[\[{{,]\s*,|(,)(?=\s*[\]}}])")


def find(name: str) -> Path:
    """Return the path of a config file: `name` as a path, else the shipped configs/NAME.

    Raises ConfigError if neither exists.
    """
    path = Path(os.path.expanduser(name))  # a shell leaves the ~ of --config=~/ds.json
    shipped = [CONFIGS / name, CONFIGS / f"{name}.json"] if path.name == name else []
    if path.parts[:1] == ("configs",):
        shipped = [CONFIGS.joinpath(*path.parts[1:])]
    for candidate in [path, *shipped]:
        if os.path.isfile(candidate):  # False for invalid names; Path.is_file would raise
            return candidate
    names = ", ".join(sorted(p.name for p in CONFIGS.glob("*.json")))
    what = ""
    if os.path.isdir(path):
        what = ": it is a folder"
    elif os.path.exists(path):
        what = ": it is no regular file, and each rank reads it"
    raise ConfigError(
        f"no config file {name!r}{what}; use a path, or one of those in configs/: {names}"
    )


def read(path: Path) -> JsonObject:
    """Return the object in a config file; raise ConfigError with the line of a syntax error."""
    return parse(text_of(path), str(path))


def text_of(path: Path) -> str:
    """Return the text of a file; raise ConfigError if it cannot be read as UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"cannot read {path}: byte 0x{error.object[error.start]:02x} at offset {error.start} "
            f"is not UTF-8 ({error.reason}); convert it to UTF-8, if it is a text file"
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"cannot read {path}: {reason}; name a file that exists and can be read"
        ) from None


def parse(text: str, source: str = "config") -> JsonObject:
    """Return the JSON object in `text`, which may have comments and trailing commas."""
    value = _load(text, source)
    if not isinstance(value, dict):
        raise ConfigError(f"{source}: must be one object, not {value!r}; write {{...}}")
    return value


def set_values(raw: JsonObject, values: Iterable[tuple[str, str]]) -> None:
    """Set values in `raw`, each given as dotted path and text; the last value of a path wins."""
    for path, text in values:
        *sections, key = path.split(".")
        block: Any = raw
        for i, section in enumerate(sections):
            if isinstance(block, dict):
                inner = block.setdefault(section, {})
            else:
                inner = block[_index(path, ".".join(sections[:i]), block, section)]
            if not isinstance(inner, dict | list):
                raise ConfigError(
                    f"--{path}: {section!r} is {inner!r}, which has no settings; set "
                    f"--{'.'.join(sections[: i + 1])} as a whole"
                )
            block = inner
        if isinstance(block, list):
            block[_index(path, ".".join(sections), block, key)] = _given(path, text)
        else:
            block[key] = _given(path, text)


def _index(path: str, place: str, entries: list[object], text: str) -> int:
    """Return the number of an entry of the list at `place`; raise ConfigError if there is none."""
    if re.fullmatch(r"\d{1,9}", text, re.ASCII) and int(text) < len(entries):
        return int(text)
    several = f"0 to {len(entries) - 1}" if len(entries) > 1 else "0"
    number = f"use {several} in place of {text}" if entries else f"write --{place} [...]"
    raise ConfigError(f"--{path}: {place} is a list of {len(entries)}; {number}")


def value_at(raw: object, path: str) -> object:
    """Return the value at a dotted path of an object; ABSENT if there is none."""
    for name in path.split(".") if path else ():
        raw = raw.get(name, ABSENT) if isinstance(raw, dict) else ABSENT
    return raw


def block_at(raw: object, path: str) -> JsonObject:
    """Return the block at a dotted path of an object; a new empty one if there is none."""
    return block if isinstance(block := value_at(raw, path), dict) else {}


def blocks_at(raw: object, paths: Iterable[str]) -> dict[str, JsonObject]:
    """Return the blocks at some dotted paths of an object, by path."""
    return {path: block_at(raw, path) for path in paths}


def flat(settings: Mapping[str, object], prefix: str = "", separator: str = ".") -> JsonObject:
    """Return each value in nested blocks by its path, such as train.steps."""
    values: JsonObject = {}
    for name, item in settings.items():
        path = f"{prefix}{name}"
        if isinstance(item, Mapping):
            values |= flat(item, f"{path}{separator}", separator)
        else:
            values[path] = item
    return values


def setting_pairs(overrides: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield path and text of each setting on the command line: `--a.b 2` or `--a.b=2`.

    Several words after a path are a list, as a shell makes of `--data.paths texts/*.txt`.
    """
    words = deque(overrides)
    while words:
        word = words.popleft()
        if not re.match(r"--\w", word):
            raise ConfigError(f"{word!r}: unexpected argument; write --dotted.path value")
        path, equals, text = word[2:].partition("=")
        values = [text] if equals else []
        while words and not re.match(r"--|-[A-Za-z]", words[0]):
            values.append(words.popleft())
        if not values:
            raise ConfigError(f"{word} has no value; write {word} value")
        if len(values) == 1:
            yield path, values[0]
        else:
            yield path, json.dumps([value(text) for text in values])


def _given(path: str, text: str) -> object:
    """Return the value of a setting on the command line; raise ConfigError for a broken block."""
    bare = text.strip()
    if bare.startswith("{") or (bare.startswith("[") and bare.endswith("]")):
        return _load(text, f"--{path}", shows_line=False)  # it may hold a key
    return value(text)


def value(text: str) -> object:
    """Return a command-line value: parsed as JSON if it is JSON, else the text itself.

    Decimals may also begin with a sign or a point, or end with a point.
    """
    if _DECIMAL.fullmatch(text):
        return float(text)
    try:
        return _load(text, "the command line")
    except ConfigError:
        return text


def _load(text: str, source: str, shows_line: bool = True) -> object:
    clean = _TRAILING_COMMA.sub(_blank, _COMMENT.sub(_blank, text))

    _refuse_depth(clean, source)

    def unique(pairs: list[tuple[str, object]]) -> JsonObject:
        for key, count in Counter(key for key, _ in pairs).items():
            if count > 1:
                raise ConfigError(
                    f"{source}: the key {key!r} appears {count} times in one block; keep one of "
                    "them"
                )
        return dict(pairs)

    def refuse_constant(name: str) -> object:
        raise ConfigError(f"{source}: {name} is not JSON; write a finite number")

    try:
        return json.loads(clean, object_pairs_hook=unique, parse_constant=refuse_constant)
    except json.JSONDecodeError as error:
        line = text.split("\n")[error.lineno - 1].strip()  # json counts lines from 1
        line = line if len(line) <= 80 else f"{line[:76]} ..."
        shown = f": {line!r}" if shows_line else ""
        if error.pos >= len(clean.rstrip()):
            shown = ": the text ends there"
        raise ConfigError(
            f"{source}, line {error.lineno}, column {error.colno}: {error.msg}{shown}; "
            "write JSON (comments // and /* */ and trailing commas are allowed)"
        ) from None
    except ConfigError:
        raise
    except (RecursionError, ValueError) as error:  # such as a number of thousands of digits
        raise ConfigError(
            f"{source}: cannot be read ({first_line(error)}); write a shorter number"
        ) from None


def _refuse_depth(text: str, source: str) -> None:
    """Raise ConfigError if brackets in `text` are nested deeper than any setting."""
    depth = 0
    for match in _BRACKET.finditer(text):
        bracket = match[1]
        if bracket is None:
            continue
        depth += 1 if bracket in "[{" else -1
        if depth > MOST_NESTED:
            line = text.count("\n", 0, match.start()) + 1
            raise ConfigError(
                f"{source}, line {line}: more than {MOST_NESTED} blocks or lists are nested, "
                "deeper than any setting; remove brackets"
            )


def _blank(match: re.Match[str]) -> str:
    """Return spaces in place of a comment or comma, so that lines and columns do not change."""
    if match[1] is None:
        return match[0]
    return re.sub(r"[^\n]", " ", match[1])
