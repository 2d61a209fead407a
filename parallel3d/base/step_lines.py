"""Files of a run with a line of JSON per step, of which a killed writer may leave a part."""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"
_TAIL = 2**20  # bytes read from the end of a file, far more than a line


def parsed(lines: Iterable[str]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the object of each complete line, and the line."""
    for line in lines:
        with suppress(ValueError, KeyError, TypeError):
            values = json.loads(line)
            int(values["step"])
            yield values, line


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file's complete lines. Raises OSError."""
    text = path.read_text(encoding="utf-8", errors="replace")
    return [values for values, _ in parsed(text.split("\n"))]


def newest(path: Path) -> dict[str, Any]:
    """Return the object of a file's last complete line, with its end; {} if there is none."""
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
        ended = file.read().decode(errors="replace").split("\n")[:-1]
        return next((values for values, _ in parsed(reversed(ended))), {})
    return {}
