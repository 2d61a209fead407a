"""Open, hash and parse files that may be damaged or malicious."""

import json
import os
import stat
from pathlib import Path
from typing import NoReturn

from xxhash import xxh3_128


def open_file(path: Path) -> tuple[int, int]:
    """Open a plain file for reading and return its descriptor and size in bytes.

    Raises OSError, also if it is not a plain file.
    """
    # Without O_NONBLOCK, opening a named pipe waits for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise OSError("it is not a plain file")
    return descriptor, status.st_size


def read_bytes(path: Path, limit: int) -> bytes:
    """Return the contents of a plain file of at most `limit` bytes; raises OSError."""
    descriptor, size = open_file(path)
    with open(descriptor, "rb") as file:
        if size > limit:
            raise OSError(f"it is {size:,} bytes; at most {limit:,} are read")
        return file.read(limit)


def tokenizer_digest(directory: Path) -> str:
    """Return the digest of a tokenizer's vocabulary and rules, as in state.json."""
    digest = xxh3_128()
    # Other files hold names of classes and versions, which differ between versions of libraries.
    tokenizer = directory / "tokenizer.json"
    for path in [tokenizer] if tokenizer.is_file() else sorted(directory.rglob("*")):
        if path.is_file():
            digest.update(f"{path.relative_to(directory)}\n{path.stat().st_size}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def parse_object(data: bytes) -> dict[str, object]:
    """Return the JSON object in `data`; raises ValueError, also for repeated keys and NaN."""
    try:
        parsed = json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(parsed, dict):
        raise ValueError("it is not a JSON object")
    return parsed


def is_count(value: object) -> bool:
    """True if a parsed value is an integer from 0 to 2^63 - 1; false for true and 1.0."""
    return type(value) is int and 0 <= value < 2**63


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        raise ValueError("a key occurs twice in one JSON object")
    return unique


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
