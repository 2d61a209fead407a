"""Export of a corpus to files of Megatron-LM, read back before they get their names."""

import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from parallel3d.base.atomic import rename, sync
from parallel3d.base.errors import DataError
from parallel3d.data.corpus import Corpus, TokenStream
from parallel3d.data.ids import megatron
from parallel3d.data.ids.id_file import BLOCK, INTEGERS, blocks
from parallel3d.data.sources import Progress, silent

# Megatron-LM takes uint16 for fewer tokens than this, else int32.
MOST_OF_UINT16 = 65500
MOST_IDS = 2**31 - 1  # of a sequence, whose length is an int32
CODE = {name: code for code, name in megatron.CODES.items()}


def export_megatron(
    corpus: Corpus, prefix: str, progress: Progress = silent
) -> list[dict[str, Any]]:
    """Write PREFIX.bin and PREFIX.idx, or of a mixture PREFIX_0 and so on; return their facts.

    Each document is a sequence that ends with end-of-text, training documents first: Megatron-LM's
    `--split` with the two numbers in "split" separates them. Raises DataError if a file exists, or
    cannot be written.
    """
    parts = corpus.parts or (corpus,)
    prefixes = [f"{prefix}_{i}" for i in range(len(parts))] if corpus.parts else [prefix]
    for name in prefixes:
        for path in (f"{name}.bin", f"{name}.idx"):
            if os.path.lexists(path):
                raise DataError(f"{path} exists; remove it, or name another prefix")
    try:
        return [_write(*pair, progress) for pair in zip(parts, prefixes, strict=True)]
    except OSError as error:
        raise DataError(
            f"{prefix}.bin cannot be written ({error.strerror or error}); name a prefix in a folder"
            " that exists, is writable and has room"
        ) from error


def _write(corpus: Corpus, prefix: str, progress: Progress) -> dict[str, Any]:
    streams = corpus.stream("train"), corpus.stream("held_out")
    dtype = INTEGERS["uint16" if corpus.vocab_size < MOST_OF_UINT16 else "int32"]
    lengths = np.concatenate([np.diff(stream.bounds) for stream in streams])
    if lengths.max() > MOST_IDS:
        raise DataError(
            f"document {int(lengths.argmax()) + 1} has {lengths.max():,} tokens, and a sequence of"
            f" Megatron-LM has at most {MOST_IDS:,}; cut it into several"
        )
    partial = Path(f"{prefix}.partial.bin")
    index = Path(megatron.index_of(str(partial)))
    phase, total = f"writing {prefix}.bin (M ids)", corpus.num_tokens // 10**6
    try:
        with open(partial, "wb") as file:
            done = 0
            for ids in _ids(streams):
                ids.astype(dtype).tofile(file)
                done += len(ids)
                progress(phase, done // 10**6, max(1, total))
        index.write_bytes(_index(lengths, dtype))
        _read_back(partial, streams, lengths)
        for path in (partial, index):
            sync(path)
        # The index last: without it nobody reads the other.
        rename(partial, Path(f"{prefix}.bin"))
        rename(index, Path(f"{prefix}.idx"))
    finally:
        for path in (partial, index):
            with suppress(OSError):
                path.unlink(missing_ok=True)
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
    """Raise DataError unless the pair that was written holds the documents."""
    file = megatron.read(str(path))
    assert file.lengths is not None, "an index has documents"
    first, same = 0, np.array_equal(file.lengths, lengths)
    for ids in _ids(streams):
        # Not more than a block, which comes in one piece.
        same = same and all(np.array_equal(found, ids) for found in blocks(file, first, len(ids)))
        first += len(ids)
    if not same or first != file.num_tokens:
        raise DataError(
            f"{path} does not read back as it was written; the disk or its memory is damaged: write"
            " to another one"
        )
