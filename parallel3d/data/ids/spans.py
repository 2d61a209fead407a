"""Documents in other programs' files, presented as one array of ids that is read on demand.

Weights of tokens in the loss are read in the same way, from columns or files beside the ids.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import TypedDict

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from parallel3d.base.errors import DataError
from parallel3d.data.ids import arrow
from parallel3d.data.ids.id_file import (
    NUMBERS,
    Range,
    RemoteFiles,
    TokenFile,
    blocks,
    is_file,
    is_url,
    num_bytes,
    open_ids,
    read_ids,
)

OPEN_FILES = 64
BYTE = np.dtype(np.uint8)
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

    Index with slices or arrays of indices. Thread-safe.
    """

    dtype: np.dtype
    shape: tuple[int]
    ndim = 1

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: slice | ArrayLike) -> np.ndarray:
        if isinstance(key, slice):
            first, last, step = key.indices(len(self))
            if step == 1:
                return self._read([(first, max(first, last))])
            key = np.arange(first, last, step)
        index = np.asarray(key)
        flat = index.reshape(-1)
        flat = np.where(flat < 0, flat + len(self), flat)
        if len(flat) and not 0 <= flat.min() <= flat.max() < len(self):
            raise IndexError(f"index {key} is out of bounds for {len(self)} ids")
        # Indices usually come in windows; read runs of consecutive indices together.
        cuts = np.flatnonzero(np.diff(flat) != 1) + 1
        edges = [0, *cuts.tolist(), len(flat)] if len(flat) else [0]
        windows = [(int(flat[a]), int(flat[a]) + b - a) for a, b in pairwise(edges)]
        return self._read(windows).reshape(index.shape)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        ids = self[:]
        return ids if dtype is None else ids.astype(dtype)

    @abstractmethod
    def _read(self, windows: Sequence[tuple[int, int]]) -> np.ndarray:
        """Return the ids first .. last - 1 of all windows, concatenated."""


class Spans(IdArray):
    """The ids [num_tokens] of consecutive documents, each followed by an end-of-text.

    - `places`, `starts` [documents]: document i begins at id `starts[i]` of file `places[i]`
    - `bounds` [documents + 1]: document i is `bounds[i]` .. `bounds[i + 1]` - 1 of this array
    - `remote`: reads the files that are URLs; all ranges of one index are requested together

    Files are read instead of memory-mapped, so that a file that shrinks raises DataError; with a
    map it would kill the process.
    """

    def __init__(
        self,
        *,
        files: Sequence[SpanFile],
        places: np.ndarray,
        starts: np.ndarray,
        bounds: np.ndarray,
        end_of_text: int,
        dtype: np.dtype,
        remote: RemoteFiles,
    ) -> None:
        self.dtype, self.shape = np.dtype(dtype), (int(bounds[-1] - bounds[0]),)
        self._files, self._places, self._starts, self._bounds = files, places, starts, bounds
        self._end_of_text, self._remote = end_of_text, remote
        self._dtypes = [NUMBERS[file["dtype"]] for file in files]
        self._sizes = np.array([dtype.itemsize for dtype in self._dtypes], np.int64)
        self._offsets = np.array([file["offset"] for file in files], np.int64)
        self._names = {file["path"]: file["name"] for file in files}
        self._is_remote = [is_url(file["path"]) for file in files]
        # Closed by the garbage collector, after it has left the cache and all reads have ended.
        self._open = lru_cache(OPEN_FILES)(lambda path: open_ids(path, self._names[path]))

    def _read(self, windows: Sequence[tuple[int, int]]) -> np.ndarray:
        ids = np.full(sum(last - first for first, last in windows), self._end_of_text, self.dtype)
        pieces, at = [], 0
        for first, last in windows:
            pieces += self._pieces(first, last, at)
            at += last - first
        for is_remote, read in ((False, self._read_local), (True, self._remote.read)):
            chosen = [piece for piece in pieces if self._is_remote[piece[0]] == is_remote]
            contents: Sequence[bytes | np.ndarray] = (
                read([span for _, _, span in chosen]) if chosen else []
            )
            for (number, place, _), data in zip(chosen, contents, strict=True):
                part = np.frombuffer(data, self._dtypes[number])
                ids[place : place + len(part)] = part
        return ids

    def _pieces(self, first: int, last: int, at: int) -> list[tuple[int, int, Range]]:
        """Return (file, position, range) of a window's parts; its first id has position `at`."""
        base = int(self._bounds[0])
        document = int(np.searchsorted(self._bounds, base + first, side="right")) - 1
        end = int(np.searchsorted(self._bounds, base + last, side="left"))
        bounds = self._bounds[document : end + 1] - base
        begins = np.maximum(bounds[:-1], first)
        counts = np.minimum(bounds[1:] - 1, last) - begins
        some = np.flatnonzero(counts > 0)
        numbers = self._places[document:end][some]
        starts = (self._starts[document:end] + begins - bounds[:-1])[some]
        begins, sizes = begins[some] - first + at, self._sizes[numbers]
        bytes_ = self._offsets[numbers] + starts * sizes
        ends = bytes_ + counts[some] * sizes
        columns = numbers.tolist(), begins.tolist(), bytes_.tolist(), ends.tolist()
        return [
            (number, place, Range(self._files[number]["path"], *span))
            for number, place, *span in zip(*columns, strict=True)
        ]

    def _read_local(self, ranges: Sequence[Range]) -> list[np.ndarray]:
        return [
            read_ids(
                self._open(path), self._names[path], dtype=BYTE, start=start, count=end - start
            )
            for path, start, end in ranges
        ]


def check_sizes(files: Sequence[SpanFile]) -> None:
    """Raise DataError unless each local file exists and still has its size."""
    for file in files:
        if is_url(file["path"]):
            continue
        if (size := num_bytes(file["path"])) != file["size"]:
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
        self._numbers, self._are_labels = numbers, are_labels

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
