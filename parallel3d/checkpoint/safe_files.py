"""Opening, hashing and parsing of files that may be damaged or malicious."""

import json
import os
import stat
from pathlib import Path
from typing import Any, NoReturn

from xxhash import xxh3_128


def open_file(path: Path) -> tuple[int, int]:
    """Open a plain file for reading; gives its descriptor and its size in bytes.

    Raises OSError, also for what is not a plain file.
    """
    # Without O_NONBLOCK the open of a named pipe waits for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise OSError("it is not a plain file")
    return descriptor, status.st_size


def read_bytes(path: Path, limit: int) -> bytes:
    """The contents of a plain file of at most `limit` bytes. Raises OSError."""
    descriptor, size = open_file(path)
    with open(descriptor, "rb") as file:
        if size > limit:
            raise OSError(f"it is {size:,} bytes; at most {limit:,} are read")
        return file.read(limit)


def tokenizer_digest(directory: Path) -> str:
    """The digest of a tokenizer's meaning of tokens, as state.json stores it."""
    digest = xxh3_128()
    # Beside it there are names of classes and versions, which differ between libraries' versions.
    whole = directory / "tokenizer.json"
    for path in [whole] if whole.is_file() else sorted(directory.rglob("*")):
        if path.is_file():
            digest.update(f"{path.relative_to(directory)}\n{path.stat().st_size}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def parse_object(data: bytes) -> dict[str, Any]:
    """The JSON object in `data`; strict: no double keys, no NaN. Raises ValueError."""
    try:
        found = json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("it is not a JSON object")
    return found


def is_count(value: object) -> bool:
    """True if a parsed value is a whole number from 0 to 2^63 - 1; true and 1.0 are not."""
    return type(value) is int and 0 <= value < 2**63


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice in one JSON object")
    return found


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
