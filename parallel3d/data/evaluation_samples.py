"""Samples on which held-out text is evaluated: the same on every mesh, in every run."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from parallel3d.base.errors import DataError
from parallel3d.data.batches import Batches
from parallel3d.data.corpus import HELD_OUT_BYTES, HELD_OUT_COUNTS, Corpus, Mixture, TokenStream

# Orders the samples, whatever seed a run trains with. Losses are compared: it never changes.
ORDER_SEED = 20
_AT_ONCE = 256  # samples


@dataclass(frozen=True)
class SetLoss:
    """The loss of a set of samples, with its standard error."""

    loss: float
    """Nats per token."""
    standard_error: float | None
    """Standard error of the loss, over documents; None for one document."""
    tokens: int
    """Tokens that were predicted; where not all count alike, what they count together."""
    documents: int
    """Documents that these are of."""
    bits_per_byte: float | None
    """None where the bytes of the text are not known: of token ids."""

    @property
    def perplexity(self) -> float:
        """Return exp of the set's loss."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def to_json(self) -> dict[str, Any]:
        """Return the set's numbers by name; None for a number that is not finite."""
        numbers = vars(self).items()
        return {k: v if v is not None and math.isfinite(v) else None for k, v in numbers}

    def in_words(self) -> str:
        """Return the loss as people read it."""
        error = "" if self.standard_error is None else f" ± {self.standard_error:.4f}"
        numbers = [f"perplexity {self.perplexity:,.4g}"]
        if self.bits_per_byte is not None:
            numbers.append(f"{self.bits_per_byte:.4f} bits per byte")
        documents = "1 document" if self.documents == 1 else f"{self.documents:,} documents"
        of = f"{self.tokens:,} tokens of {documents}"
        return f"{self.loss:.4f}{error} ({', '.join(numbers)}; {of})"


def held_out_samples(corpus: Corpus, sequence_length: int, most: int) -> "EvaluationSamples":
    """Return the samples that the held-out text of a corpus is evaluated on."""
    return EvaluationSamples(corpus.held_out, sequence_length, most, held_out_bytes(corpus))


class EvaluationSamples:
    """The first `most` samples of a stream or mixture in a fixed random order.

    `texts` are the bytes of each document's text, of each stream, where they are known. The samples
    touch `num_documents` documents, with ordinals from 0 on: `tokens` int64 [num_documents] is how
    many tokens are predicted of each, end-of-text included, and `num_bytes` how many bytes of text
    these are, n B / L where n of a document's L tokens, which have B bytes, are predicted.
    """

    def __init__(
        self,
        stream: TokenStream | Mixture,
        sequence_length: int,
        most: int,
        texts: tuple[np.ndarray, ...] | None = None,
    ) -> None:
        self.batches = Batches(stream, sequence_length, seed=ORDER_SEED)
        self.num_samples = min(most, self.batches.num_samples)
        # Documents of all streams in one row.
        self._firsts = np.cumsum([0, *(part.num_documents for part in self.batches.streams)])
        met = [
            np.unique(self._places(first, count), return_counts=True)
            for first, count in self._batches()
        ]
        places, counts = (np.concatenate(column) for column in zip(*met, strict=True))
        self._known, ordinals = np.unique(places, return_inverse=True)
        self.num_documents = len(self._known)
        self.tokens = np.zeros(self.num_documents, dtype=np.int64)
        np.add.at(self.tokens, ordinals, counts)
        self.num_bytes = None if texts is None else self._bytes(texts)

    def documents(self, first: int, count: int) -> np.ndarray:
        """Return the ordinal of the document of each label: int64 [count, sequence_length].

        Samples from `num_samples` on fill a batch up: they are of document `num_documents`, and do
        not count.
        """
        counted = max(0, min(count, self.num_samples - first))
        ordinals = np.full((count, self.batches.sequence_length), self.num_documents)
        if counted:
            ordinals[:counted] = np.searchsorted(self._known, self._places(first, counted))
        return ordinals

    def loss(self, sums: np.ndarray, weights: np.ndarray | None = None) -> SetLoss:
        """Return the loss of the set, from its documents' losses in nats, [num_documents].

        With `weights` [num_documents], each one's tokens together, `sums` are weighted, and the
        mean is over these. Raises DataError where nothing counts.
        """
        counts = self.tokens if weights is None else weights
        counted = counts > 0
        if not counted.any():
            raise DataError(
                "no token of what is held out counts in the loss; hold out more, or set"
                " data.held_out_fraction to 0"
            )
        mean, error = losses_per_document(sums[counted], counts[counted])
        num_bytes = self.num_bytes if weights is None else None
        return SetLoss(
            loss=mean,
            standard_error=error,
            tokens=round(float(counts.sum())),
            documents=int(counted.sum()),
            bits_per_byte=bits_per_byte(float(sums.sum()), num_bytes),
        )

    def unigram_loss(self, corpus: Corpus) -> float:
        """The mean loss of the set's tokens by their frequencies in `corpus`'s training text.

        In nats: what a model reaches that has learnt how often each token occurs and nothing of
        its context.
        """
        frequencies, total = np.log(train_frequencies(corpus)), 0.0
        for first, count in self._batches():
            total -= float(frequencies[self.batches.microbatch(first, count)[1]].sum())
        return total / int(self.tokens.sum())

    def _batches(self) -> Iterator[tuple[int, int]]:
        """Yield the first sample and the number of samples of each batch."""
        for first in range(0, self.num_samples, _AT_ONCE):
            yield first, min(_AT_ONCE, self.num_samples - first)

    def _places(self, first: int, count: int) -> np.ndarray:
        """Return the places of the labels' documents among all streams': [count, seq]."""
        parts, starts = self.batches.windows(first, count)
        labels = starts[:, None] + np.arange(1, self.batches.sequence_length + 1)
        places = np.empty(labels.shape, dtype=np.int64)
        for part in np.unique(parts):
            bounds = self.batches.streams[part].bounds
            here = parts == part
            within = bounds.searchsorted(labels[here], side="right") - 1
            places[here] = self._firsts[part] + within
        return places

    def _bytes(self, texts: tuple[np.ndarray, ...]) -> float:
        """Return the bytes of the documents that are known alone: there may be 10^9 others."""
        total = 0.0
        for part, stream in enumerate(self.batches.streams):
            here = slice(*np.searchsorted(self._known, self._firsts[part : part + 2]))
            own = self._known[here] - self._firsts[part]
            lengths = stream.bounds[own + 1] - stream.bounds[own]
            total += float((self.tokens[here] / lengths * texts[part][own]).sum())
        return total


