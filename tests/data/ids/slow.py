"""A file system of the protocol "slow" in front of the local one, which counts what it gives."""

import os
import threading
import time
from typing import ClassVar

import fsspec


class SlowFiles(fsspec.AbstractFileSystem):
    """Ranges come at `speed` bytes a second, one after the other; `reads` says who asked."""

    protocol = "slow"
    speed: float | None = None
    reads: ClassVar[list[tuple[str, int, str]]] = []  # file, bytes, thread
    lock = threading.Lock()

    def info(self, path, **options):
        state = os.stat(path)
        kind = "directory" if os.path.isdir(path) else "file"
        return {"name": path, "size": state.st_size, "type": kind, "changed": state.st_mtime_ns}

    def ls(self, path, detail=True, **options):
        found = [self.info(os.path.join(path, name)) for name in sorted(os.listdir(path))]
        return found if detail else [entry["name"] for entry in found]

    def _open(self, path, mode="rb", **options):
        return open(path, mode)

    def cat_file(self, path, start=None, end=None, **options):
        with self.lock, open(path, "rb") as file:
            file.seek(start or 0)
            data = file.read(-1 if end is None else end - file.tell())
            self.reads.append((path, len(data), threading.current_thread().name))
            if self.speed:
                time.sleep(len(data) / self.speed)
            return data


fsspec.register_implementation("slow", SlowFiles, clobber=True)
