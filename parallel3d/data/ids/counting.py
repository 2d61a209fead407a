"""Weights of tokens in the loss, read from columns or files beside the ids."""

from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from parallel3d.base.errors import DataError
from parallel3d.data.ids import arrow
from parallel3d.data.ids.id_file import NUMBERS, TokenFile, blocks, is_file, num_bytes
from parallel3d.data.ids.spans import Spans

IGNORED = -100
"""The label of a token without loss."""
_NUM_COMPARED = 256  # documents of a file whose labels are compared with its ids


class TokenWeights:
    """The weight of each token of a stream in the loss, as float32.

    `numbers` are the weights, or labels with the weight 0 where they are IGNORED and otherwise 1.
    Indexing raises DataError for a weight below 0 or not finite.
    """

    def __init__(self, numbers: Spans, are_labels: bool) -> None:
        self._numbers, self._are_labels = numbers, are_labels

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, key: slice | ArrayLike) -> np.ndarray:
        numbers: np.ndarray = self._numbers[key]
        if self._are_labels:
            counts: np.ndarray = numbers != IGNORED
            return counts.astype(np.float32)
        if not np.isfinite(numbers).all() or numbers.min(initial=0) < 0:
            raise DataError(
                f"data.weight_field: contains {numbers.min()}; weights must be finite and >= 0"
            )
        return numbers.astype(np.float32)


def beside_ids(ids: TokenFile, field: str, are_labels: bool) -> TokenFile:
    """Return the numbers beside a file's ids: a column of an Arrow file, or NAME.ds.`field`.

    Raises DataError if there are none, or if they do not match the ids.
    """
    if ids.path.endswith(".ds"):
        path = f"{ids.path}.{field}"
        if not is_file(path):
            raise DataError(
                f"{path} does not exist; data.weight_field = {field!r} requires it. Create it, or"
                " remove weight_field"
            )
        if (size := num_bytes(path)) != ids.num_tokens:
            raise DataError(
                f"{path} has {size:,} bytes, but must have one byte for each of the"
                f" {ids.num_tokens:,} ids of {ids.path}; write it again"
            )
        return replace(ids, path=path, name=path, dtype=NUMBERS["uint8"], offset=0, size=size)
    numbers = arrow.read(ids.path, ids.name, field, kinds=NUMBERS)
    assert numbers.lengths is not None and ids.lengths is not None
    unlike = np.flatnonzero(numbers.lengths != ids.lengths)
    if len(unlike):
        row = int(unlike[0])
        raise DataError(
            f'{ids.name}, row {row + 1}: column "{field}" has {numbers.lengths[row]:,} numbers for'
            f" {ids.lengths[row]:,} ids; write one number per id"
        )
    if are_labels:
        _compare(ids, numbers, field)
    return numbers


def _compare(ids: TokenFile, labels: TokenFile, field: str) -> None:
    """Raise DataError if labels differ from their tokens' ids, for example if shifted by one."""
    assert ids.starts is not None and ids.lengths is not None and labels.starts is not None
    count = len(ids.lengths)
    for row in np.unique(np.linspace(0, count - 1, min(count, _NUM_COMPARED)).astype(np.int64)):
        length = int(ids.lengths[row])
        if not length:
            continue
        tokens, targets = (
            np.concatenate([*blocks(file, int(file.starts[row]), length)]).astype(np.int64)  # type: ignore[index]
            for file in (ids, labels)
        )
        if ((targets != IGNORED) & (targets != tokens)).any():
            raise DataError(
                f'{ids.name}, row {row + 1}: column "{field}" differs from the token ids; each'
                f" label must be the id of its own token, or {IGNORED} (training shifts the labels)"
            )
