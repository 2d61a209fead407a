"""The choice of held-out documents, which depends only on contents, sizes and a seed.

Documents are divided into strata by size, one per power of two. In each stratum the same share of
distinct contents is held out: those with the lowest hash of (seed, content). The held-out part so
has the corpus's distribution of sizes, and does not change when names or order change.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from parallel3d.base.errors import DataError
from parallel3d.data.order import bounds_of, mix

# Stored in checkpoints; raise it when the same corpus is split differently.
SPLIT_FORMAT = 3
Fraction = float | Literal["auto"]
# Fraction "auto": a share of the text; more for few documents, less for very large corpora.
AUTO_SHARE = 0.05
AUTO_DOCUMENTS = 64
AUTO_MOST = 0.1
# Up to twice as much of a small corpus: 64 samples of 1,024 tokens of 4 bytes. A fixed length, not
# the run's own, so that runs hold out the same documents and their losses can be compared.
AUTO_SAMPLES = 64 * 1024 * 4
AUTO_MOST_OF_LITTLE = 0.2
AUTO_BYTES = 2**27
# A document with a larger share of the held-out bytes would dominate the loss.
LARGEST_PART = 1 / 8
# Among few documents, one of usual size stays eligible in spite of LARGEST_PART.
MEDIANS = 4
# The other documents compensate for ineligible large ones by this factor at most. Otherwise, if
# large documents were most of the text, all small ones would be held out and none trained on.
MOST_SHARES = 2


class _Candidates(NamedTuple):
    """The distinct contents of a part, of which some are held out; arrays are [contents]."""

    contents: np.ndarray
    """Their ranks among the contents of all parts."""
    sizes: np.ndarray
    """Bytes of one copy."""
    copies: np.ndarray
    target: float
    """Bytes to hold out, with all copies."""
    eligible: np.ndarray
    """True for those that are not too large."""


def split_documents(
    tables: Sequence[np.ndarray], fraction: Fraction, seed: int = 0
) -> list[np.ndarray]:
    """Return the held-out mask of each part: bool [n] for a table [n] of documents.ENTRY.

    - In each part, `fraction` of the bytes is held out: at least one distinct content, never all.
    - A document is too large to be held out if it exceeds, with its copies, an eighth of the
      held-out bytes and four times the median. Of the others, a share is held out, at most
      2 `fraction` or (1 + `fraction`) / 2, whichever is larger.
    - All copies of a document are on the same side in all parts. A document that is too large in
      one part is not held out in any (unless a part has no other documents).
    - "auto" is 5 %, or the share of 64 documents if that is more. The limit is 10 %, or 20 % where
      that is less than 256 KiB, and 128 MiB in any case. 0 holds out nothing.

    Raises DataError if a part has fewer than two distinct contents. A part of a mixture may have
    nothing left to train on, if all its documents are held out in others.
    """
    if fraction == 0:
        return [np.zeros(len(table), dtype=bool) for table in tables]
    ranks = _ranks(np.concatenate([table["digest"] for table in tables]), seed)
    parts = np.split(ranks, np.cumsum([len(table) for table in tables])[:-1])
    apart = np.zeros(ranks.max() + 1, dtype=bool)
    large = np.zeros(ranks.max() + 1, dtype=bool)
    candidates = []
    for number, (part, table) in enumerate(zip(parts, tables, strict=True)):
        contents, first, copies = np.unique(part, return_index=True, return_counts=True)
        if len(contents) < 2:
            name = "the corpus" if len(parts) == 1 else f"data.mixture.{number}"
            has = "one document"
            if len(part) > 1:
                has = f"{len(part)} documents, all of the same text"
            raise DataError(
                f"{name} has {has},"
                " but the held-out part needs a document of its own; use at least two documents"
                ' with different text (data.documents = "blank_line" or "line" divides a text'
                " file), or hold out nothing with data.held_out_fraction = 0"
            )
        sizes = table["num_bytes"][first]
        # All copies are on the same side, so a text with many copies may be much of the corpus.
        target = _held_out_bytes(sizes * copies, fraction)
        largest = max(LARGEST_PART * target, MEDIANS * np.median(sizes * copies))
        eligible = sizes * copies <= largest
        large[contents[~eligible]] = True
        candidates.append(_Candidates(contents, sizes, copies, target, eligible))
    for own in candidates:
        eligible = own.eligible & ~large[own.contents]
        if not eligible.any():
            eligible = own.eligible
        chosen = _choose(own.sizes, own.copies, own.target, np.flatnonzero(eligible))
        apart[own.contents[chosen]] = True
    return [apart[part] for part in parts]


def num_common(digests: np.ndarray, others: np.ndarray) -> int:
    """Return the number of documents with digests V16 [n] that are also among `others` [m]."""
    here = np.ascontiguousarray(digests).view("<u8").reshape(-1, 2)
    there = np.ascontiguousarray(others).view("<u8").reshape(-1, 2)
    # Compare first halves before building the set: a set of all others would take much memory.
    there = there[np.isin(there[:, 0], here[:, 0])]
    pairs = set(map(tuple, there.tolist()))
    return sum(tuple(pair) in pairs for pair in here.tolist())


def _held_out_bytes(num_bytes: np.ndarray, fraction: Fraction) -> float:
    """Return the number of bytes to hold out of distinct contents of these sizes [n]."""
    total = int(num_bytes.sum())
    if fraction != "auto":
        return fraction * total
    most = max(AUTO_MOST * total, min(AUTO_MOST_OF_LITTLE * total, AUTO_SAMPLES))
    by_number = min(AUTO_DOCUMENTS / len(num_bytes) * total, most)
    return min(max(AUTO_SHARE * total, by_number), AUTO_BYTES)


def _choose(
    num_bytes: np.ndarray, copies: np.ndarray, target: float, eligible: np.ndarray
) -> np.ndarray:
    """Return the indices of the contents to hold out, chosen from the indices `eligible`.

    `num_bytes` [n] and `copies` [n] are in the order of hashes; `target` is in bytes.
    """
    with_copies = num_bytes * copies
    total = int(with_copies.sum())
    part = target / max(1, total)
    share = target / max(1, int(with_copies[eligible].sum()))
    share = max(min(share, MOST_SHARES * part, (1 + part) / 2), 1 / len(eligible))
    strata = np.frexp(num_bytes[eligible].astype(float))[1]
    counts = np.cumsum(np.bincount(strata))
    # Round the running total, so that rounding errors of the strata cancel out.
    last = np.minimum(np.floor(share * counts + 0.5), len(num_bytes) - 1).astype(np.int64)
    num_chosen = np.diff(last, prepend=0)
    # The lowest hashes of each stratum; a stable sort keeps their order.
    by_stratum = np.argsort(strata, kind="stable")
    place = np.arange(len(strata)) - (counts - np.bincount(strata))[strata[by_stratum]]
    chosen: np.ndarray = eligible[by_stratum[place < num_chosen[strata[by_stratum]]]]
    return chosen


def _ranks(digests: np.ndarray, seed: int) -> np.ndarray:
    """Return each digest's rank among the distinct digests, in the order of `seed`: int64 [n]."""
    halves = np.ascontiguousarray(digests).view(">u8").reshape(-1, 2).astype(np.uint64)
    key = mix(np.array([seed], dtype=np.uint64))
    hashes = [mix(halves[:, 0] ^ key), mix(halves[:, 1] + key)]
    order = np.lexsort((hashes[1], hashes[0]))
    ordered = halves[order]
    ranks = np.empty(len(digests), dtype=np.int64)
    ranks[order] = bounds_of((ordered[1:] != ordered[:-1]).any(axis=1))
    return ranks
