"""The order of a stream's samples: every sample once an epoch, group by group, a pure function."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel3d.data.order import ShardOrder, sample_index, windows_per_shard

pytestmark = pytest.mark.gloo

COUNTS = st.lists(st.integers(0, 6), min_size=1, max_size=8).filter(any)


@settings(max_examples=10)
@given(COUNTS, st.integers(0, 2**63), st.integers(1, 14), st.data())
def test_each_epoch_has_every_sample_at_a_fixed_place(counts, seed, window, data):
    order = ShardOrder(np.array(counts), window)
    size = sum(counts)
    whole = order.sample_index(seed, np.arange(3 * size))
    for epoch in whole.reshape(3, size):
        assert sorted(epoch.tolist()) == [*range(size)]
    some = data.draw(st.lists(st.integers(0, 3 * size - 1), min_size=1))
    again = ShardOrder(np.array(counts), window).sample_index(seed, np.array(some))
    assert again.tolist() == whole[some].tolist()


@settings(max_examples=10)
@given(COUNTS, st.integers(0, 2**63), st.integers(0, 3))
def test_window_of_all_shards_has_the_order_of_a_local_corpus(counts, seed, more):
    index = np.arange(2 * sum(counts) + 5)
    order = ShardOrder(np.array(counts), len(counts) + more)
    local = sample_index(seed, index, sum(counts))
    assert order.sample_index(seed, index).tolist() == local.tolist()


@settings(max_examples=8)
@given(COUNTS, st.integers(0, 2**63), st.integers(1, 5))
def test_two_groups_of_shards_suffice_at_any_index(counts, seed, window):
    """The next group is announced while the samples of the one before it are read."""
    order = ShardOrder(np.array(counts), window)
    shard_of = np.repeat(np.arange(len(counts)), counts)
    announced = set(range(len(counts)))
    for index in np.arange(2 * sum(counts)).reshape(-1, 1):
        wanted = order.wanted(seed, index)
        shard = shard_of[order.sample_index(seed, index)[0]]
        assert shard in wanted and len(wanted) <= 2 * window
        # A group without samples is passed over.
        assert shard in announced or not all(counts)
        announced = set(wanted)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=9), st.integers(1, 7))
def test_windows_per_shard_equal_those_of_one_stream(tokens, length):
    starts = np.arange(0, max(0, sum(tokens) - length), length)
    shards = np.searchsorted(np.cumsum(tokens), starts, side="right")
    expected = np.bincount(shards, minlength=len(tokens))
    assert windows_per_shard(np.array(tokens), length).tolist() == expected.tolist()
