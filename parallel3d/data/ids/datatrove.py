"""datatrove's files of ids, which nanotron trains on.

NAME.ds             ids without a header; uint16, or uint32 for a vocabulary above 65536
NAME.ds.index       uint64 [documents]: the documents' ends, counted in ids
NAME.ds.metadata    three lines: `tokenizer|bytes per id`, the number of ids, and the same number
                    in readable form
"""

from dataclasses import replace

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
)

COMPANIONS = (".index", ".metadata", ".loss")


def read(path: str, dtype: np.dtype) -> TokenFile:
    """Return the documents of a `.ds`; without an index, each ends with an end-of-text.

    `dtype` is used if there is no metadata. Raises DataError if the files do not match.
    """
    size = num_bytes(path)
    num_tokens, width = _metadata(path)
    index = f"{path}.index"
    if not is_file(index):
        file = flat(path, INTEGERS[f"uint{8 * width}"] if width else dtype)
        _compare(path, num_tokens, file.num_tokens)
        return file
    count, rest = divmod(num_bytes(index), 8)
    if rest:
        raise DataError(f"{index} is truncated (not a multiple of 8 bytes); copy it again")
    ends = column(index, np.dtype("<u8"), 0, count)
    last = int(ends[-1])
    if (ends[1:] < ends[:-1]).any():
        raise DataError(f"{index} is damaged: its document ends are not ascending; write it again")
    width = next((w for w in (2, 4) if w * last == size), 0)
    if not last or not width:
        raise DataError(
            f"{index} ends at id {last:,}, but {path} has {size:,} bytes, neither 2 nor 4 per id;"
            " one is truncated, or they do not belong together. Copy both again"
        )
    _compare(path, num_tokens, last)
    ends = ends.astype(np.int64)
    starts = np.concatenate([[0], ends[:-1]])
    file = flat(path, INTEGERS[f"uint{8 * width}"])
    return replace(file, starts=starts, lengths=ends - starts)


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


def _compare(path: str, expected: int | None, actual: int) -> None:
    if expected is not None and expected != actual:
        raise DataError(
            f"{path} has {actual:,} ids, but {path}.metadata says {expected:,}; one is truncated,"
            " or they do not belong together. Copy both again"
        )
