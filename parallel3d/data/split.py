"""The choice of held-out documents, by their contents, their sizes and a seed alone.

Documents are put into strata by size, a power of two each, and of each stratum the same share of
distinct contents is held out: those with the lowest hash of (seed, content). So what is held out is
in its sizes a small copy of the corpus, and stays what it is when names and order change.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from parallel3d.base.errors import DataError
from parallel3d.data.order import mix

# Checkpoints hold it: raise it when the same corpus is split in another way.
SPLIT_FORMAT = 3
Fraction = float | Literal["auto"]
# Fraction "auto": a share of the text, more of few documents, less of very large corpora.
AUTO_SHARE = 0.05
AUTO_DOCUMENTS, AUTO_MOST = 64, 0.1
# Twice as much of little text: up to 64 samples of 1,024 tokens, at 4 bytes each. Not of the run's
# own length: with that, what is held out would change, and losses could not be compared.
AUTO_SAMPLES, AUTO_MOST_OF_LITTLE = 64 * 1024 * 4, 0.2
AUTO_BYTES = 2**27
# A larger part of what is held out than this would decide the loss by itself.
LARGEST_PART = 1 / 8
# But where there are few documents, one that is no larger than usual has its chance, too.
MEDIANS = 4
# The others make up for larger ones by this factor at most. Where larger ones are most of the
# text, all others would be held out, and of their sizes nothing would be trained on.
MOST_SHARES = 2


def split_documents(
    tables: Sequence[np.ndarray], fraction: Fraction, seed: int = 0
) -> list[np.ndarray]:
    """Return which documents of each part are held out: bool [n] for a table of documents.ENTRY.

    In each part `fraction` of the bytes is held out, at least one of its distinct contents and not
    all. A document that is, with its copies, larger than an eighth of that, and than four medians,
    trains. A share of the others is held out, at most 2 `fraction`, or (1 + `fraction`) / 2. Copies
    of a document fall on one side, in all parts: one that is too large in any part trains in all
    (unless a part has no others).

    "auto" is 5 %, or as much more as 64 documents are, up to 10 % or, if that is less than 256 KiB,
    up to 20 %, and 128 MiB at most; 0 holds out none. Raises DataError if a part has fewer than two
    distinct contents, or nothing left to train on.
    """
    if fraction == 0:
        return [np.zeros(len(table), dtype=bool) for table in tables]
    ranks = _ranks(np.concatenate([table["digest"] for table in tables]), seed)
    parts = np.split(ranks, np.cumsum([len(table) for table in tables])[:-1])
    apart, large = np.zeros((2, ranks.max() + 1), dtype=bool)
    found = []
    for number, (part, table) in enumerate(zip(parts, tables, strict=True)):
        contents, first, copies = np.unique(part, return_index=True, return_counts=True)
        if len(contents) < 2:
            copies_of = f"{len(part)} documents, all of the same text"
            raise DataError(
                f"{_called(number, parts)} has {copies_of if len(part) > 1 else 'one document'},"
                " and the held-out part is"
                " split off by document; give at least two documents with different text (of one"
                ' text file: data.documents = "blank_line" or "line"), or hold out none with'
                " data.held_out_fraction = 0"
            )
        sizes = table["num_bytes"][first]
        # All copies fall on one side; a page in many documents may be much of the text.
        wanted = _wanted(sizes * copies, fraction)
        largest = max(LARGEST_PART * wanted, MEDIANS * np.median(sizes * copies))
        eligible = sizes * copies <= largest
        large[contents[~eligible]] = True
        found.append((contents, sizes, copies, wanted, eligible))
    for contents, sizes, copies, wanted, eligible in found:
        everywhere = eligible & ~large[contents]
        candidates = np.flatnonzero(everywhere if everywhere.any() else eligible)
        apart[contents[_chosen(sizes, copies, wanted, candidates)]] = True
    held_out = [apart[part] for part in parts]
    for number, part in enumerate(held_out):
        if part.all():
            raise DataError(
                f"{_called(number, parts)} has only documents that are held out of other parts of"
                " the mixture too; give it other text, or remove it"
            )
    return held_out


def num_common(digests: np.ndarray, others: np.ndarray) -> int:
    """Return how many documents with digests V16 [n] are also among `others` [m]."""
    here, there = (np.ascontiguousarray(d).view("<u8").reshape(-1, 2) for d in (digests, others))
    # Halves first: few are common, and a set of all others would take much memory.
    there = there[np.isin(there[:, 0], here[:, 0])]
    pairs = set(map(tuple, there.tolist()))
    return sum(tuple(pair) in pairs for pair in here.tolist())


def _wanted(num_bytes: np.ndarray, fraction: Fraction) -> float:
    """Return how many bytes to hold out of distinct contents of these sizes [n]."""
    total = int(num_bytes.sum())
    if fraction != "auto":
        return fraction * total
    most = max(AUTO_MOST * total, min(AUTO_MOST_OF_LITTLE * total, AUTO_SAMPLES))
    by_number = min(AUTO_DOCUMENTS / len(num_bytes) * total, most)
    return min(max(AUTO_SHARE * total, by_number), AUTO_BYTES)


def _chosen(
    num_bytes: np.ndarray, copies: np.ndarray, wanted: float, eligible: np.ndarray
) -> np.ndarray:
    """Return the indices of the contents that are held out, of those at the indices `eligible`.

    `num_bytes` [n] and `copies` [n] are in the order of hashes.
    """
    with_copies = num_bytes * copies
    total = int(with_copies.sum())
    part = wanted / max(1, total)
    share = wanted / max(1, int(with_copies[eligible].sum()))
    share = max(min(share, MOST_SHARES * part, (1 + part) / 2), 1 / len(eligible))
    strata = np.frexp(num_bytes[eligible].astype(float))[1]
    counts = np.cumsum(np.bincount(strata))
    # Rounded over the strata together: what one lacks of a whole document the next one has more.
    last = np.minimum(np.floor(share * counts + 0.5), len(num_bytes) - 1).astype(np.int64)
    taken = np.diff(last, prepend=0)
    # The lowest hashes of each stratum; a stable sort keeps their order.
    by_stratum = np.argsort(strata, kind="stable")
    place = np.arange(len(strata)) - (counts - np.bincount(strata))[strata[by_stratum]]
    chosen: np.ndarray = eligible[by_stratum[place < taken[strata[by_stratum]]]]
    return chosen


def _ranks(digests: np.ndarray, seed: int) -> np.ndarray:
    """Return each digest's place among the distinct ones in the order of `seed`: int64 [n]."""
    halves = np.ascontiguousarray(digests).view(">u8").reshape(-1, 2).astype(np.uint64)
    key = mix(np.array([seed], dtype=np.uint64))
    hashes = [mix(halves[:, 0] ^ key), mix(halves[:, 1] + key)]
    order = np.lexsort((hashes[1], hashes[0]))
    ordered = halves[order]
    ranks = np.empty(len(digests), dtype=np.int64)
    ranks[order] = np.concatenate([[0], np.cumsum((ordered[1:] != ordered[:-1]).any(axis=1))])
    return ranks


def _called(number: int, parts: Sequence[np.ndarray]) -> str:
    return "the corpus" if len(parts) == 1 else f"data.mixture.{number}"
