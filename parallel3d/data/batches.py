"""Samples for training and evaluation: which ones a microbatch holds, and their tokens.

Samples are windows of sequence_length + 1 tokens that start every sequence_length tokens: each
token of the stream is predicted once an epoch, and what is left at its end is dropped. A window
may hold several documents, with end-of-text between them.
"""

import numpy as np

from parallel3d.data.corpus import Corpus, TokenStream
from parallel3d.data.order import sample_index
from parallel3d.errors import DataError


def num_windows(num_tokens: int, sequence_length: int) -> int:
    """Give how many samples a stream of `num_tokens` holds."""
    return max(0, (num_tokens - 1) // sequence_length)


def first_sample(
    step: int, microbatch: int, dp_coord: int, *, micro_batch: int, num_microbatches: int, dp: int
) -> int:
    """Give the global index of a microbatch's first sample; its others follow without a gap.

    A step's global batch of B = micro_batch × num_microbatches × dp samples has the indices
    step × B .. step × B + B - 1, in whatever way B is split:

        index = step × B + (dp_coord × num_microbatches + microbatch) × micro_batch + i
    """
    assert 0 <= microbatch < num_microbatches and 0 <= dp_coord < dp
    batch = micro_batch * num_microbatches * dp
    return step * batch + (dp_coord * num_microbatches + microbatch) * micro_batch


def num_evaluation_batches(num_samples: int, batch: int, limit: int) -> int:
    """Give how many whole batches of held-out samples to evaluate on: at most `limit`, at least 1.

    If there are fewer samples than one batch holds, that batch goes round them more than once.
    """
    return max(1, min(limit, num_samples // batch))


class Batches:
    """The samples of a stream by global index: shuffled anew each epoch, or in stream order.

    With a `seed` the order is that of `order.sample_index`; with None, for held-out evaluation,
    it is the stream's own, from its start and round again. Nothing here moves: the same index
    gives the same sample on every mesh, at any time.
    """

    def __init__(self, stream: TokenStream, sequence_length: int, seed: int | None) -> None:
        self.stream = stream
        self.sequence_length = sequence_length
        self.seed = seed
        self.num_samples = num_windows(len(stream), sequence_length)
        assert self.num_samples > 0, "check_length comes first"

    def microbatch(self, first_sample: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Give (tokens, labels) of samples first_sample .. first_sample + count - 1.

        Both int64 [count, sequence_length]; labels[b, t] is the token after tokens[b, t].
        """
        index = np.arange(first_sample, first_sample + count)
        if self.seed is None:
            samples = index % self.num_samples
        else:
            samples = sample_index(self.seed, index, self.num_samples)
        starts = samples * self.sequence_length
        within = np.arange(self.sequence_length + 1)
        windows = self.stream.tokens[starts[:, None] + within]  # [count, sequence_length + 1]
        windows = windows.astype(np.int64)
        return windows[:, :-1].copy(), windows[:, 1:].copy()


def check_length(corpus: Corpus, sequence_length: int, global_batch: int) -> None:
    """Raise DataError if training has less than one global batch, or evaluation no window."""
    num_train = num_windows(len(corpus.train), sequence_length)
    if num_train < global_batch:
        raise DataError(
            f"the corpus is shorter than one batch: its training part has {len(corpus.train)}"
            f" tokens, {num_train} samples at data.sequence_length={sequence_length}, and a step"
            f" takes {global_batch}; add text, or lower sequence_length, micro batch, accumulation"
            " or dp"
        )
    if num_windows(len(corpus.held_out), sequence_length) < 1:
        raise DataError(
            f"the held-out part has {len(corpus.held_out)} tokens, fewer than one sample of"
            f" data.sequence_length={sequence_length} (+ 1); raise data.held_out_fraction, add"
            " text, or lower sequence_length"
        )
