"""Samples for training and evaluation: the samples of a microbatch, and their tokens.

Samples are windows of sequence_length + 1 tokens that start every sequence_length tokens. So each
token of the stream is predicted once an epoch; an incomplete window at the end is dropped. A window
may span several documents, with end-of-text between them. A packed stream (`packing`) has samples
of whole documents instead. In a mixture, each sample is one of its streams.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from parallel3d.base.errors import DataError
from parallel3d.data.corpus import Corpus, Mixture, TokenStream
from parallel3d.data.deal import num_pairs
from parallel3d.data.fim import Fim
from parallel3d.data.order import GOLDEN, Mixing, each_number, sample_index
from parallel3d.data.sharded import ShardedTokens


def num_windows(num_tokens: int, sequence_length: int) -> int:
    """Return the number of samples that a stream of `num_tokens` holds."""
    return max(0, (num_tokens - 1) // sequence_length)


def num_samples(stream: TokenStream | Mixture, sequence_length: int) -> int:
    """Return the number of samples of a stream, or of all streams of a mixture."""
    total = 0
    for part in stream.parts:
        if part.packing:
            total += len(part.packing)
        else:
            total += num_windows(len(part), sequence_length)
    return total


def tokens_of_epoch(stream: TokenStream | Mixture, sequence_length: int) -> int:
    """Return the number of tokens, of which windows without packing are as many samples."""
    if is_packed(stream):
        return num_samples(stream, sequence_length) * sequence_length + 1
    return len(stream)


def is_packed(stream: TokenStream | Mixture) -> bool:
    """Return True if the samples are packed, which holds for all parts of a mixture or for none."""
    return all(part.packing is not None for part in stream.parts)


def mixing_of(stream: TokenStream | Mixture, sequence_length: int) -> Mixing:
    """Return the parts of a mixture's samples; a stream is a mixture of one part."""
    if isinstance(stream, TokenStream):
        return Mixing((1.0,))
    changes = [(tokens // sequence_length, weights) for tokens, weights in stream.changes]
    return Mixing(stream.weights, changes)


def first_sample(
    start: int, microbatch: int, dp_coord: int, *, micro_batch: int, num_microbatches: int, dp: int
) -> int:
    """Return the global index of a microbatch's first sample; the others follow consecutively.

    A step whose first sample is `start` has a global batch of B = micro_batch × num_microbatches
    × dp samples with the indices start .. start + B - 1, however B is split:

        index = start + (dp_coord × num_microbatches + microbatch) × micro_batch + i

    B may change when a run is resumed; the next step continues where the last one ended.
    """
    assert 0 <= microbatch < num_microbatches and 0 <= dp_coord < dp
    return start + (dp_coord * num_microbatches + microbatch) * micro_batch


def documents_of(tokens: np.ndarray, end_of_text: int) -> np.ndarray:
    """Return the number of each token's document in its sample, from 0: int64 [batch, seq].

    A document ends with its end-of-text, so the token after it is the first of the next document.
    """
    ends = np.cumsum(tokens == end_of_text, axis=1, dtype=np.int64)
    return np.concatenate([np.zeros_like(ends[:, :1]), ends[:, :-1]], axis=1)


class Batches:
    """Samples of a stream or mixture by global index, shuffled in each epoch.

    `order.sample_index` defines the order from the seed. In a mixture, `order.Mixing` assigns each
    sample to a stream, and each stream repeats at its own rate. An index means the same sample on
    every mesh, at any time.

    `num_samples` is the number of samples before the first one repeats; `shards` is the cache of
    streams, if there are any.
    """

    def __init__(
        self, stream: TokenStream | Mixture, sequence_length: int, seed: int, fim: Fim | None = None
    ) -> None:
        self.streams = stream.parts
        self.sequence_length = sequence_length
        self.seed = seed
        self.fim = fim
        self._mixing = mixing_of(stream, sequence_length)
        self._sizes = [num_samples(part, sequence_length) for part in self.streams]
        self.is_packed = is_packed(stream)
        self.by_bounds = any(part.by_bounds for part in self.streams)
        tokens = (stream.tokens for stream in self.streams)
        # All streams of a run share one cache.
        self.shards = next((t.cache for t in tokens if isinstance(t, ShardedTokens)), None)
        assert min(self._sizes) > 0, "check_length must be called first"
        self.num_samples = min(self._mixing.index_of(s, n) for s, n in enumerate(self._sizes))

    def microbatch(self, first_sample: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and labels of the samples first_sample .. first_sample + count - 1.

        Both int64 [count, sequence_length]; labels[b, t] is the token after tokens[b, t] in the
        stream, or in a rearranged document (`fim`). Both are 0 in padding.
        """
        if self.fim:
            return self._rearranged(self.fim, first_sample, count)[:2]
        return self._plain(first_sample, count)

    def _plain(self, first_sample: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        if self.is_packed:
            return self._packed(first_sample, count)
        parts, starts = self.windows(first_sample, count)
        windows = np.empty((count, self.sequence_length + 1), dtype=np.int64)
        within = np.arange(self.sequence_length + 1)
        for part, here in each_number(parts):
            windows[here] = self.streams[part].tokens[starts[here][:, None] + within]
        return windows[:, :-1].copy(), windows[:, 1:].copy()

    def _packed(self, first_sample: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        parts, places, _ = self.places(first_sample, count)
        tokens, labels = np.zeros((2, *places.shape), dtype=np.int64)
        for part, is_own in each_number(parts):
            here = is_own[:, None] & (places >= 0)
            tokens[here] = self.streams[part].tokens[places[here]]
            labels[here] = self.streams[part].tokens[places[here] + 1]
        return tokens, labels

    def _rearranged(
        self, fim: Fim, first_sample: int, count: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return tokens, labels and weights with some documents rearranged."""
        tokens, labels = self._plain(first_sample, count)
        parts, places, pieces = self.places(first_sample, count)
        weights = (places >= 0).astype(np.float32)
        if not self.is_packed:
            pieces = documents_of(tokens, fim.end_of_text)
        for row, part in enumerate(parts):
            sample = (tokens[row], labels[row], weights[row])
            fim.rearrange(
                first_sample + row, self.streams[part].bounds, places[row], pieces[row], sample
            )
        return tokens, labels, weights

    @property
    def weighs(self) -> bool:
        """True if some stream has weights for its tokens, or samples have padding."""
        return self.is_packed or any(stream.weights is not None for stream in self.streams)

    def weights(self, first_sample: int, count: int) -> np.ndarray:
        """Return the weights of the samples' labels: float32 [count, sequence_length]."""
        if self.fim:
            return self._rearranged(self.fim, first_sample, count)[2]
        parts, places, _ = self.places(first_sample, count)
        is_token = places >= 0
        weights = is_token.astype(np.float32)
        for part, is_own in each_number(parts):
            here = is_own[:, None] & is_token
            stream_weights = self.streams[part].weights
            if stream_weights is not None:
                weights[here] = stream_weights[places[here] + 1]
        return weights

    def padding(self, first_sample: int, count: int) -> int:
        """Return the number of places in the samples that are not tokens of the text."""
        if not self.is_packed:
            return 0
        parts, samples = self.windows(first_sample, count)
        padding = 0
        for part, here in each_number(parts):
            packing = self.streams[part].packing
            assert packing, "all parts are packed"
            padding += packing.padding(samples[here])
        return padding

    def attention_work(self, first_sample: int, count: int, most_keys: Sequence[int]) -> np.ndarray:
        """Return the pairs of tokens that attend in isolated documents: int64 [count].

        They are counted from the documents' bounds, without reading tokens. `most_keys`: see
        `deal.attention_work`.
        """
        parts, starts = self.windows(first_sample, count)
        work = np.empty(count, dtype=np.int64)
        for row, (part, start) in enumerate(zip(parts.tolist(), starts.tolist(), strict=True)):
            packing = self.streams[part].packing
            bounds = self.streams[part].bounds
            if packing:
                lengths = packing.lengths_in(start)
            else:
                end = start + self.sequence_length
                first, last = bounds.searchsorted([start + 1, end])
                lengths = np.diff(bounds[first:last], prepend=start, append=end)
            work[row] = num_pairs(lengths, most_keys)
        return work

    def places(self, first_sample: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return each sample's stream [count], and of each token its place there and its piece.

        The last two are int64 [count, sequence_length]; see `Packing.positions`. Without packing a
        sample is one piece.
        """
        parts, starts = self.windows(first_sample, count)
        places = starts[:, None] + np.arange(self.sequence_length)
        pieces = np.zeros_like(places)
        for part, here in each_number(parts):
            packing = self.streams[part].packing
            if packing:
                places[here], pieces[here] = packing.positions(starts[here])
        return parts, places, pieces

    def documents(self, first_sample: int, count: int) -> np.ndarray:
        """Return the number of each token's document in its sample, from 0, by the bounds.

        int64 [count, sequence_length]; not for packed samples, which have pieces (`places`).
        """
        parts, places, _ = self.places(first_sample, count)
        documents = np.empty(places.shape, dtype=np.int64)
        for part, here in each_number(parts):
            documents[here] = self.streams[part].bounds.searchsorted(places[here], side="right")
        documents -= documents[:, :1].copy()
        return documents

    def windows(self, first_sample: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return each sample's stream, and the position of its first token there: [count].

        In place of the position, packed streams have the number of the sample.
        """
        parts, places = self._mixing.assign(np.arange(first_sample, first_sample + count))
        starts = np.empty(count, dtype=np.int64)
        for part, here in each_number(parts):
            # Streams of equal length must not share one order.
            seed = self.seed + part * GOLDEN
            tokens = self.streams[part].tokens
            if isinstance(tokens, ShardedTokens):
                starts[here] = tokens.sample_starts(seed, places[here], self.sequence_length)
            else:
                windows = sample_index(seed, places[here], self._sizes[part])
                starts[here] = windows if self.is_packed else windows * self.sequence_length
        return parts, starts

    def epochs(self, index: int) -> list[float]:
        """Return how often each stream was read before the sample with this global index."""
        counts = self._mixing.counts(index).tolist()
        return [count / size for count, size in zip(counts, self._sizes, strict=True)]

    def close(self) -> None:
        """End the thread that fetches shards."""
        if self.shards:
            self.shards.close()


def check_length(corpus: Corpus, sequence_length: int, global_batch: int) -> None:
    """Raise DataError if the corpus has less than one global batch, or a stream less than a sample.

    Every stream of a mixture needs one training sample, and one held-out sample if anything is held
    out. Every validation set needs one sample.
    """
    count = num_samples(corpus.train, sequence_length)
    if count < global_batch:
        raise DataError(
            f"the training part has {len(corpus.train)} tokens = {count} samples of"
            f" data.sequence_length={sequence_length}, fewer than the {global_batch} samples of one"
            " step; add text, or lower sequence_length, or the samples of a step (train_batch_size,"
            " or micro batch, accumulation and dp)"
        )
    for place, stream, remedy in _parts_of(corpus):
        if num_samples(stream, sequence_length) < 1:
            raise DataError(
                f"{place} has {len(stream)} tokens, fewer than one sample of"
                f" data.sequence_length={sequence_length} (+ 1); add text, lower sequence_length,"
                f" or {remedy}"
            )


def _parts_of(corpus: Corpus) -> Iterator[tuple[str, TokenStream | Mixture, str]]:
    """Yield the name of each part that needs a sample, its tokens, and how to leave it out."""
    train = corpus.train.parts
    for number, part in enumerate(train):
        of_part = f" of data.mixture.{number}" if len(train) > 1 else ""
        yield f"the training part{of_part}", part, f"remove data.mixture.{number}"
    held_out = corpus.held_out.parts
    for number, part in enumerate(held_out):
        of_part = f" of data.mixture.{number}" if len(held_out) > 1 else ""
        if len(part):
            yield f"the held-out part{of_part}", part, "set data.held_out_fraction to 0"
    for name, own in corpus.validation.items():
        remedy = f"remove data.validation.{name}"
        if name.endswith("validation"):  # a data set's own, unless the config names it so
            remedy = "set data.validation_split to null, or remove it from data.validation"
        yield f"the validation set {name!r}", own.held_out, remedy
