"""Megatron-LM's pair of files: `.bin` has the ids, `.idx` the bounds of sequences and documents.

The current index (MMapIndexedDataset, later IndexedDataset), all little-endian:

    b"MMIDIDX\\0\\0", uint64 version 1, uint8 dtype, uint64 sequences S, uint64 D
    int32 [S] lengths, int64 [S] first bytes, int64 [D] first sequences of the documents, and S

The older index (fairseq's IndexedDataset with documents added):

    b"TNTIDX\\0\\0", uint64: version 1, dtype, bytes per id, sequences S, sizes S, D
    int64 [S + 1] first sizes, int64 [S + 1] first ids, int64 [S] sizes, int64 [D] documents

A sequence is a document or a sentence of one.
"""

import struct
from dataclasses import replace
from pathlib import Path

import numpy as np

from parallel3d.base.errors import DataError
from parallel3d.data.ids.id_file import INTEGERS, TokenFile, column, flat, num_bytes, wrong_size

MAGIC = b"MMIDIDX\0\0"
OLD_MAGIC = b"TNTIDX\0\0"
CODES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
INT64 = np.dtype("<i8")


def index_of(path: str) -> str:
    """Return the path of the index of a `.bin`."""
    return path.removesuffix(".bin") + ".idx"


def read(path: str) -> TokenFile:
    """Return the documents of a `.bin`, according to the `.idx` beside it.

    Raises DataError if one of the two is missing or damaged, or if they do not match.
    """
    index = index_of(path)
    size = num_bytes(path)
    if not Path(index).is_file():
        raise DataError(
            f"{path}: its index {index} does not exist; copy it there, or write both again"
        )
    dtype, lengths, first_bytes, documents = _read(index)
    _check(index, lengths, first_bytes, documents, dtype.itemsize)
    ends = first_bytes + lengths.astype(np.int64) * dtype.itemsize
    if (last := int(ends.max())) != size:
        raise DataError(
            f"{index}: sequence {int(ends.argmax()):,} ends at byte {last:,}, but {path} has"
            f" {size:,} bytes; one of them is truncated, or they do not belong together. Copy both"
            " again"
        )
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    return replace(
        flat(path, dtype),
        # An empty document at the end has no first sequence.
        starts=np.append(first_bytes, 0)[documents[:-1]] // dtype.itemsize,
        lengths=ends[documents[1:]] - ends[documents[:-1]],
    )


def _read(index: str) -> tuple[np.dtype, np.ndarray, np.ndarray, np.ndarray]:
    """Return the type of the ids, each sequence's length in ids and first byte, and `documents`."""
    size = num_bytes(index)
    with open(index, "rb") as file:
        head = file.read(56).ljust(56, b"\0")
    is_old = head.startswith(OLD_MAGIC)
    if is_old:
        _, version, code, _, num_sequences, _, num_documents = struct.unpack("<8s6Q", head)
        firsts = 56 + 8 * (num_sequences + 1)
        lengths = firsts + 8 * (num_sequences + 1)
        documents = lengths + 8 * num_sequences
    elif head.startswith(MAGIC):
        _, version, code, num_sequences, num_documents = struct.unpack_from("<9sQBQQ", head)
        lengths = 34
        firsts = lengths + 4 * num_sequences
        documents = firsts + 8 * num_sequences
    else:
        raise DataError(
            f"{index} is not an index of Megatron-LM: it begins with {head[:9]!r}, neither"
            f' {MAGIC!r} nor {OLD_MAGIC!r}; use the data.source of its format, such as "tokens"'
        )
    if version != 1 or code not in CODES:
        kinds = ", ".join(f"{number} ({name})" for number, name in CODES.items())
        raise DataError(
            f"{index} has version {version} and the dtype code {code}; preprocess the text again"
            f" with a Megatron-LM that writes version 1 and one of {kinds}"
        )
    if size != documents + 8 * num_documents:
        raise wrong_size(index, size, documents + 8 * num_documents)
    dtype = INTEGERS[CODES[code]]
    begins = column(index, INT64, firsts, num_sequences)
    size_type: np.dtype = np.dtype("<i4")
    if is_old:
        begins = begins * dtype.itemsize  # the older index has its offsets in ids
        size_type = INT64
    sizes = column(index, size_type, lengths, num_sequences)
    return dtype, sizes, begins, column(index, INT64, documents, num_documents)


def _check(
    index: str, lengths: np.ndarray, first_bytes: np.ndarray, documents: np.ndarray, width: int
) -> None:
    """Raise DataError unless the sequences of each document are contiguous."""
    count = len(lengths)
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
        raise _damaged(
            index,
            f"sequence {bad:,} begins at byte {first_bytes[bad]} and has {lengths[bad]} ids, but it"
            f" must have whole ids of {width} bytes and follow the one before in its document",
        )


def _damaged(index: str, what: str) -> DataError:
    return DataError(f"{index} is damaged: {what}; preprocess the text again")
