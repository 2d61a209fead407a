"""Begins and ends of documents in a stream, on the disk, for any number of documents."""

from typing import Any, Literal

import numpy as np


class DocumentBounds:
    """Bounds of documents, int64 [documents + 1], counted from the first bound, which is 0 here.

    `of` is a map of the disk that counts from elsewhere. What is asked for is read and shifted; all
    of it only as an array (8 bytes a document).
    """

    def __init__(self, of: np.ndarray) -> None:
        self._of, self._first = of, of[0]

    def __len__(self) -> int:
        return len(self._of)

    def __getitem__(self, key: Any) -> Any:
        return self._of[key] - self._first

    def searchsorted(self, places: Any, side: Literal["left", "right"] = "left") -> Any:
        """Search as numpy's searchsorted does, reading a few pages of the map."""
        return self._of.searchsorted(np.asarray(places) + self._first, side)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[:], dtype)