def losses_per_document(sums: np.ndarray, tokens: np.ndarray) -> tuple[float, float | None]:
    """Return the mean loss of a token and its standard error over documents; None for one document.

    `sums` [n] is the loss of each document in nats, `tokens` [n] its predicted tokens. Tokens of
    one document are alike, so documents are what is sampled: the mean is a ratio of two sums over
    them, whose variance is n / (n - 1) sum (y_i - r x_i)^2 / (sum x_i)^2 (Cochran 1977, Sampling
    Techniques, chapter 6; Miller 2024, arXiv:2411.00640, section 2.2).
    """
    mean, n = float(sums.sum() / tokens.sum()), len(sums)
    if n < 2:
        return mean, None
    squares = float(((sums - mean * tokens) ** 2).sum())
    return mean, (n / (n - 1) * squares) ** 0.5 / float(tokens.sum())


def bits_per_byte(loss_sum: float, num_bytes: float | None) -> float | None:
    """Bits per byte of a text, from its summed loss in nats and its size in bytes."""
    return loss_sum / math.log(2) / num_bytes if num_bytes else None


def parts_of(corpus: Corpus) -> dict[str, Corpus]:
    """Return the parts of a mixture by their names, "mixture.0" and so on."""
    return {f"mixture.{number}": part for number, part in enumerate(corpus.parts)}


def train_frequencies(corpus: Corpus) -> np.ndarray:
    """Return the share of each id in the training samples: float64 [vocab_size], all above 0.

    One is added to each id's count (Laplace's rule of succession). A mixture's are weighted as its
    samples are. Where ids were checked by a sample, held-out documents of that count, too.
    """
    if isinstance(corpus.train, Mixture):
        parts = zip(corpus.train.weights, corpus.parts, strict=True)
        return np.asarray(sum(weight * train_frequencies(part) for weight, part in parts))
    counts, held_out = corpus.counts() + 1.0, corpus.directory / HELD_OUT_COUNTS
    if held_out.exists():
        counts -= np.load(held_out, allow_pickle=False)
    return np.asarray(counts / counts.sum())


def held_out_bytes(corpus: Corpus) -> tuple[np.ndarray, ...] | None:
    """Return the bytes of each held-out document's text, of each part; None where unknown."""
    paths = [part.directory / HELD_OUT_BYTES for part in corpus.parts or (corpus,)]
    if not all(path.exists() for path in paths):
        return None
    return tuple(np.load(path, mmap_mode="r", allow_pickle=False) for path in paths)
