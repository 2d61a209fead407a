"""Documents in other programs' files, presented as one array of ids that is read on demand.

Weights of tokens in the loss are read in the same way, from columns beside the ids.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import TypedDict

import numpy as np
from numpy.typing import ArrayLike

from parallel3d.base.errors import DataError
from parallel3d.data.ids import arrow
from parallel3d.data.ids.id_file import (
    NUMBERS,
    TokenFile,
    column,
    num_bytes,
    spread,
    unreadable,
)

OPEN_FILES = 64
IGNORED = -100
"""The label of a token without loss."""
_NUM_COMPARED = 256  # documents of a file whose labels are compared with its ids


class SpanFile(TypedDict):
    """A file of ids, as a corpus's meta.json lists it; `offset` and `size` are in bytes."""

    name: str
    path: str
    dtype: str
    offset: int
    size: int


class IdArray(ABC):
    """An array of ids [num_tokens] that is read on demand.

    Index with slices, or arrays of indices from 0. Thread-safe.
    """

    dtype: np.dtype
    shape: tuple[int]

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: slice | ArrayLike) -> np.ndarray:
        if isinstance(key, slice):
            first, last, _ = key.indices(len(self))
            return self._read([(first, max(first, last))])
        index = np.asarray(key)
        flat = index.reshape(-1)
        assert not len(flat) or 0 <= flat.min() <= flat.max() < len(self), "out of bounds"
        # Indices usually come in windows; read runs of consecutive indices together.
        runs = np.split(flat, np.flatnonzero(np.diff(flat) != 1) + 1)
        windows = [(int(run[0]), int(run[-1]) + 1) for run in runs if len(run)]
        return self._read(windows).reshape(index.shape)

    @abstractmethod
    def _read(self, windows: Sequence[tuple[int, int]]) -> np.ndarray:
        """Return the ids first .. last - 1 of all windows, concatenated."""


class Spans(IdArray):
    """The ids [num_tokens] of consecutive documents, each followed by an end-of-text.

    - `places`, `starts` [documents]: document i begins at id `starts[i]` of file `places[i]`
    - `bounds` [documents + 1]: document i is `bounds[i]` .. `bounds[i + 1]` - 1 of this array
    - `end_of_text`: what follows each document; None if the files have it, after each

    Files are read instead of memory-mapped, so that one that shrinks or cannot be read raises
    DataError; with a map it would kill the process.
    """

    def __init__(
        self,
        *,
        files: Sequence[SpanFile],
        places: np.ndarray,
        starts: np.ndarray,
        bounds: np.ndarray,
        end_of_text: int | None,
        dtype: np.dtype,
    ) -> None:
        self.dtype = np.dtype(dtype)
        self.shape = (int(bounds[-1] - bounds[0]),)
        self._files = files
        self._places = places
        self._starts = starts
        self._bounds = bounds
        self._end_of_text = end_of_text
        # Closed by the garbage collector, after it has left the cache and all reads have ended.
        self._open = lru_cache(OPEN_FILES)(partial(open, mode="rb", buffering=0))

    def _read_file(self, number: int, start: int, count: int) -> np.ndarray:
        """Return `count` ids of a file from the `start`-th on. Thread-safe."""
        file = self._files[number]
        dtype = NUMBERS[self._files[number]["dtype"]]
        place = file["offset"] + start * dtype.itemsize
        try:
            opened = self._open(file["path"])
            data = os.pread(opened.fileno(), count * dtype.itemsize, place)
        except OSError as error:
            raise unreadable(file["name"], error) from error
        if len(data) < count * dtype.itemsize:
            raise DataError(
                f"{file['name']} has {os.fstat(opened.fileno()).st_size:,} bytes, but its documents"
                " extend further; it shrank since it was prepared. Write it again"
            )
        return np.frombuffer(data, dtype)

    def _read(self, windows: Sequence[tuple[int, int]]) -> np.ndarray:
        size = sum(last - first for first, last in windows)
        ids = np.full(size, self._end_of_text or 0, self.dtype)
        at = 0
        for first, last in windows:
            for number, start, begin, count in self._pieces(first, last):
                ids[at + begin : at + begin + count] = self._read_file(number, start, count)
            at += last - first
        return ids

    def _pieces(self, first: int, last: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield (file, first id there, position in the window, number of ids) of its documents."""
        base = int(self._bounds[0])
        document = int(np.searchsorted(self._bounds, base + first, side="right")) - 1
        end = int(np.searchsorted(self._bounds, base + last, side="left"))
        bounds = self._bounds[document : end + 1] - base
        begins = np.maximum(bounds[:-1], first)
        ends = bounds[1:] if self._end_of_text is None else bounds[1:] - 1
        counts = np.minimum(ends, last) - begins
        starts = self._starts[document:end] + begins - bounds[:-1]
        columns = self._places[document:end], starts, begins - first, np.maximum(counts, 0)
        return zip(*(values.tolist() for values in columns), strict=True)


def check_sizes(files: Sequence[SpanFile]) -> None:
    """Raise DataError unless each file exists and still has its size."""
    for file in files:
        size = num_bytes(file["path"])
        if size != file["size"]:
            raise DataError(
                f"{file['name']} has {size:,} bytes, but had {file['size']:,} when it was prepared;"
                " restore it, or run `parallel3d prepare` again"
            )


class TokenWeights:
    """The weight of each token of a stream in the loss, as float32.

    `numbers` are the weights, or labels with the weight 0 where they are IGNORED and otherwise 1.
    Indexing raises DataError for a weight below 0 or not finite.
    """

    def __init__(self, numbers: Spans, are_labels: bool) -> None:
        self._numbers = numbers
        self._are_labels = are_labels

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
    """Return the numbers beside a file's ids, a column of an Arrow file.

    Raises DataError if there are none, or if they do not match the ids.
    """
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
    all_ids = column(ids.path, ids.dtype, ids.offset, ids.num_tokens)
    all_labels = column(labels.path, labels.dtype, labels.offset, labels.num_tokens)

    for row in spread(len(ids.lengths), _NUM_COMPARED):
        tokens = all_ids[ids.starts[row] :][: ids.lengths[row]]
        targets = all_labels[labels.starts[row] :][: ids.lengths[row]]
        if ((targets != IGNORED) & (targets != tokens)).any():
            raise DataError(
                f'{ids.name}, row {row + 1}: column "{field}" differs from the token ids; each'
                f" label must be the id of its own token, or {IGNORED} (training shifts the labels)"
            )
