"""What is recorded of a command: its JSON and its texts, without what no two runs share."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

MEASURED = frozenset(
    {
        # Times, and speeds that follow from them.
        "seconds",
        "step_seconds",
        "checkpoint_stall_seconds",
        "tokens_per_second",
        "tflops_per_device",
        "mfu",
        # Memory of processes.
        "peak_memory_bytes",
    }
)
"""Keys whose values differ from run to run, in JSON about a run. In a plan they are predicted."""
_TIMES = re.compile(r"\b\d[\d,.]*\s(s|ms|min|h)\b|\b\d+:\d\d:\d\d\b")


def stable(value: Any, without: frozenset[str]) -> Any:
    """Return a JSON value without some keys, at any depth."""
    if isinstance(value, dict):
        return {key: stable(x, without) for key, x in value.items() if key not in without}
    if isinstance(value, list):
        return [stable(x, without) for x in value]
    return value


def json_lines(text: str, without: frozenset[str] = frozenset()) -> str:
    """Return an object of JSON with one value a line, so that a difference has a line."""
    return json.dumps(stable(json.loads(text), without), indent=1)


def rows(text: str, without: frozenset[str] = frozenset()) -> str:
    """Return lines of JSON, each a line."""
    lines = (json.dumps(stable(json.loads(x), without)) for x in text.splitlines())
    return "\n".join(lines)


def untimed(text: str, without: frozenset[str] = frozenset()) -> str:
    """Return a text without times, and without the settings of `without` and their descriptions."""
    for name in without:
        # Among the defaults of its block, and in lists of names.
        text = re.sub(rf'"{name}": [^,{{}}]*, |\b{name}, ', "", text)
    lines: list[str] = []
    left_out_from: int | None = None  # the indentation of the line that named a setting
    for line in text.splitlines():
        indentation = len(line) - len(line.lstrip())
        if left_out_from is not None and indentation > left_out_from:
            continue
        left_out_from = None
        if any(name in line for name in without):
            left_out_from = indentation
        else:
            lines.append(line)
    return _TIMES.sub("TIME", "\n".join(lines))


def checksums(folder: Path, pattern: str = "**/*") -> str:
    """Return a line with the checksum of each file of a folder."""
    lines = []
    for path in sorted(folder.glob(pattern)):
        if path.is_file():
            digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
            lines.append(f"{digest}  {path.relative_to(folder)}")
    return "\n".join(lines)


def first_difference(before: Path, after: Path) -> str:
    """Return the first file and line in which two folders of records differ; "" if none does."""
    names = sorted({str(p.relative_to(f)) for f in (before, after) for p in f.rglob("*.txt")})
    for name in names:
        texts = []
        for folder in (before, after):
            path = folder / name
            texts.append(path.read_text(encoding="utf-8").splitlines() if path.exists() else None)
        one, other = texts
        if one is None or other is None:
            return f"{name} is missing {'before' if one is None else 'after'}"
        for number in range(max(len(one), len(other))):
            lines = [text[number] if number < len(text) else "(no line)" for text in (one, other)]
            if lines[0] != lines[1]:
                return f"{name}:{number + 1}: {_around(*lines)}"
    return ""


def _around(one: str, other: str) -> str:
    """Return two lines from shortly before where they differ, shortened."""
    same = 0
    while same < min(len(one), len(other)) and one[same] == other[same]:
        same += 1
    start = max(0, same - 60)
    return f"before {one[start : same + 60]!r}, after {other[start : same + 60]!r}"
