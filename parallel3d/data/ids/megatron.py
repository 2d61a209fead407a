"""Megatron-LM's pair of files: `.bin` has the ids, `.idx` the bounds of sequences and documents.

The current index (MMapIndexedDataset, later IndexedDataset), all little-endian:

    b"MMIDIDX\\0\\0", uint64 version 1, uint8 dtype, uint64 sequences S, uint64 D
    int32 [S] lengths, int64 [S] first bytes, int64 [D] first sequences of the documents, and S

The older index (fairseq's IndexedDataset with documents added):

    b"TNTIDX\\0\\0", uint64: version 1, dtype, bytes per id, sequences S, sizes N, D
    int64 [S + 1] first sizes, int64 [S + 1] first ids, int64 [N] sizes, int64 [D] documents

A sequence is a document or a sentence of one.
"""

import struct
from dataclasses import dataclass, replace

import numpy as np

from parallel3d.base.errors import DataError
from parallel3d.data.ids.id_file import (
    INTEGERS,
    TokenFile,
    column,
    flat,
    is_file,
    num_bytes,
    open_head,
    wrong_size,
)

MAGIC, OLD_MAGIC = b"MMIDIDX\0\0", b"TNTIDX\0\0"
CODES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
INT64 = np.dtype("<i8")


def index_of(path: str) -> str:
    """Return the path of the index of a `.bin`."""
    return path.removesuffix(".bin") + ".idx"


def read(path: str) -> TokenFile:
    """Return the documents of a `.bin`, according to the `.idx` beside it.

    Raises DataError if one of the two is missing or damaged, or if they do not match.
    """
    index, size = index_of(path), num_bytes(path)
    if not is_file(index):
        raise DataError(
            f"{path}: its index {index} does not exist; copy it there, or write both again"
        )
    total = num_bytes(index)
    with open_head(index) as file:
        head = file.read(64)
    if head.startswith(MAGIC):
        parsed = _read(index, head, total)
    elif head.startswith(OLD_MAGIC):
        parsed = _read_old(index, head, total)
    else:
        raise DataError(
            f"{index} is not an index of Megatron-LM: it begins with {head[:9]!r}, neither"
            f' {MAGIC!r} nor {OLD_MAGIC!r}; use the data.source of its format, such as "tokens"'
        )
    _check(index, parsed, path, size)
    documents = parsed.documents
    ends = np.concatenate([[0], np.cumsum(parsed.lengths, dtype=np.int64)])
    return replace(
        flat(path, parsed.dtype),
        # An empty document at the end has no first sequence.
        starts=np.append(parsed.first_bytes, 0)[documents[:-1]] // parsed.dtype.itemsize,
        lengths=ends[documents[1:]] - ends[documents[:-1]],
    )


@dataclass(frozen=True, eq=False)
class _Index:
    """Lengths in ids and first bytes of sequences [S]; first sequences of documents, and S [D]."""

    dtype: np.dtype
    lengths: np.ndarray
    first_bytes: np.ndarray
    documents: np.ndarray


def _read(index: str, head: bytes, total: int) -> _Index:
    layout = struct.Struct("<9sQBQQ")
    if total < layout.size:
        raise wrong_size(index, total, layout.size)
    _, version, code, num_sequences, num_documents = layout.unpack_from(head)
    dtype = _dtype(index, version, code)
    expected = layout.size + 12 * num_sequences + 8 * num_documents
    if total == expected + num_sequences and num_sequences:
        raise DataError(
            f"{index} is multimodal (it has a mode for each sequence), which is not supported;"
            " preprocess only the text"
        )
    if total != expected:
        raise wrong_size(index, total, expected)
    lengths = column(index, np.dtype("<i4"), layout.size, num_sequences)
    firsts = column(index, INT64, layout.size + 4 * num_sequences, num_sequences)
    documents = column(index, INT64, layout.size + 12 * num_sequences, num_documents)
    return _Index(dtype=dtype, lengths=lengths, first_bytes=firsts, documents=documents)


def _read_old(index: str, head: bytes, total: int) -> _Index:
    layout = struct.Struct("<8s6Q")
    if total < layout.size:
        raise wrong_size(index, total, layout.size)
    _, version, code, size, num_sequences, num_sizes, num_documents = layout.unpack_from(head)
    dtype = _dtype(index, version, code)
    expected = layout.size + 8 * (2 * (num_sequences + 1) + num_sizes + num_documents)
    if total != expected:
        raise wrong_size(index, total, expected)
    if num_sizes != num_sequences or size != dtype.itemsize:
        raise DataError(
            f"{index} has {num_sizes:,} sizes for {num_sequences:,} sequences, and {size} bytes per"
            f" id of {dtype.name}; its items are not lists of ids. Preprocess the text again"
        )
    at = layout.size + 8 * (num_sequences + 1)
    firsts = column(index, INT64, at, num_sequences + 1)
    lengths = column(index, INT64, at + 8 * (num_sequences + 1), num_sizes)
    if not np.array_equal(np.diff(firsts), lengths):
        raise _damaged(index, "sizes differ from the distances of the offsets")
    documents = column(index, INT64, expected - 8 * num_documents, num_documents)
    return _Index(dtype=dtype, lengths=lengths, first_bytes=firsts[:-1] * size, documents=documents)


def _dtype(index: str, version: int, code: int) -> np.dtype:
    if version != 1:
        raise DataError(
            f"{index} has version {version}; only version 1 is supported. Preprocess the text with"
            " a Megatron-LM that writes it"
        )
    if code not in CODES:
        kinds = ", ".join(f"{code} ({name})" for code, name in CODES.items())
        raise DataError(
            f"{index} has the dtype code {code}, which is not an integer type; preprocess the text"
            f" again with one of {kinds}"
        )
    return INTEGERS[CODES[code]]


def _check(index: str, parsed: _Index, path: str, size: int) -> None:
    """Raise DataError unless the index matches `path`, and each document is contiguous."""
    lengths, first_bytes, documents = parsed.lengths, parsed.first_bytes, parsed.documents
    count, width = len(lengths), parsed.dtype.itemsize
    if not count:
        raise DataError(f"{index} has no sequences; preprocess the text again, or remove the file")
    if documents[:1].tolist() != [0] or documents[-1] != count or (np.diff(documents) < 0).any():
        raise _damaged(index, f"document bounds do not ascend from sequence 0 to {count:,}")
    ends = first_bytes + lengths.astype(np.int64) * width
    follows = first_bytes == np.concatenate([[0], ends[:-1]])
    follows[documents[:-1][documents[:-1] < count]] = True  # the first sequences of documents
    wrong = (lengths < 0) | (first_bytes < 0) | (first_bytes % width != 0) | ~follows
    if wrong.any():
        bad = int(wrong.argmax())
        where = f"begins at byte {first_bytes[bad]} and has {lengths[bad]} ids"
        rule = f"it must have whole ids of {width} bytes and follow the one before in its document"
        raise _damaged(index, f"sequence {bad:,} {where}, but {rule}")
    if (last := int(ends.max())) != size:
        raise DataError(
            f"{index}: sequence {int(ends.argmax()):,} ends at byte {last:,}, but {path} has"
            f" {size:,} bytes; one of them is truncated, or they do not belong together. Copy both"
            " again"
        )


def _damaged(index: str, what: str) -> DataError:
    return DataError(f"{index} is damaged: {what}; preprocess the text again")
