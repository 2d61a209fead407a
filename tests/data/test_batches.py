"""Samples and batches: each token predicted once an epoch, the same global batch on every mesh."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.base.errors import DataError
from parallel3d.data.batches import Batches, check_length, first_sample, num_windows
from parallel3d.data.corpus import TokenStream
from parallel3d.data.facts import Facts

pytestmark = pytest.mark.gloo


def stream(num_tokens):
    """Tokens that are their own places, so that a window shows where it comes from."""
    return TokenStream(np.arange(num_tokens, dtype=np.uint16), np.array([0, num_tokens]))


@pytest.mark.parametrize("seed", [0, 5])
def test_epoch_predicts_each_token_once_from_the_previous_one(seed):
    batches = Batches(stream(103), 10, seed)
    assert batches.num_samples == 10
    tokens, labels = batches.microbatch(0, 10)
    assert tokens.shape == labels.shape == (10, 10)
    assert tokens.dtype == labels.dtype == np.int64
    assert np.array_equal(labels, tokens + 1)
    assert sorted(labels.ravel().tolist()) == list(range(1, 101))


def test_microbatch_depends_only_on_its_index():
    batches = Batches(stream(1001), 10, 3)
    together = batches.microbatch(95, 10)[0]
    batches.microbatch(17, 3)
    apart = [Batches(stream(1001), 10, 3).microbatch(95 + i, 1)[0][0] for i in range(10)]
    assert np.array_equal(together, np.stack(apart))


def global_batch(start, micro_batch, num_microbatches, dp):
    split = {"micro_batch": micro_batch, "num_microbatches": num_microbatches, "dp": dp}
    indices = []
    for dp_coord in range(dp):
        for microbatch in range(num_microbatches):
            first = first_sample(start, microbatch, dp_coord, **split)
            indices += range(first, first + micro_batch)
    return indices


@given(st.integers(1, 60), st.integers(0, 10**9))
def test_every_split_of_a_batch_has_the_same_samples(batch, step):
    for micro_batch in range(1, batch + 1):
        for num_microbatches in range(1, batch // micro_batch + 1):
            dp, remainder = divmod(batch, micro_batch * num_microbatches)
            if remainder == 0:
                sample_indices = global_batch(step * batch, micro_batch, num_microbatches, dp)
                assert sorted(sample_indices) == list(range(step * batch, (step + 1) * batch))


def test_number_of_windows():
    assert [num_windows(n, 4) for n in (0, 1, 4, 5, 8, 9)] == [0, 0, 0, 1, 1, 2]


def test_corpus_shorter_than_a_batch_or_a_window_is_refused():
    corpus = SimpleNamespace(train=stream(33), held_out=stream(9), validation={})
    check_length(corpus, 8, 4)
    with pytest.raises(DataError, match=r"33 tokens = 4 samples of .*=8, fewer than the 5"):
        check_length(corpus, 8, 5)
    corpus.held_out = stream(0)
    check_length(corpus, 9, 3)  # nothing is held out
    corpus.validation = {"web": SimpleNamespace(held_out=stream(9), facts=Facts())}
    check_length(corpus, 8, 3)
    with pytest.raises(
        DataError, match=r"validation set .web. has 9 tokens, fewer than one sample"
    ):
        check_length(corpus, 9, 3)
    corpus.held_out = stream(9)
    with pytest.raises(DataError, match=r"held-out part has 9 tokens.* data.sequence_length=9"):
        check_length(corpus, 9, 3)
