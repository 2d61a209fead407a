"""How much tokens count in the loss: what stands beside ids in other programs' files."""

from dataclasses import replace
from typing import Any

import numpy as np

from parallel3d.base.errors import DataError
from parallel3d.data.ids import arrow
from parallel3d.data.ids.id_file import NUMBERS, TokenFile, blocks, is_file, num_bytes
from parallel3d.data.ids.spans import Spans

IGNORED = -100
"""The label of a token that does not count."""
_LOOKED_AT = 256  # documents of a file


class TokenWeights:
    """How much each token of a stream counts, float32: `numbers` themselves, or labels.

    A label counts 1 unless it is IGNORED. Raises DataError for a weight below 0.
    """

    def __init__(self, numbers: Spans, are_labels: bool) -> None:
        self._numbers, self._are_labels = numbers, are_labels

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, key: Any) -> np.ndarray:
        found: np.ndarray = self._numbers[key]
        if self._are_labels:
            counts: np.ndarray = found != IGNORED
            return counts.astype(np.float32)
        if not np.isfinite(found).all() or found.min(initial=0) < 0:
            raise DataError(
                f"data.weight_field: holds {found.min()}, no weight; write numbers from 0 on"
            )
        return found.astype(np.float32)


def beside_ids(ids: TokenFile, field: str, are_labels: bool) -> TokenFile:
    """Return the numbers beside a file's ids: a column of an Arrow file, or NAME.ds.`field`.

    Raises DataError where there is none, or it does not belong to these ids.
    """
    if ids.path.endswith(".ds"):
        path = f"{ids.path}.{field}"
        if not is_file(path):
            raise DataError(
                f"{path} is not there, and data.weight_field = {field!r} asks for it; write it, or"
                " remove weight_field"
            )
        if (size := num_bytes(path)) != ids.num_tokens:
            raise DataError(
                f"{path} has {size:,} bytes, and {ids.path} {ids.num_tokens:,} ids: not a byte for"
                " each; write it again"
            )
        return replace(ids, path=path, name=path, dtype=NUMBERS["uint8"], offset=0, size=size)
    found = arrow.read(ids.path, ids.name, field, kinds=NUMBERS)
    assert found.lengths is not None and ids.lengths is not None
    unlike = np.flatnonzero(found.lengths != ids.lengths)
    if len(unlike):
        row = int(unlike[0])
        raise DataError(
            f'{ids.name}, row {row + 1}: column "{field}" has {found.lengths[row]:,} numbers for'
            f" {ids.lengths[row]:,} ids; write one for each"
        )
    if are_labels:
        _compare(ids, found, field)
    return found


def _compare(ids: TokenFile, labels: TokenFile, field: str) -> None:
    """Raise DataError where labels are not their tokens' own ids, but perhaps moved by one."""
    assert ids.starts is not None and ids.lengths is not None and labels.starts is not None
    count = len(ids.lengths)
    for row in np.unique(np.linspace(0, count - 1, min(count, _LOOKED_AT)).astype(np.int64)):
        length = int(ids.lengths[row])
        if not length:
            continue
        mine, theirs = (
            np.concatenate([*blocks(file, int(file.starts[row]), length)]).astype(np.int64)  # type: ignore[index]
            for file in (ids, labels)
        )
        if ((theirs != IGNORED) & (theirs != mine)).any():
            raise DataError(
                f'{ids.name}, row {row + 1}: column "{field}" has other ids than the tokens it'
                f" stands beside; write each token's own id, or {IGNORED} (they are moved to the"
                " token before here)"
            )
