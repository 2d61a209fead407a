"""Samples for evaluating held-out text, which are the same on every mesh and in every run."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from parallel3d.base.errors import DataError
from parallel3d.base.step_lines import finite
from parallel3d.data.batches import Batches
from parallel3d.data.corpus import HELD_OUT_BYTES, HELD_OUT_COUNTS, Corpus, Mixture, TokenStream
from parallel3d.data.order import each_number

# Seed of the samples' order, independent of the run's seed. Must not change, so that losses of
# different runs can be compared.
ORDER_SEED = 20
_AT_ONCE = 256  # samples read at a time


@dataclass(frozen=True)
class SetLoss:
    """The loss of a set of samples, with its standard error."""

    loss: float
    """Nats per token."""
    standard_error: float | None
    """Standard error of the loss over documents; None for one document."""
    tokens: int
    """Number of predicted tokens; with weights, the sum of their weights."""
    documents: int
    """Number of documents that these tokens belong to."""
    bits_per_byte: float | None
    """None if the bytes of the text are unknown, as for corpora of token ids."""

    @property
    def perplexity(self) -> float:
        """The exponential of the loss."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def to_json(self) -> dict[str, float | None]:
        """Return the numbers by name; None for those that are not finite."""
        return {name: finite(number) for name, number in vars(self).items()}

    def in_words(self) -> str:
        """Return the loss as readable text."""
        error = "" if self.standard_error is None else f" ± {self.standard_error:.4f}"
        numbers = [f"perplexity {self.perplexity:,.4g}"]
        if self.bits_per_byte is not None:
            numbers.append(f"{self.bits_per_byte:.4f} bits per byte")
        documents = "1 document" if self.documents == 1 else f"{self.documents:,} documents"
        size = f"{self.tokens:,} tokens of {documents}"
        return f"{self.loss:.4f}{error} ({', '.join(numbers)}; {size})"


def held_out_samples(corpus: Corpus, sequence_length: int, max_samples: int) -> "EvaluationSamples":
    """Return the samples for evaluating the held-out part of a corpus."""
    return EvaluationSamples(corpus.held_out, sequence_length, max_samples, held_out_bytes(corpus))


