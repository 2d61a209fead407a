"""Reads ds.json: JSON with comments and trailing commas, and settings from the command line.

DeepSpeed reads its file with hjson, which takes `lr: 1e-3 # fast` for a string and trains with it.
Here everything beyond comments and trailing commas is an error with its line.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import parallel3d
from parallel3d.errors import ConfigError

CONFIGS = Path(parallel3d.__file__).parent.parent / "configs"

_STRING = r'"(?:\\.|[^"\\\n])*"'
_COMMENT = re.compile(rf"{_STRING}|(//[^\n]*|/\*.*?\*/)", re.DOTALL)
# The middle choice leaves `[,` and `,,` as they are: errors.
_TRAILING_COMMA = re.compile(rf"{_STRING}|[\[{{,]\s*,|(,)(?=\s*[\]}}])")


def find(name: str) -> Path:
    """The config file that `name` means: a path, or a bare name in configs/."""
    path = Path(name)
    shipped = [CONFIGS / name, CONFIGS / f"{name}.json"] if path.name == name else []
    for candidate in [path, *shipped]:
        if candidate.is_file():
            return candidate
    names = ", ".join(sorted(p.name for p in CONFIGS.glob("*.json")))
    raise ConfigError(f"no config file {name!r}; give a path, or one of configs/: {names}")


def read(path: Path) -> dict[str, Any]:
    """The object in the file; raises ConfigError with the line where it is not JSON."""
    try:
        return parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}; give a UTF-8 text file") from None


def parse(text: str, source: str = "config") -> dict[str, Any]:
    """The object that `text` holds; comments and trailing commas are left out of it."""
    value = _load(text, source)
    if not isinstance(value, dict):
        raise ConfigError(f"{source} holds {value!r}; write one object: {{...}}")
    return value


def apply_overrides(
    raw: dict[str, Any], overrides: Sequence[str], full_path: Callable[[str], str] = str
) -> None:
    """Set values in `raw` by their dotted paths: `--a.b 2` or `--a.b=2`; the last one wins.

    `full_path` gives the path that a shorter one stands for.
    """
    for path, text in _pairs(overrides):
        *sections, key = full_path(path).split(".")
        block = raw
        for section in sections:
            block = block.setdefault(section, {})
            if not isinstance(block, dict):
                raise ConfigError(f"--{path}: {section!r} holds {block!r}, which has no settings")
        block[key] = _value(text)


def _pairs(overrides: Sequence[str]) -> Iterator[tuple[str, str]]:
    words = iter(overrides)
    for word in words:
        if not re.match(r"--\w", word):
            raise ConfigError(f"{word!r} sets nothing; write --dotted.path value")
        path, equals, text = word[2:].partition("=")
        if not equals:
            following = next(words, None)
            if following is None or following.startswith("--"):
                raise ConfigError(f"{word} has no value; write {word} value")
            text = following
        yield path, text


def _value(text: str) -> Any:
    """JSON where it is JSON, else the text itself, so that names need no quotes."""
    try:
        return _load(text, "the command line")
    except ConfigError:
        return text


def _load(text: str, source: str) -> Any:
    clean = _TRAILING_COMMA.sub(_blank, _COMMENT.sub(_blank, text))

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for key, count in Counter(key for key, _ in pairs).items():
            if count > 1:
                lines = ", ".join(map(str, _lines_with_key(clean, key)))
                raise ConfigError(
                    f"{source}: the key {key!r} stands {count} times in one block (it is on lines "
                    f"{lines}); keep one of them"
                )
        return dict(pairs)

    def refuse_constant(name: str) -> Any:
        raise ConfigError(f"{source}: {name} is not JSON; write a finite number")

    try:
        return json.loads(clean, object_pairs_hook=unique, parse_constant=refuse_constant)
    except json.JSONDecodeError as error:
        line = text.splitlines()[error.lineno - 1].strip() if text.strip() else ""
        raise ConfigError(
            f"{source}, line {error.lineno}, column {error.colno}: {error.msg}: {line!r}; "
            "write JSON (comments // and /* */ and trailing commas are allowed)"
        ) from None


def _blank(match: re.Match[str]) -> str:
    """White space in place of a comment or comma, so that line and column stay true."""
    if match[1] is None:
        return match[0]
    return re.sub(r"[^\n]", " ", match[1])


def _lines_with_key(text: str, key: str) -> list[int]:
    pattern = re.compile(re.escape(json.dumps(key)) + r"\s*:")
    return [text.count("\n", 0, match.start()) + 1 for match in pattern.finditer(text)]
