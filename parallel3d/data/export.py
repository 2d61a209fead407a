"""Export of a corpus to Megatron-LM's files, which are verified before they get their names."""

import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from parallel3d.base.atomic import rename, sync
from parallel3d.base.errors import DataError
from parallel3d.base.reader import JsonObject
from parallel3d.data.corpus import Corpus, TokenStream
from parallel3d.data.ids import megatron
from parallel3d.data.ids.id_file import BLOCK, INTEGERS, blocks

# Megatron-LM uses uint16 for vocabularies smaller than this, otherwise int32.
UINT16_LIMIT = 65500
CODE = {name: code for code, name in megatron.CODES.items()}


def export_megatron(corpus: Corpus, prefix: str) -> list[JsonObject]:
    """Write PREFIX.bin and PREFIX.idx, for a mixture PREFIX_0.bin and so on.

    Each document is a sequence that ends with end-of-text. Training documents come first; passing
    "split" as Megatron-LM's `--split` separates the two parts. Returns a summary of each pair.
    Raises DataError if a file exists or cannot be written.
    """
    parts = corpus.parts or (corpus,)
    prefixes = [prefix]
    if corpus.parts:
        prefixes = [f"{prefix}_{number}" for number in range(len(parts))]
    for name in prefixes:
        for path in (f"{name}.bin", f"{name}.idx"):
            if os.path.lexists(path):
                raise DataError(f"{path} exists; remove it, or use another prefix")
    try:
        return [_write(*pair) for pair in zip(parts, prefixes, strict=True)]
    except OSError as error:
        raise DataError(
            f"{prefix}.bin cannot be written ({error.strerror or error}); use a prefix in an"
            " existing, writable folder with enough space"
        ) from error


def _write(corpus: Corpus, prefix: str) -> JsonObject:
    streams = corpus.stream("train"), corpus.stream("held_out")
    dtype = INTEGERS["uint16" if corpus.vocab_size < UINT16_LIMIT else "int32"]
    lengths = np.concatenate([np.diff(stream.bounds) for stream in streams])
    partial = Path(f"{prefix}.partial.bin")
    index = Path(megatron.index_of(str(partial)))
    try:
        with open(partial, "wb") as file:
            for ids in _ids(streams):
                ids.astype(dtype).tofile(file)
        index.write_bytes(_index(lengths, dtype))
        _read_back(partial, streams, lengths)
        for path in (partial, index):
            sync(path)
        # The index last, since the ids are not readable without it.
        rename(partial, Path(f"{prefix}.bin"))
        rename(index, Path(f"{prefix}.idx"))
    finally:
        for path in (partial, index):
            with suppress(OSError):
                path.unlink()
    return {
        "prefix": prefix,
        "dtype": dtype.name,
        "num_documents": len(lengths),
        "num_tokens": int(lengths.sum()),
        "split": ",".join(str(stream.num_documents) for stream in streams) + ",0",
    }


def _ids(streams: Sequence[TokenStream]) -> Iterator[np.ndarray]:
    for stream in streams:
        for first in range(0, len(stream), BLOCK):
            yield stream.tokens[first : first + BLOCK]


def _index(lengths: np.ndarray, dtype: np.dtype) -> bytes:
    ends = np.cumsum(lengths, dtype=np.int64) * dtype.itemsize
    count = len(lengths)
    head = megatron.MAGIC + struct.pack("<QBQQ", 1, CODE[dtype.name], count, count + 1)
    begins = (ends - lengths * dtype.itemsize).astype("<i8")
    columns = lengths.astype("<i4"), begins, np.arange(count + 1, dtype="<i8")
    return head + b"".join(column.tobytes() for column in columns)


def _read_back(path: Path, streams: Sequence[TokenStream], lengths: np.ndarray) -> None:
    """Raise DataError unless the written pair contains exactly these documents."""
    file = megatron.read(str(path))
    assert file.lengths is not None, "an index has documents"
    first = 0
    same = np.array_equal(file.lengths, lengths)
    for ids in _ids(streams):
        # At most BLOCK ids, which are read as one block.
        same = same and all(np.array_equal(block, ids) for block in blocks(file, first, len(ids)))
        first += len(ids)
    if not same or first != file.num_tokens:
        raise DataError(
            f"{path} differs from the data that was written; the disk or the memory is faulty."
            " Write to another disk"
        )
