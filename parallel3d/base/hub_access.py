"""A quick check that the Hugging Face hub can be reached: its libraries retry for a minute."""

import os
import socket
from functools import cache
from threading import Thread
from urllib.parse import urlsplit
from urllib.request import getproxies

SECONDS = 0.8  # time limit of the check
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")


@cache
def why_unreachable() -> str:
    """Return why the hub cannot be reached; "" if a connection succeeds. Checked once a process."""
    for name in OFFLINE:
        if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE"):
            return f"{name} is set"
    if getproxies():
        return ""  # the proxy knows
    hub = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    place = (hub.hostname or "", hub.port or (80 if hub.scheme == "http" else 443))
    answer = [f"no answer from {place[0]} within {SECONDS} s"]

    def connect() -> None:
        try:
            socket.create_connection(place, timeout=SECONDS).close()
            answer[0] = ""
        except OSError as error:
            answer[0] = f"{place[0]}: {error.strerror or error}"

    # In a thread, because resolving a name has no time limit.
    thread = Thread(target=connect, daemon=True)
    thread.start()
    thread.join(SECONDS)
    return answer[0]


def is_path(name: str) -> bool:
    """Return True if a name can only be a path on this machine, not a model or data set of the hub.

    Names of the hub are NAME or OWNER/NAME.
    """
    return os.path.lexists(name) or name.startswith((".", "~", "/")) or name.count("/") > 1
