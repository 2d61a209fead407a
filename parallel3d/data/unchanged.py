"""The files of a prepared corpus, which must stay as they are while a run reads them."""

import os
from dataclasses import dataclass
from pathlib import Path

from parallel3d.base.errors import DataError
from parallel3d.data.corpus import Corpus

_MAPPED = ("tokens.bin", "bounds.bin", "starts.bin", "weight_starts.bin", "places.npy")


@dataclass(frozen=True)
class _OpenFile:
    path: Path
    descriptor: int
    size: int
    changed_ns: int
    """The time of the last change, in nanoseconds."""


class OpenFiles:
    """The memory-mapped files of a corpus, as they were when a run opened them.

    Reading a map whose file was truncated would end the process without a message. Files that are
    moved or removed stay readable, and are no error.
    """

    def __init__(self, corpus: Corpus) -> None:
        self._files = []
        for part in corpus.parts or (corpus,):
            for name in _MAPPED:
                path = part.directory / name
                if path.exists():
                    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                    status = os.fstat(descriptor)
                    file = _OpenFile(path, descriptor, status.st_size, status.st_mtime_ns)
                    self._files.append(file)

    def check(self) -> None:
        """Raise DataError if a file was changed since it was opened: a few microseconds each."""
        for file in self._files:
            status = os.fstat(file.descriptor)
            if (status.st_size, status.st_mtime_ns) == (file.size, file.changed_ns):
                continue
            what = "was written to"
            if status.st_size < file.size:
                what = f"was truncated from {file.size:,} to {status.st_size:,} bytes"
            raise DataError(
                f"{file.path} {what} while the run read it; the last checkpoint is good. Remove "
                f"the folder {file.path.parent}, and start the same command again"
            )

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            os.close(file.descriptor)
        self._files = []
