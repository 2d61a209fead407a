"""Flat arrays of ids, in which an end-of-text ends each document.

- without a header, as numpy's memmap and tofile, and so OLMo-core and Dolma, write them (they call
  them `.npy`);
- numpy's own `.npy`, of one dimension;
- llm.c's `.bin`: 256 int32 (a magic number, a version, the number of ids), then the ids. There an
  end-of-text *begins* each document, which is the same but for the first and the last one.
"""

from typing import BinaryIO

import numpy as np

from parallel3d.base.errors import DataError
from parallel3d.data.ids.id_file import INTEGERS, TokenFile, cut_short, flat, num_bytes, open_head

NUMPY = b"\x93NUMPY"
# llm.c: magic number: (version, type of the ids).
LLM_C = {20240520: (1, "uint16"), 20240801: (7, "uint32")}
LLM_C_QUESTIONS = 20240522
HEADER = 1024


def read(path: str, dtype: np.dtype) -> TokenFile:
    """Return the ids of a flat array, without its documents; `dtype` is for one without a header.

    Raises DataError for a header that is not known, or a file of another length than it says.
    """
    size = num_bytes(path)
    with open_head(path) as file:
        head = file.read(HEADER)
        if head.startswith(NUMPY):
            file.seek(0)
            return _read_numpy(path, file, size)
    if len(head) >= 12:
        magic, version, count = (int(n) for n in np.frombuffer(head[:12], "<i4"))
        if magic in LLM_C or magic == LLM_C_QUESTIONS:
            return _read_llm_c(path, magic, version, count, size)
    return flat(path, dtype)


def _read_numpy(path: str, file: BinaryIO, size: int) -> TokenFile:
    from numpy.lib import format as npy

    try:
        version = npy.read_magic(file)
        read_header = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
        shape, _, dtype = read_header[version](file)
    except (ValueError, KeyError, OSError, EOFError) as error:
        raise DataError(
            f"{path} begins like a .npy file, and its header cannot be read ({error}); write it"
            " again with numpy.save"
        ) from error
    if len(shape) != 1 or dtype.kind not in "iu":
        raise DataError(
            f"{path} holds {dtype} {list(shape)}; write whole numbers of one dimension, such as"
            " uint16 [ids]"
        )
    if dtype.newbyteorder("<") != dtype:
        raise DataError(
            f"{path} holds {dtype}, big-endian; write it again as {dtype.newbyteorder('<')}"
        )
    return _file(path, file.tell(), shape[0], dtype, size)


def _read_llm_c(path: str, magic: int, version: int, count: int, size: int) -> TokenFile:
    if magic == LLM_C_QUESTIONS:
        raise DataError(
            f"{path} is llm.c's file of questions (magic number {magic}), no text to train on;"
            " leave it out of data.paths"
        )
    known, name = LLM_C[magic]
    if version != known:
        raise DataError(
            f"{path} has llm.c's magic number {magic} and version {version}, and {known} is the one"
            " that is known; write it with an llm.c of that version"
        )
    return _file(path, HEADER, count, INTEGERS[name], size)


def _file(path: str, offset: int, count: int, dtype: np.dtype, size: int) -> TokenFile:
    """Return the file with `count` ids behind a header; raises DataError if its size is another."""
    if size != (whole := offset + count * dtype.itemsize):
        raise cut_short(path, size, whole)
    if not count:
        raise DataError(f"{path} has no ids; write it again, or leave it out of data.paths")
    return TokenFile(path=path, name=path, dtype=dtype, offset=offset, num_tokens=count, size=size)
