"""Megatron-LM's pair of files: `.bin` holds ids, `.idx` where sequences and documents begin.

Of today (MMapIndexedDataset, later IndexedDataset), all little-endian:

    b"MMIDIDX\\0\\0", uint64 version 1, uint8 dtype, uint64 sequences S, uint64 D
    int32 [S] lengths, int64 [S] first bytes, int64 [D] first sequences of the documents, and S

and of before (IndexedDataset of fairseq with the documents added):

    b"TNTIDX\\0\\0", uint64: version 1, dtype, bytes an id, sequences S, sizes N, D
    int64 [S + 1] first sizes, int64 [S + 1] first ids, int64 [N] sizes, int64 [D] documents

A sequence is a document, or one of its sentences.
"""

import struct
from dataclasses import dataclass, replace

import numpy as np

from parallel3d.base.errors import DataError
from parallel3d.data.ids.id_file import (
    INTEGERS,
    TokenFile,
    column,
    cut_short,
    flat,
    is_file,
    num_bytes,
    open_head,
)

MAGIC, OLD_MAGIC = b"MMIDIDX\0\0", b"TNTIDX\0\0"
CODES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
INT64 = np.dtype("<i8")


def index_of(path: str) -> str:
    """Return the index that belongs to a `.bin`."""
    return path.removesuffix(".bin") + ".idx"


def read(path: str) -> TokenFile:
    """Return the documents of a `.bin`, whose `.idx` stands beside it.

    Raises DataError if one of the two is not there, damaged, or does not belong to the other.
    """
    index, size = index_of(path), num_bytes(path)
    if not is_file(index):
        raise DataError(
            f"{path} has no index {index} beside it; copy it there, or write both again"
        )
    total = num_bytes(index)
    with open_head(index) as file:
        head = file.read(64)
    if head.startswith(MAGIC):
        found = _read(index, head, total)
    elif head.startswith(OLD_MAGIC):
        found = _read_old(index, head, total)
    else:
        raise DataError(
            f"{index} begins with {head[:9]!r}, neither {MAGIC!r} nor {OLD_MAGIC!r}: it is no index"
            ' of Megatron-LM; use the data.source of its format, such as "tokens"'
        )
    _check(index, found, path, size)
    documents = found.documents
    ends = np.concatenate([[0], np.cumsum(found.lengths, dtype=np.int64)])
    return replace(
        flat(path, found.dtype),
        # A document of no sequence begins nowhere.
        starts=np.append(found.first_bytes, 0)[documents[:-1]] // found.dtype.itemsize,
        lengths=ends[documents[1:]] - ends[documents[:-1]],
    )


@dataclass(frozen=True, eq=False)
class _Index:
    """Each sequence's ids and first byte; each document's first sequence, and their number."""

    dtype: np.dtype
    lengths: np.ndarray
    first_bytes: np.ndarray
    documents: np.ndarray


def _read(index: str, head: bytes, total: int) -> _Index:
    layout = struct.Struct("<9sQBQQ")
    if total < layout.size:
        raise cut_short(index, total, layout.size)
    _, version, code, num_sequences, num_documents = layout.unpack_from(head)
    dtype = _dtype(index, version, code)
    whole = layout.size + 12 * num_sequences + 8 * num_documents
    if total == whole + num_sequences and num_sequences:
        raise DataError(
            f"{index} has a mode for each sequence: it is multimodal, which is not read; prepare"
            " the text alone"
        )
    if total != whole:
        raise cut_short(index, total, whole)
    lengths = column(index, np.dtype("<i4"), layout.size, num_sequences)
    firsts = column(index, INT64, layout.size + 4 * num_sequences, num_sequences)
    documents = column(index, INT64, layout.size + 12 * num_sequences, num_documents)
    return _Index(dtype=dtype, lengths=lengths, first_bytes=firsts, documents=documents)


def _read_old(index: str, head: bytes, total: int) -> _Index:
    layout = struct.Struct("<8s6Q")
    if total < layout.size:
        raise cut_short(index, total, layout.size)
    _, version, code, size, num_sequences, num_sizes, num_documents = layout.unpack_from(head)
    dtype = _dtype(index, version, code)
    whole = layout.size + 8 * (2 * (num_sequences + 1) + num_sizes + num_documents)
    if total != whole:
        raise cut_short(index, total, whole)
    if num_sizes != num_sequences or size != dtype.itemsize:
        raise DataError(
            f"{index} has {num_sizes:,} sizes for {num_sequences:,} sequences and {size} bytes an"
            f" id of {dtype.name}: its items are no lists of ids; preprocess the text again"
        )
    at = layout.size + 8 * (num_sequences + 1)
    firsts = column(index, INT64, at, num_sequences + 1)
    lengths = column(index, INT64, at + 8 * (num_sequences + 1), num_sizes)
    if not np.array_equal(np.diff(firsts), lengths):
        raise _damaged(index, "its sizes are not those between its offsets")
    documents = column(index, INT64, whole - 8 * num_documents, num_documents)
    return _Index(dtype=dtype, lengths=lengths, first_bytes=firsts[:-1] * size, documents=documents)


def _dtype(index: str, version: int, code: int) -> np.dtype:
    if version != 1:
        raise DataError(
            f"{index} has version {version}, and 1 is the one that is known; preprocess the text"
            " with a Megatron-LM that writes it"
        )
    if code not in CODES:
        kinds = ", ".join(f"{code} ({name})" for code, name in CODES.items())
        raise DataError(
            f"{index} has the dtype {code}, which holds no ids; preprocess the text again, with one"
            f" of {kinds}"
        )
    return INTEGERS[CODES[code]]


def _check(index: str, found: _Index, path: str, size: int) -> None:
    """Raise DataError unless the index is one of `path`, and its documents lie in one piece."""
    lengths, first_bytes, documents = found.lengths, found.first_bytes, found.documents
    count, dtype = len(lengths), found.dtype
    if not count:
        raise DataError(f"{index} has no sequence; preprocess the text again, or leave it out")
    if documents[:1].tolist() != [0] or documents[-1] != count or (np.diff(documents) < 0).any():
        raise _damaged(index, f"its documents do not ascend from sequence 0 to {count:,}")
    ends = first_bytes + lengths.astype(np.int64) * dtype.itemsize
    wrong = (lengths < 0) | (first_bytes < 0) | (first_bytes % dtype.itemsize != 0)
    if wrong.any():
        bad = int(wrong.argmax())
        place = f"sequence {bad:,} begins at byte {first_bytes[bad]} and has {lengths[bad]} ids"
        raise _damaged(index, place)
    if (last := int(ends.max())) != size:
        which = "holds more than it says"
        if last > size:
            which = "is cut short, or belongs to another index"
        raise DataError(
            f"{index}: sequence {int(ends.argmax()):,} ends at byte {last:,} of {path}, which has"
            f" {size:,}: that {which}; copy both again"
        )
    follows = np.zeros(count, dtype=bool)
    follows[documents[:-1][documents[:-1] < count]] = True
    apart = ~follows[1:] & (first_bytes[1:] != ends[:-1])
    if apart.any():
        place = f"sequence {int(apart.argmax()) + 1:,}"
        raise _damaged(index, f"{place} does not follow on the one before in the same document")


def _damaged(index: str, what: str) -> DataError:
    return DataError(f"{index}: {what}: it is damaged; preprocess the text again")
