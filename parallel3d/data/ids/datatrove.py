"""datatrove's files of ids, which nanotron trains on: `NAME.ds` and what stands beside it.

`NAME.ds` is uint16, or uint32 for a vocabulary above 65536, without a header; `NAME.ds.index` the
documents' ends in ids, uint64; `NAME.ds.metadata` three lines: `tokenizer|bytes an id`, the number
of ids, and the same for people.
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

BESIDE = (".index", ".metadata", ".loss")


def read(path: str, dtype: np.dtype) -> TokenFile:
    """Return the documents of a `.ds`; without an index, an end-of-text ends each.

    `dtype` is for a file without metadata. Raises DataError if the parts do not fit together.
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
        raise DataError(f"{index} is no list of uint64: it is cut short; copy it again")
    ends = column(index, np.dtype("<u8"), 0, count)
    last = int(ends[-1])
    if (ends[1:] < ends[:-1]).any():
        raise DataError(f"{index}: its ends do not ascend: it is damaged; write it again")
    width = next((w for w in (2, 4) if w * last == size), 0)
    if not last or not width:
        raise DataError(
            f"{index} ends at id {last:,}, and {path} has {size:,} bytes, neither 2 nor 4 for each:"
            " one of the two is cut short, or they do not belong together; copy both again"
        )
    _compare(path, num_tokens, last)
    ends = ends.astype(np.int64)
    starts = np.concatenate([[0], ends[:-1]])
    file = flat(path, INTEGERS[f"uint{8 * width}"])
    return replace(file, starts=starts, lengths=ends - starts)


def _metadata(path: str) -> tuple[int | None, int]:
    """Return the number of ids and the bytes of each that NAME.ds.metadata has; else None and 0."""
    beside = f"{path}.metadata"
    if not is_file(beside):
        return None, 0
    with open_head(beside) as file:
        lines = file.read(2**16).decode(errors="replace").split("\n")
    name, _, width = lines[0].rpartition("|")
    count = lines[1].strip() if len(lines) > 1 else ""
    if not count.isdecimal():
        raise DataError(
            f"{beside}: its second line is {count!r}, not the number of ids; remove the file, or"
            " write it again"
        )
    # Older versions name the tokenizer alone.
    return int(count), int(width) if name and width in ("2", "4") else 0


def _compare(path: str, said: int | None, found: int) -> None:
    if said is not None and said != found:
        raise DataError(
            f"{path}.metadata says {said:,} ids, and {path} has {found:,}: one of the two is cut"
            " short, or they do not belong together; copy both again"
        )
