"""Flat arrays of ids, in which each document ends with an end-of-text, or which have an index.

- without a header, as written by numpy's memmap and tofile, OLMo-core and Dolma (which name them
  `.npy`)
- numpy's own `.npy`, one-dimensional
- llm.c's `.bin`: 256 int32 (magic number, version, number of ids), then the ids. Here an
  end-of-text *begins* each document, which differs only for the first and the last one.
- datatrove's, which nanotron trains on:

      NAME.ds             ids without a header; uint16, or uint32 for a vocabulary above 65536
      NAME.ds.index       uint64 [documents]: the documents' ends, counted in ids
"""

from dataclasses import replace
from pathlib import Path

import numpy as np

from parallel3d.base.errors import DataError
from parallel3d.data.ids.id_file import (
    INTEGERS,
    TokenFile,
    column,
    flat,
    num_bytes,
    unreadable,
    wrong_size,
)

NUMPY = b"\x93NUMPY"
# llm.c's magic number and version, and the type of the ids.
LLM_C = {(20240520, 1): "uint16", (20240801, 7): "uint32"}
HEADER = 1024


def read(path: str, dtype: np.dtype) -> TokenFile:
    """Return the ids of a flat array; `dtype` is used if it has no header.

    Documents are found later, among the ids. Raises DataError if the header cannot be read, or if
    the file's size differs from the header's.
    """
    size = num_bytes(path)
    with open(path, "rb") as file:
        head = file.read(HEADER)
    if head.startswith(NUMPY):
        return _read_numpy(path, size)
    magic, version, count = np.frombuffer(head[:12].ljust(12, b"\0"), "<i4").tolist()
    if (magic, version) in LLM_C:
        return _file(path, HEADER, count, INTEGERS[LLM_C[magic, version]], size)
    return flat(path, dtype)


def _read_numpy(path: str, size: int) -> TokenFile:
    try:
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise unreadable(path, error) from error
    # Broad: numpy parses the header as Python, and passes on any error of its tokenizer and parser.
    except Exception as error:
        reason = next((text for text in error.args if isinstance(text, str)), repr(error))
        raise DataError(
            f"{path} begins like a .npy file, but cannot be read ({reason.splitlines()[0][:200]});"
            " write it again with numpy.save"
        ) from error
    dtype = ids.dtype
    if ids.ndim != 1 or dtype.kind not in "iu" or dtype.newbyteorder("<") != dtype:
        raise DataError(
            f"{path} contains {dtype} {list(ids.shape)}, not a one-dimensional, little-endian array"
            " of integers; write it again as uint16 or uint32 [ids]"
        )
    return _file(path, ids.offset, len(ids), dtype, size)


def _file(path: str, offset: int, count: int, dtype: np.dtype, size: int) -> TokenFile:
    """Return the file with `count` ids after a header; raise DataError if the size differs."""
    expected = offset + count * dtype.itemsize
    if size != expected:
        raise wrong_size(path, size, expected)
    return TokenFile(path=path, name=path, dtype=dtype, offset=offset, num_tokens=count, size=size)


def read_datatrove(path: str, dtype: np.dtype) -> TokenFile:
    """Return the documents of a `.ds`; without an index, each ends with an end-of-text.

    `dtype` is used if there is no index. Raises DataError if the files do not match.
    """
    size = num_bytes(path)
    index = f"{path}.index"
    if not Path(index).is_file():
        return flat(path, dtype)
    count, rest = divmod(num_bytes(index), 8)
    ends = column(index, np.dtype("<u8"), 0, count)
    last = int(ends[-1]) if count else 0
    if rest or not last or (ends[1:] < ends[:-1]).any():
        raise DataError(
            f"{index} is truncated or damaged: its document ends are not ascending numbers of 8"
            " bytes; copy it again"
        )
    width = size / last
    if width not in (2, 4):
        raise DataError(
            f"{index} ends at id {last:,}, but {path} has {size:,} bytes, neither 2 nor 4 per"
            " id; one is truncated, or they do not belong together. Copy both again"
        )
    starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    file = flat(path, INTEGERS["uint16" if width == 2 else "uint32"])
    return replace(file, starts=starts, lengths=ends.astype(np.int64) - starts)
