"""The journal of a run, events.jsonl: one line of JSON for each launch and each end."""

import json
import time
from pathlib import Path

EVENTS = "events.jsonl"


def record(folder: Path, event: str, **values: object) -> None:
    """Append an event, with the time in seconds since the epoch. Raises OSError."""
    line = json.dumps({"time": round(time.time(), 3), "event": event, **values})
    with (folder / EVENTS).open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")
