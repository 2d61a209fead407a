"""Counts of a corpus's training and held-out text, made when it was prepared."""

from pathlib import Path

import numpy as np

from parallel3d.data.corpus import Corpus, Mixture
from parallel3d.data.ids.spans import Spans

COUNTS, BYTES = "held_out_counts.npy", "held_out_bytes.npy"
_AT_ONCE = 2**20  # ids


def save_held_out(
    folder: Path, tokens: np.ndarray | Spans, vocab_size: int, texts: np.ndarray | None = None
) -> None:
    """Write how often each id occurs in held-out text, and its documents' bytes of text."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for first in range(0, len(tokens), _AT_ONCE):
        counts += np.bincount(tokens[first : first + _AT_ONCE], minlength=vocab_size)
    np.save(folder / COUNTS, counts, allow_pickle=False)
    if texts is not None:
        np.save(folder / BYTES, texts.astype(np.int64), allow_pickle=False)


def train_frequencies(corpus: Corpus) -> np.ndarray:
    """The share of each id in the training samples: float64 [vocab_size], all above 0.

    One is added to each id's count, so that one that training never saw has a frequency too
    (Laplace's rule of succession). Of a mixture, the frequencies weighted as its samples are. Where
    ids were checked by a sample, they are those of the documents in that, held out or not.
    """
    if isinstance(corpus.train, Mixture):
        parts = zip(corpus.train.weights, corpus.parts, strict=True)
        return np.asarray(sum(weight * train_frequencies(part) for weight, part in parts))
    counts, held_out = corpus.counts() + 1.0, corpus.directory / COUNTS
    if held_out.exists():
        counts -= np.load(held_out, allow_pickle=False)
    return np.asarray(counts / counts.sum())


def held_out_bytes(corpus: Corpus) -> tuple[np.ndarray, ...] | None:
    """The bytes of each held-out document's text, of each part; None where unknown."""
    paths = [part.directory / BYTES for part in corpus.parts or (corpus,)]
    if not all(path.exists() for path in paths):
        return None
    return tuple(np.load(path, mmap_mode="r", allow_pickle=False) for path in paths)
