"""The steps recorded in a run's folder (no torch)."""

import json
import os
from contextlib import suppress
from pathlib import Path

from parallel3d.base.atomic import replace_text

METRICS = "metrics.jsonl"
_TAIL = 2**20  # bytes of it, far more than its last line


def step_reached(folder: Path) -> int:
    """The last step in a folder's metrics.jsonl, whose last line may be torn; 0 without one."""
    try:
        with open(folder / METRICS, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            ended, _, _ = file.read().decode(errors="replace").rpartition("\n")
    except OSError:
        return 0
    return next((step for step, _ in reversed(_lines(ended))), 0)


def forget_after(metrics: Path, step: int) -> None:
    """Drop the lines of steps after `step`, which will be done again, from metrics.jsonl."""
    if metrics.exists():
        lines = _lines(metrics.read_text(errors="replace"))
        replace_text(metrics, "".join(line for number, line in lines if number <= step))


def _lines(text: str) -> list[tuple[int, str]]:
    """Each line that is whole, and its step; a kill may have cut off only the end of the last."""
    result = []
    for line in text.split("\n"):
        with suppress(ValueError, KeyError, TypeError):
            result.append((int(json.loads(line)["step"]), f"{line}\n"))
    return result
