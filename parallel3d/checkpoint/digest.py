"""Hashes of what a checkpoint holds."""

from pathlib import Path

import xxhash


class Digest:
    """The 128-bit XXH3 hash of the bytes given to `update`, piece by piece."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def update(self, buffer: bytes | bytearray | memoryview) -> None:
        """Add the next bytes to the hash."""
        self._state.update(buffer)

    def hexdigest(self) -> str:
        """32 hexadecimal digits of all bytes so far."""
        return self._state.hexdigest()


def digest_of(buffer: bytes | bytearray | memoryview) -> str:
    """The hash of one buffer, as a `Digest` fed with the buffer gives it."""
    digest = Digest()
    digest.update(buffer)
    return digest.hexdigest()


def tokenizer_digest(directory: Path) -> str:
    """The digest of a tokenizer's meaning of tokens, as state.json stores it."""
    digest = Digest()
    # Beside it there are names of classes and versions, which differ between libraries' versions.
    whole = directory / "tokenizer.json"
    for path in [whole] if whole.is_file() else sorted(directory.rglob("*")):
        if path.is_file():
            digest.update(f"{path.relative_to(directory)}\n{path.stat().st_size}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()
