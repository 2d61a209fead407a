"""Files of a run with a line of JSON per step, of which a killed writer may leave a part."""

import json
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"
_TAIL = 2**16  # bytes of a file in which its last line is looked for


def finite(value: Any) -> Any:
    """Return the value with numbers that are not finite replaced by None; JSON has no NaN."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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


def append_line(path: Path, line: str) -> None:
    """Append a line in one write, after a part of one that a full disk has left. Raises OSError."""
    # Without a buffer, whose rest would be written later, after a disk was full.
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        size = os.lseek(file, 0, os.SEEK_END)
        start = "\n" if size and os.pread(file, 1, size - 1) != b"\n" else ""
        os.write(file, f"{start}{line}\n".encode())
    finally:
        os.close(file)


def newest(path: Path) -> dict[str, Any]:
    """Return the object of a file's last complete line; {} if there is none."""
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
        lines = file.read().decode(errors="replace").split("\n")[:-1]
        return next((values for values, _ in parsed(reversed(lines))), {})
    return {}


def closing_window(num_steps: int) -> int:
    """Return of how many last steps a run's closing loss is the mean, in its last launch."""
    return min(max(num_steps // 10, 10), 50)
