"""Chunks of a checkpoint that are read and hashed in one pass."""

from pathlib import Path

from torch import Tensor
from xxhash import xxh3_128

from parallel3d.base.errors import CheckpointError
from parallel3d.checkpoint.chunks import Chunk, ChunkFile, memory_of
from parallel3d.checkpoint.manifest import Entry
from parallel3d.checkpoint.safe_files import open_file

_READ_BYTES = 2**20


class HashedChunks:
    """A file of chunks whose bytes are hashed, in order, as chunks are read.

    Chunks read in the order of the file are hashed in memory, so their bytes are read from disk
    only once; chunks that were skipped are read again for the hash. No file stays open.
    """

    def __init__(self, path: Path, entry: Entry) -> None:
        """Read the header; raises CheckpointError if it is not a safetensors file of chunks.

        - `entry`: the file's size and digest in the manifest.
        """
        self.path = path
        with ChunkFile(path) as file:
            self.chunks = file.chunks
        self._entry = entry
        self._digest = xxh3_128()
        self._done = 0

    def read(self, chunk: Chunk, out: Tensor) -> None:
        """Read a complete chunk into `out`, as `ChunkFile.read` does."""
        at = self.chunks[chunk]
        hashed = out.is_contiguous() and out.device.type == "cpu" and at >= self._done
        if hashed:
            self._hash_to(at)
        with ChunkFile(self.path, {chunk: at}) as file:
            file.read(chunk, chunk.box, out)
        if hashed:
            self._digest.update(memory_of(out))
            self._done += out.nbytes

    def check(self) -> str:
        """Hash the rest of the file and return how it differs from its entry; "" if it does not.

        Raises CheckpointError if it cannot be read.
        """
        self._hash_to(self._entry.size + 1)
        if self._done != self._entry.size or self._digest.hexdigest() != self._entry.digest:
            return "its contents do not match the manifest (a damaged disk or copy)"
        return ""

    def _hash_to(self, stop: int) -> None:
        """Hash up to byte `stop`, or to the end of the file."""
        if self._done >= stop:
            return
        buffer = memoryview(bytearray(min(_READ_BYTES, stop - self._done)))
        try:
            descriptor, _ = open_file(self.path)
            with open(descriptor, "rb", buffering=0) as file:
                file.seek(self._done)
                while count := file.readinto(buffer[: stop - self._done]):
                    self._digest.update(buffer[:count])
                    self._done += count
        except OSError as error:
            raise CheckpointError(
                f"{self.path}: cannot be read: {error.strerror or error}"
            ) from None
