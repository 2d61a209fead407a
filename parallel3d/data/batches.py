"""Samples for training and evaluation: which ones a microbatch holds, and their tokens.

Samples are windows of sequence_length + 1 tokens that start every sequence_length tokens: each
token of the stream is predicted once an epoch, and what is left at its end is dropped. A window
may hold several documents, with end-of-text between them. In a mixture, each sample is a window
of one of its streams.
"""

import numpy as np

from parallel3d.base.errors import DataError
from parallel3d.data.corpus import Corpus, Mixture, TokenStream
from parallel3d.data.order import GOLDEN, Mixing, sample_index


def num_windows(num_tokens: int, sequence_length: int) -> int:
    """Return the number of samples that a stream of `num_tokens` holds."""
    return max(0, (num_tokens - 1) // sequence_length)


def first_sample(
    start: int, microbatch: int, dp_coord: int, *, micro_batch: int, num_microbatches: int, dp: int
) -> int:
    """The global index of a microbatch's first sample; its others follow without a gap.

    A step whose first sample is `start` has a global batch of B = micro_batch × num_microbatches
    × dp samples with the indices start .. start + B - 1, in whatever way B is split:

        index = start + (dp_coord × num_microbatches + microbatch) × micro_batch + i

    B may change when a run is resumed; the next step goes on where the last one ended.
    """
    assert 0 <= microbatch < num_microbatches and 0 <= dp_coord < dp
    return start + (dp_coord * num_microbatches + microbatch) * micro_batch


def documents_of(tokens: np.ndarray, end_of_text: int) -> np.ndarray:
    """Return the number of each token's document in its sample, from 0: int64 [batch, seq].

    A document ends with its end-of-text, so the token after one is the next document's first.
    """
    ends = np.cumsum(tokens == end_of_text, axis=1, dtype=np.int64)
    return np.concatenate([np.zeros_like(ends[:, :1]), ends[:, :-1]], axis=1)


class Batches:
    """Samples of a stream or mixture by global index, shuffled in each epoch, or in order.

    With a `seed` the order is that of `order.sample_index`; with None it is the stream's own, round
    and round. In a mixture, `order.Mixing` says which stream gives a sample, and each stream comes
    round at its own rate. The same index gives the same sample on every mesh, at any time.

    `num_samples` is how many samples there are before one comes a second time.
    """

    def __init__(self, stream: TokenStream | Mixture, sequence_length: int, seed: int) -> None:
        # One stream is a mixture of one.
        self.streams = (stream,) if isinstance(stream, TokenStream) else stream.parts
        self.sequence_length = sequence_length
        self.seed = seed
        self._mixing = Mixing((1.0,) if isinstance(stream, TokenStream) else stream.weights)
        self._sizes = [num_windows(len(part), sequence_length) for part in self.streams]
        assert min(self._sizes) > 0, "check_length comes first"
        self.num_samples = min(self._mixing.index_of(s, n) for s, n in enumerate(self._sizes))

    def microbatch(self, first_sample: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and labels of samples first_sample .. first_sample + count - 1.

        Both int64 [count, sequence_length]; labels[b, t] is the token after tokens[b, t].
        """
        parts, starts = self.windows(first_sample, count)
        windows = np.empty((count, self.sequence_length + 1), dtype=np.int64)
        within = np.arange(self.sequence_length + 1)
        for part in np.unique(parts):
            here = parts == part
            windows[here] = self.streams[part].tokens[starts[here][:, None] + within]
        return windows[:, :-1].copy(), windows[:, 1:].copy()

    @property
    def weighs(self) -> bool:
        """True if tokens count unequally in some stream."""
        return any(stream.weights is not None for stream in self.streams)

    def weights(self, first_sample: int, count: int) -> np.ndarray:
        """Return how much each label of these samples counts: float32 [count, sequence_length]."""
        parts, starts = self.windows(first_sample, count)
        found = np.ones((count, self.sequence_length), dtype=np.float32)
        within = np.arange(1, self.sequence_length + 1)
        for part in np.unique(parts):
            here, weights = parts == part, self.streams[part].weights
            if weights is not None:
                found[here] = weights[starts[here][:, None] + within]
        return found

    def windows(self, first_sample: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the stream of each sample, and where in the stream its tokens start: [count]."""
        parts, places = self._mixing.assign(np.arange(first_sample, first_sample + count))
        starts = np.empty(count, dtype=np.int64)
        for part in np.unique(parts):
            here = parts == part
            # Streams of equal length have orders of their own.
            seed = self.seed + int(part) * GOLDEN
            windows = sample_index(seed, places[here], self._sizes[part])
            starts[here] = windows * self.sequence_length
        return parts, starts


def check_length(corpus: Corpus, sequence_length: int, global_batch: int) -> None:
    """Raise DataError if training has less than one global batch, or evaluation no window.

    In a mixture, every stream needs a window of each kind, and so does each validation set. Nothing
    is evaluated where nothing is held out.
    """
    train, held_out = (
        part.parts if isinstance(part, Mixture) else (part,)
        for part in (corpus.train, corpus.held_out)
    )
    num_samples = sum(num_windows(len(stream), sequence_length) for stream in train)
    if num_samples < global_batch:
        raise DataError(
            f"the corpus is shorter than one batch: its training part has {len(corpus.train)}"
            f" tokens, {num_samples} samples at data.sequence_length={sequence_length}, and a step"
            f" takes {global_batch}; add text, or lower sequence_length, micro batch, accumulation"
            " or dp"
        )
    of = [f" of data.mixture.{i}" if len(train) > 1 else "" for i in range(len(train))]
    remedy = "add text, lower sequence_length, or put the text into another part"
    wanted: list[tuple[str, TokenStream | Mixture, str]]
    wanted = [(f"the training part{of[i]}", part, remedy) for i, part in enumerate(train)]
    remedy = (
        "raise data.held_out_fraction, set it to 0 (then there is no held-out loss), add text, or"
        " lower sequence_length"
    )
    wanted += [(f"the held-out part{of[i]}", p, remedy) for i, p in enumerate(held_out) if len(p)]
    for name, part in corpus.validation.items():
        setting = part.found.get("found_by")
        place = f"{setting}: {name}" if setting else f"data.validation.{name}"
        remedy = "add text, or " + (f"set {setting} to null" if setting else "leave it out")
        wanted.append((place, part.held_out, remedy))
    for place, stream, remedy in wanted:
        if num_windows(len(stream), sequence_length) < 1:
            raise DataError(
                f"{place} has {len(stream)} tokens, fewer than one sample of"
                f" data.sequence_length={sequence_length} (+ 1); {remedy}"
            )
