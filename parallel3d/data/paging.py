"""Prefetch of pages of a memory-mapped file that will be read soon."""

import mmap

import numpy as np


def will_need(array: np.ndarray, starts: np.ndarray, count: int) -> None:
    """Ask the system to prefetch the `count` items from each of `starts` [n], if memory-mapped.

    It reads them while this goes on; a gather of them then waits for the disk once, not at each
    page that is not in memory. On arrays in memory it does nothing.
    """
    whole = array
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    mapped = whole.base
    if not isinstance(mapped, mmap.mmap) or not hasattr(mmap, "MADV_WILLNEED"):
        return
    # The map's own first byte: np.memmap begins some way into it where its offset says so.
    first = array.ctypes.data - np.frombuffer(mapped, np.uint8).ctypes.data
    size = count * array.itemsize
    for start in (first + starts * array.itemsize).tolist():
        page = start - start % mmap.PAGESIZE
        mapped.madvise(mmap.MADV_WILLNEED, page, start + size - page)