class EvaluationSamples:
    """The first `max_samples` samples of a stream or mixture, in a fixed random order.

    - `texts`: for each stream, the bytes of each document's text; None if unknown
    - `num_documents`: number of documents with tokens in these samples, numbered from 0
    - `tokens`: int64 [num_documents], predicted tokens of each document, including end-of-text
    - `num_bytes`: bytes of text of these tokens. If n of a document's L tokens are predicted, n / L
      of its bytes are counted.
    """

    def __init__(
        self,
        stream: TokenStream | Mixture,
        sequence_length: int,
        max_samples: int,
        texts: tuple[np.ndarray, ...] | None = None,
    ) -> None:
        self.batches = Batches(stream, sequence_length, seed=ORDER_SEED)
        self.num_samples = min(max_samples, self.batches.num_samples)
        # Number of the first document of each stream, counted over all streams.
        self._firsts = np.cumsum([0, *(part.num_documents for part in self.batches.streams)])
        places = []
        counts = []
        for first, count in self._batches():
            own_places, own_counts = np.unique(self._places(first, count), return_counts=True)
            places.append(own_places)
            counts.append(own_counts)
        self._known, ordinals = np.unique(np.concatenate(places), return_inverse=True)
        self.num_documents = len(self._known)
        self.tokens = np.zeros(self.num_documents, dtype=np.int64)
        np.add.at(self.tokens, ordinals, np.concatenate(counts))
        self.num_bytes = None if texts is None else self._bytes(texts)

    def documents(self, first: int, count: int) -> np.ndarray:
        """Return the number of the document of each label: int64 [count, sequence_length].

        Samples from `num_samples` on are padding: they have the document `num_documents`, and do
        not count.
        """
        counted = max(0, min(count, self.num_samples - first))
        ordinals = np.full((count, self.batches.sequence_length), self.num_documents)
        if counted:
            ordinals[:counted] = np.searchsorted(self._known, self._places(first, counted))
        return ordinals

    def loss(self, sums: np.ndarray, weights: np.ndarray | None = None) -> SetLoss:
        """Return the loss of the set from the summed losses of its documents.

        - `sums` [num_documents]: loss in nats, summed over the tokens of each document
        - `weights` [num_documents]: sums of the tokens' weights, if `sums` are weighted

        Raises DataError if no token has a weight above 0.
        """
        counts = self.tokens if weights is None else weights
        counted = counts > 0
        if not counted.any():
            raise DataError(
                "all tokens that were read have weight 0 in the loss; raise train.evaluate_samples,"
                " or leave it out (held-out text: data.held_out_fraction 0)"
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
        """Return the set's mean loss in nats under the token frequencies of the training text.

        This is the loss of a model that has learnt the frequencies but ignores context.
        """
        frequencies = np.log(train_frequencies(corpus))
        total = 0.0
        for first, count in self._batches():
            total -= float(frequencies[self.batches.microbatch(first, count)[1]].sum())
        return total / int(self.tokens.sum())

    def _batches(self) -> Iterator[tuple[int, int]]:
        """Yield first sample and number of samples of each batch."""
        for first in range(0, self.num_samples, _AT_ONCE):
            yield first, min(_AT_ONCE, self.num_samples - first)

    def _places(self, first: int, count: int) -> np.ndarray:
        """Return each label's document, numbered over all streams: int64 [count, seq]."""
        parts, starts = self.batches.windows(first, count)
        labels = starts[:, None] + np.arange(1, self.batches.sequence_length + 1)
        places = np.empty(labels.shape, dtype=np.int64)
        for part, here in each_number(parts):
            bounds = self.batches.streams[part].bounds
            within = bounds.searchsorted(labels[here], side="right") - 1
            places[here] = self._firsts[part] + within
        return places

    def _bytes(self, texts: tuple[np.ndarray, ...]) -> float:
        """Return the bytes of the predicted text, reading only the documents in the set."""
        total = 0.0
        for part, stream in enumerate(self.batches.streams):
            here = slice(*np.searchsorted(self._known, self._firsts[part : part + 2]))
            own = self._known[here] - self._firsts[part]
            lengths = stream.bounds[own + 1] - stream.bounds[own]
            total += float((self.tokens[here] / lengths * texts[part][own]).sum())
        return total


def losses_per_document(sums: np.ndarray, tokens: np.ndarray) -> tuple[float, float | None]:
    """Return the mean loss per token and its standard error over documents (None for one).

    - `sums` [n]: summed loss of each document in nats
    - `tokens` [n]: predicted tokens of each document

    Tokens of one document are correlated, so documents are the sampling units. The mean is a ratio
    estimator with the variance n / (n - 1) sum (y_i - r x_i)^2 / (sum x_i)^2 (Cochran 1977,
    Sampling Techniques, chapter 6; Miller 2024, arXiv:2411.00640, section 2.2).
    """
    mean = float(sums.sum() / tokens.sum())
    n = len(sums)
    if n < 2:
        return mean, None
    squares = float(((sums - mean * tokens) ** 2).sum())
    return mean, (n / (n - 1) * squares) ** 0.5 / float(tokens.sum())


def bits_per_byte(loss_sum: float, num_bytes: float | None) -> float | None:
    """Return the bits per byte of a text from its summed loss in nats and its size in bytes."""
    return loss_sum / math.log(2) / num_bytes if num_bytes else None


def parts_of(corpus: Corpus) -> dict[str, Corpus]:
    """Return the parts of a mixture by their names, "mixture.0" and so on."""
    return {f"mixture.{number}": part for number, part in enumerate(corpus.parts)}


def train_frequencies(corpus: Corpus) -> np.ndarray:
    """Return the share of each id in the training samples: float64 [vocab_size], all above 0.

    One is added to each id's count (Laplace's rule of succession). Frequencies of a mixture are
    weighted as its samples are. If only a sample of ids was checked, the frequencies are those of
    this sample, including its held-out documents.
    """
    if isinstance(corpus.train, Mixture):
        parts = zip(corpus.train.weights, corpus.parts, strict=True)
        return np.asarray(sum(weight * train_frequencies(part) for weight, part in parts))
    counts = corpus.counts() + 1.0
    held_out = corpus.directory / HELD_OUT_COUNTS
    if held_out.exists():
        counts -= np.load(held_out, allow_pickle=False)
    return np.asarray(counts / counts.sum())


def held_out_bytes(corpus: Corpus) -> tuple[np.ndarray, ...] | None:
    """Return the bytes of each held-out document's text for each part; None if unknown."""
    paths = [part.directory / HELD_OUT_BYTES for part in corpus.parts or (corpus,)]
    if not all(path.exists() for path in paths):
        return None
    return tuple(np.load(path, mmap_mode="r", allow_pickle=False) for path in paths)
