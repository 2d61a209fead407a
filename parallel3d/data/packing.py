"""Best-fit packing: samples of whole documents, of which none is cut that fits into a sample.

Each document, with its end-of-text, is one piece; a document longer than a sample is cut into
pieces of a sample's length and a rest. The pieces are put into samples by best-fit decreasing (Ding
et al. 2024, arXiv:2404.10830): the longest first, each into the sample with the least room that
holds it. As in samples without packing, each token of the stream is predicted once an epoch, from
the token before it. The places that remain are padding, which does not count in the loss.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from parallel3d.data.facts import Facts
from parallel3d.data.order import bounds_of

# Part of the cache key; raise it when the same documents are packed differently.
FORMAT = 1
_ARRAYS = ("starts", "lengths", "firsts")


@dataclass(frozen=True, eq=False)
class Packing:
    """The pieces of documents in each sample of a stream.

    - `starts` int64, `lengths` int32 [pieces]: the first token and the size of each piece
    - `firsts` int64 [samples + 1]: sample i has the pieces firsts[i] .. firsts[i + 1] - 1
    - `room`: places of padding that follow each piece
    """

    sequence_length: int
    room: int
    starts: np.ndarray
    lengths: np.ndarray
    firsts: np.ndarray

    @classmethod
    def make(cls, bounds: np.ndarray, sequence_length: int, room: int = 0) -> "Packing":
        """Return the packing of documents with these bounds, int64 [documents + 1]."""
        most = sequence_length - room
        sizes = np.diff(bounds)
        sizes[-1] -= 1  # no token follows the last one
        counts = -(-sizes // most)
        document = np.repeat(np.arange(len(sizes)), counts)
        before = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
        before *= most  # tokens of the document in earlier pieces
        lengths = np.minimum(sizes[document] - before, most)
        samples, num_samples = best_fit(lengths + room, sequence_length)
        order = np.argsort(samples, kind="stable")
        pieces = np.bincount(samples, minlength=num_samples)
        return cls(
            sequence_length,
            room,
            (bounds[document] + before)[order],
            lengths[order].astype(np.int32),
            bounds_of(pieces),
        )

    def __len__(self) -> int:
        return len(self.firsts) - 1

    def save(self, folder: Path) -> None:
        """Write the arrays to `folder`."""
        for name in _ARRAYS:
            np.save(folder / f"{name}.npy", getattr(self, name), allow_pickle=False)

    @classmethod
    def open(cls, folder: Path, sequence_length: int, room: int) -> "Packing":
        """Return the packing that was saved in `folder`, memory-mapped."""
        paths = (folder / f"{name}.npy" for name in _ARRAYS)
        return cls(
            sequence_length,
            room,
            *(np.load(path, mmap_mode="r", allow_pickle=False) for path in paths),
        )

    def positions(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the places of samples [n] in the stream, and the number of each place's piece.

        Both int64 [n, sequence_length]. Padding has the place -1, and is one piece.
        """
        shape = len(samples), self.sequence_length
        places = np.full(shape, -1)
        pieces = np.empty(shape, dtype=np.int64)
        for row, sample in enumerate(samples.tolist()):
            own = slice(*self.firsts[sample : sample + 2].tolist())
            lengths = self.lengths[own].astype(np.int64)
            numbers = np.repeat(np.arange(len(lengths)), lengths + self.room)
            begins = np.cumsum(lengths + self.room) - lengths - self.room
            within = np.arange(len(numbers)) - begins[numbers]
            places[row, : len(numbers)] = np.where(
                within < lengths[numbers], self.starts[own][numbers] + within, -1
            )
            pieces[row] = len(lengths)
            pieces[row, : len(numbers)] = numbers
        return places, pieces

    def lengths_in(self, sample: int) -> np.ndarray:
        """Return the places of each piece of a sample, with its room; padding is the last piece."""
        lengths = self.lengths[slice(*self.firsts[sample : sample + 2].tolist())] + self.room
        return np.append(lengths, self.sequence_length - lengths.sum()).astype(np.int64)

    def padding(self, samples: np.ndarray) -> int:
        """Return the number of places of samples [n] that are padding."""
        ends = [self.firsts[samples], self.firsts[samples + 1]]
        used = sum(int(self.lengths[a:b].sum()) for a, b in zip(*ends, strict=True))
        return len(samples) * self.sequence_length - used

    def add_facts(self, facts: Facts, bounds: np.ndarray) -> Facts:
        """Add the number of samples, and the shares of padding and of cut documents.

        - `bounds`: int64 [documents + 1], those of the documents.
        """
        cut = np.diff(bounds) > self.sequence_length - self.room
        places = max(1, len(self) * self.sequence_length)
        return replace(
            facts,
            packed_samples=len(self),
            packed_padding_share=1 - int(self.lengths.sum(dtype=np.int64)) / places,
            packed_cut_share=float(cut.mean()),
        )


def best_fit(sizes: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """Return the bin of each item, int64 [n], and the number of bins, by best-fit decreasing.

    `sizes` [n] are from 1 to `capacity`. Items of one size are placed together: if the fullest bin
    that holds one has the room r, it takes r // size of them in turn, because it stays the fullest.
    So the work is a sort, and a step for each pair of a size and a room that meet. Of bins with
    the same room, the one that got there last is used first.
    """
    bins = np.empty(len(sizes), dtype=np.int64)
    num_bins = 0
    order = np.argsort(-sizes, kind="stable")
    open_bins: list[list[np.ndarray]] = [[] for _ in range(capacity + 1)]  # by room
    has_bins = np.zeros(capacity + 1, dtype=bool)
    distinct, firsts = np.unique(-sizes[order], return_index=True)

    def put(room: int, some: np.ndarray) -> None:
        if room and len(some):
            open_bins[room].append(some)
            has_bins[room] = True

    for size, items in zip((-distinct).tolist(), np.split(order, firsts[1:]), strict=False):
        while len(items):
            room = size + int(has_bins[size:].argmax())
            if has_bins[room]:
                candidates = open_bins[room].pop()
                has_bins[room] = bool(open_bins[room])
            else:
                room = capacity
                count = -(-len(items) // (capacity // size))
                candidates = np.arange(num_bins + count - 1, num_bins - 1, -1)
                num_bins += count
            each = room // size
            count = -(-len(items) // each)  # bins that are needed
            put(room, candidates[:-count])
            used = candidates[-count:][::-1]
            filled = np.repeat(used, each)[: len(items)]
            bins[items[: len(filled)]] = filled
            items = items[len(filled) :]
            in_last = len(filled) - (len(used) - 1) * each
            put(room - each * size, used[:-1] if in_last < each else used)
            if in_last < each:
                put(room - in_last * size, used[-1:])
    return bins, num_bins
