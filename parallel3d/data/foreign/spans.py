"""Documents that lie in other programs' files, as one array of ids that is read when asked for."""

import os
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, BinaryIO

import numpy as np

from parallel3d.data.foreign.files import INTEGERS, open_ids, read_ids, unreadable
from parallel3d.errors import DataError

OPEN_FILES = 64


class Spans:
    """Ids [num_tokens] of documents one after the other, each closed by an end-of-text.

    `files` are name, path, dtype, offset and size of each; document i is the ids of file
    `places[i]` from the `starts[i]`-th on, and here `bounds[i]` .. `bounds[i + 1]` - 1, where its
    end-of-text is the last. Slices and arrays of indices give arrays. Any thread may ask. Read, not
    mapped: a file that shrinks raises DataError, where a map would end the process.
    """

    def __init__(
        self,
        *,
        files: Sequence[dict[str, Any]],
        places: np.ndarray,
        starts: np.ndarray,
        bounds: np.ndarray,
        end_of_text: int,
        dtype: np.dtype,
    ) -> None:
        self.dtype, self.shape, self.ndim = np.dtype(dtype), (int(bounds[-1] - bounds[0]),), 1
        self._files, self._places, self._starts, self._bounds = files, places, starts, bounds
        self._end_of_text = end_of_text
        self._open = lru_cache(OPEN_FILES)(self._opened)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> np.ndarray:
        if isinstance(key, slice):
            first, last, step = key.indices(len(self))
            if step == 1:
                return self._read(first, max(first, last))
            key = np.arange(first, last, step)
        index = np.asarray(key)
        flat = index.reshape(-1)
        flat = np.where(flat < 0, flat + len(self), flat)
        if len(flat) and not 0 <= flat.min() <= flat.max() < len(self):
            raise IndexError(f"index {key} is out of bounds for {len(self)} ids")
        ids = np.empty(len(flat), self.dtype)
        # Windows are asked for: what follows on each other is read at once.
        cuts = np.flatnonzero(np.diff(flat) != 1) + 1
        edges = [0, *cuts.tolist(), len(flat)] if len(flat) else [0]
        for begin, end in pairwise(edges):
            ids[begin:end] = self._read(int(flat[begin]), int(flat[begin]) + end - begin)
        return ids.reshape(index.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        ids = self[:]
        return ids if dtype is None else ids.astype(dtype)

    def _read(self, first: int, last: int) -> np.ndarray:
        ids = np.empty(last - first, self.dtype)
        base = int(self._bounds[0])
        document = int(np.searchsorted(self._bounds, base + first, side="right")) - 1
        done = 0
        while done < len(ids):
            begin, end = (int(bound) - base for bound in self._bounds[document : document + 2])
            skipped = first + done - begin
            count = min(end - 1 - begin - skipped, len(ids) - done)
            if count:
                ids[done : done + count] = self._of_file(document, skipped, count)
                done += count
            if done < len(ids):
                ids[done] = self._end_of_text
                done += 1
            document += 1
        return ids

    def _of_file(self, document: int, skipped: int, count: int) -> np.ndarray:
        number = int(self._places[document])
        file = self._files[number]
        dtype = INTEGERS[file["dtype"]]
        start = file["offset"] + (int(self._starts[document]) + skipped) * dtype.itemsize
        return read_ids(self._open(number), file["name"], dtype=dtype, start=start, count=count)

    def _opened(self, number: int) -> BinaryIO:
        # Closed when it is neither kept nor read from any more.
        return open_ids(self._files[number]["path"], self._files[number]["name"])


def check_sizes(files: Sequence[dict[str, Any]]) -> None:
    """Raise DataError unless each file is there with the size that it had."""
    for file in files:
        try:
            size = os.stat(file["path"]).st_size
        except OSError as error:
            raise unreadable(file["name"], error) from error
        if size != file["size"]:
            raise DataError(
                f"{file['name']} has {size:,} bytes, and had {file['size']:,} when it was prepared;"
                " restore it, or run launch/prepare.py again"
            )
