"""Flat arrays of ids in which each document ends with an end-of-text.

- without a header, as written by numpy's memmap and tofile, OLMo-core and Dolma (which name them
  `.npy`)
- numpy's own `.npy`, one-dimensional
- llm.c's `.bin`: 256 int32 (magic number, version, number of ids), then the ids. Here an
  end-of-text *begins* each document, which differs only for the first and the last one.
"""

from typing import BinaryIO

import numpy as np

from parallel3d.base.errors import DataError
from parallel3d.data.ids.id_file import INTEGERS, TokenFile, flat, num_bytes, open_head, wrong_size

NUMPY = b"\x93NUMPY"
# llm.c's magic numbers: (version, type of the ids).
LLM_C = {20240520: (1, "uint16"), 20240801: (7, "uint32")}
LLM_C_EVALUATION = 20240522
HEADER = 1024


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
        if magic in LLM_C or magic == LLM_C_EVALUATION:
            return _read_llm_c(path, magic, version, count, size)
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
    if len(shape) != 1 or dtype.kind not in "iu":
        raise DataError(
            f"{path} contains {dtype} {list(shape)}, not a one-dimensional array of integers; write"
            " it again as uint16 or uint32 [ids]"
        )
    if dtype.newbyteorder("<") != dtype:
        raise DataError(
            f"{path} contains {dtype}, which is big-endian; write it again as"
            f" {dtype.newbyteorder('<')}"
        )
    return _file(path, file.tell(), shape[0], dtype, size)


def _read_llm_c(path: str, magic: int, version: int, count: int, size: int) -> TokenFile:
    if magic == LLM_C_EVALUATION:
        raise DataError(
            f"{path} is an evaluation file of llm.c (magic number {magic}), not training text;"
            " remove it from data.paths"
        )
    known, name = LLM_C[magic]
    if version != known:
        raise DataError(
            f"{path} has llm.c's magic number {magic} and version {version}; only version {known}"
            " is supported. Write it with an llm.c of that version"
        )
    return _file(path, HEADER, count, INTEGERS[name], size)


def _file(path: str, offset: int, count: int, dtype: np.dtype, size: int) -> TokenFile:
    """Return the file with `count` ids after a header; raise DataError if the size differs."""
    if size != (expected := offset + count * dtype.itemsize):
        raise wrong_size(path, size, expected)
    if not count:
        raise DataError(f"{path} has no ids; write it again, or leave it out of data.paths")
    return TokenFile(path=path, name=path, dtype=dtype, offset=offset, num_tokens=count, size=size)
