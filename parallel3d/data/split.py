"""Which documents are held out for evaluation: decided by their contents alone."""

from collections.abc import Sequence

import numpy as np

from parallel3d.errors import DataError


def split_documents(digests: Sequence[np.ndarray], fraction: float) -> list[np.ndarray]:
    """Say which documents of each part are held out: bool [n] for digests V16 [n].

    Of each part the distinct contents with the lowest digests are held out, at least one of them
    and not all; and what is held out of one part is held out of all. So copies of a document fall
    on one side, and no name or order moves a document across.
    Raises DataError if a part has fewer than two distinct contents, or nothing left to train on.
    """
    ranks = np.split(_ranks(np.concatenate(digests)), np.cumsum([len(d) for d in digests])[:-1])
    apart = np.zeros(max(map(np.max, ranks)) + 1, dtype=bool)
    for number, part in enumerate(ranks):
        contents = np.unique(part)
        if len(contents) < 2:
            raise DataError(
                f"{_called(number, ranks)} has {len(part)} documents, {len(contents)} of them"
                " distinct, and the held-out part is split off by document; give at least two"
                " documents with different text (for example, cut one file in two)"
            )
        apart[contents[: min(max(1, round(fraction * len(contents))), len(contents) - 1)]] = True
    held_out = [apart[part] for part in ranks]
    for number, part in enumerate(held_out):
        if part.all():
            raise DataError(
                f"{_called(number, ranks)} has only documents that are held out of other parts of"
                " the mixture too; give it other text, or remove it"
            )
    return held_out


def _ranks(digests: np.ndarray) -> np.ndarray:
    """Give each digest's place among the distinct ones in ascending order: int64 [n]."""
    halves = np.ascontiguousarray(digests).view(">u8").reshape(-1, 2).astype(np.uint64)
    order = np.lexsort((halves[:, 1], halves[:, 0]))
    ordered = halves[order]
    ranks = np.empty(len(digests), dtype=np.int64)
    ranks[order] = np.concatenate([[0], np.cumsum((ordered[1:] != ordered[:-1]).any(axis=1))])
    return ranks


def _called(number: int, parts: Sequence[np.ndarray]) -> str:
    return "the corpus" if len(parts) == 1 else f"data.mixture.{number}"
