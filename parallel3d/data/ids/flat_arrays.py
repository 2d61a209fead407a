"""Flat arrays of ids, in which each document ends with an end-of-text, or which have an index.

- without a header, as written by numpy's memmap and tofile, OLMo-core and Dolma (which name them
  `.npy`)
- numpy's own `.npy`, one-dimensional
- llm.c's `.bin`: 256 int32 (magic number, version, number of ids), then the ids. Here an
  end-of-text *begins* each document, which differs only for the first and the last one.
- datatrove's, which nanotron trains on:

      NAME.ds             ids without a header; uint16, or uint32 for a vocabulary above 65536
      NAME.ds.index       uint64 [documents]: the documents' ends, counted in ids
      NAME.ds.metadata    three lines: `tokenizer|bytes per id`, the number of ids, and the same
                          number in readable form
"""

from dataclasses import replace
from typing import BinaryIO

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

NUMPY = b"\x93NUMPY"
# llm.c's magic numbers: (version, type of the ids); the last one is that of evaluation files.
LLM_C = {20240520: (1, "uint16"), 20240801: (7, "uint32"), 20240522: (None, "")}
HEADER = 1024
COMPANIONS = (".index", ".metadata", ".loss")  # of datatrove's NAME.ds


def read(path: str, dtype: np.dtype) -> TokenFile:
    """Return the ids of a flat array; `dtype` is used if it has no header.

    Documents are found later, among the ids. Raises DataError for an unknown header, or if the
    file's size differs from the header's.
    """
    size = num_bytes(path)
    with open_head(path) as file:
        head = file.read(HEADER)
        if head.startswith(NUMPY):
            file.seek(0)
            return _read_numpy(path, file, size)
    if len(head) >= 12:
        magic, version, count = (int(n) for n in np.frombuffer(head[:12], "<i4"))
        if magic in LLM_C:
            known, name = LLM_C[magic]
            if version != known:
                raise DataError(
                    f"{path} has llm.c's magic number {magic} and version {version}; write it with"
                    " an llm.c of 20240520 and version 1, or 20240801 and version 7 (not for"
                    " evaluation)"
                )
            return _file(path, HEADER, count, INTEGERS[name], size)
    return flat(path, dtype)


def _read_numpy(path: str, file: BinaryIO, size: int) -> TokenFile:
    from numpy.lib import format as npy

    try:
        version = npy.read_magic(file)
        read_header = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
        if version not in read_header:
            raise ValueError(f"unknown format version {version}")
        shape, _, dtype = read_header[version](file)
    # Broad: numpy parses the header as Python, and passes on any error of its tokenizer and parser.
    except Exception as error:
        reason = next((text for text in error.args if isinstance(text, str)), repr(error))
        raise DataError(
            f"{path} begins like a .npy file, but its header cannot be read"
            f" ({reason.splitlines()[0][:200]}); write it again with numpy.save"
        ) from error
    if len(shape) != 1 or dtype.kind not in "iu" or dtype.newbyteorder("<") != dtype:
        raise DataError(
            f"{path} contains {dtype} {list(shape)}, not a one-dimensional, little-endian array of"
            " integers; write it again as uint16 or uint32 [ids]"
        )
    return _file(path, file.tell(), shape[0], dtype, size)


def _file(path: str, offset: int, count: int, dtype: np.dtype, size: int) -> TokenFile:
    """Return the file with `count` ids after a header; raise DataError if the size differs."""
    if size != (expected := offset + count * dtype.itemsize):
        raise wrong_size(path, size, expected)
    if not count:
        raise DataError(f"{path} has no ids; write it again, or leave it out of data.paths")
    return TokenFile(path=path, name=path, dtype=dtype, offset=offset, num_tokens=count, size=size)


def read_datatrove(path: str, dtype: np.dtype) -> TokenFile:
    """Return the documents of a `.ds`; without an index, each ends with an end-of-text.

    `dtype` is used if there is no metadata. Raises DataError if the files do not match.
    """
    size = num_bytes(path)
    expected, width = _metadata(path)
    index = f"{path}.index"
    if is_file(index):
        count, rest = divmod(num_bytes(index), 8)
        ends = column(index, np.dtype("<u8"), 0, count)
        last = int(ends[-1]) if count else 0
        if rest or not last or (ends[1:] < ends[:-1]).any():
            raise DataError(
                f"{index} is truncated or damaged: its document ends are not ascending numbers of 8"
                " bytes; copy it again"
            )
        width = next((w for w in (2, 4) if w * last == size), 0)
        if not width:
            raise DataError(
                f"{index} ends at id {last:,}, but {path} has {size:,} bytes, neither 2 nor 4 per"
                " id; one is truncated, or they do not belong together. Copy both again"
            )
        starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
        file = flat(path, INTEGERS[f"uint{8 * width}"])
        file = replace(file, starts=starts, lengths=ends.astype(np.int64) - starts)
    else:
        file = flat(path, INTEGERS[f"uint{8 * width}"] if width else dtype)
    if expected not in (None, file.num_tokens):
        raise DataError(
            f"{path} has {file.num_tokens:,} ids, but {path}.metadata says {expected:,}; one is"
            " truncated, or they do not belong together. Copy both again"
        )
    return file


def _metadata(path: str) -> tuple[int | None, int]:
    """Return number of ids and bytes per id from NAME.ds.metadata; None and 0 if unknown."""
    metadata = f"{path}.metadata"
    if not is_file(metadata):
        return None, 0
    with open_head(metadata) as file:
        lines = file.read(2**16).decode(errors="replace").split("\n")
    name, _, width = lines[0].rpartition("|")
    count = lines[1].strip() if len(lines) > 1 else ""
    if not count.isdecimal() or len(count) > 20:
        raise DataError(
            f"{metadata}: the second line is {count[:40]!r}, not the number of ids; remove the"
            " file, or write it again"
        )
    # Older versions of datatrove write only the tokenizer's name.
    return int(count), int(width) if name and width in ("2", "4") else 0
