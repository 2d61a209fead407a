"""A quick check that the Hugging Face hub can be reached: its libraries retry for a minute."""

import os
import socket
from functools import cache
from threading import Thread
from urllib.parse import urlsplit
from urllib.request import getproxies

SECONDS = 0.8  # time limit of a connection
ANSWER_SECONDS = 10.0  # time limit of the first answer
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")


@cache
def why_unreachable() -> str:
    """Return why the hub cannot be reached; "" if it answers. Checked once a process."""
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
        except OSError as error:
            answer[0] = f"{place[0]}: {error.strerror or error}"
            return
        answer[0] = ""
        if _is_silent(hub.scheme, *place):
            answer[0] = f"{place[0]} accepts connections, and sent nothing for {ANSWER_SECONDS} s"

    # In a thread, because resolving a name has no time limit.
    thread = Thread(target=connect, daemon=True)
    thread.start()
    thread.join(SECONDS)
    if not answer[0]:
        thread.join(ANSWER_SECONDS + SECONDS)
    return answer[0]


def _is_silent(scheme: str, host: str, port: int) -> bool:
    """Return True if a server does not answer in time; any answer, or another error, is one."""
    from http.client import HTTPConnection, HTTPException, HTTPSConnection

    connects = HTTPConnection if scheme == "http" else HTTPSConnection
    connection = connects(host, port, timeout=ANSWER_SECONDS)
    try:
        connection.request("HEAD", "/")
        connection.getresponse()
    except TimeoutError:
        return True
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()
    return False


def is_path(name: str) -> bool:
    """Return True if a name can only be a path on this machine, not a model or data set of the hub.

    Names of the hub are NAME or OWNER/NAME.
    """
    return os.path.lexists(name) or name.startswith((".", "~", "/")) or name.count("/") > 1
