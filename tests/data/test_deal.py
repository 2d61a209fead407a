"""How tokens are dealt to the ranks of a cp group: each once, evenly, whatever the documents."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.config.arithmetic import block_tokens
from parallel3d.data.deal import attention_work, balance, deal, num_pairs
from parallel3d.verify import definitions

pytestmark = pytest.mark.gloo


def packed(seq, mean, samples, seed):
    """Documents of log-normal lengths, one after the other until the sample is full."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(samples):
        lengths = np.maximum(1, rng.lognormal(np.log(mean) - 0.5, 1, seq).astype(int))
        lengths = lengths[: np.searchsorted(lengths.cumsum(), seq) + 1]
        rows.append(np.repeat(np.arange(len(lengths)), lengths)[:seq])
    return np.stack(rows)


@given(st.sampled_from([2, 3, 4, 8]), st.integers(1, 6), st.integers(0, 99))
def test_each_token_goes_to_one_rank(cp, blocks, seed):
    seq = 4 * cp * 2**blocks
    documents = packed(seq, seq // 3, 2, seed)
    places = deal(documents, cp)
    block = block_tokens(seq, cp)
    assert places.shape == (2, cp, seq // cp) and block == min(128, 2**blocks)
    for sample in places:
        assert sorted(sample.ravel().tolist()) == list(range(seq))
        assert (np.diff(sample) > 0).all()  # each rank has its own in order
        assert (sample[:, ::block] % block == 0).all()
    assert (deal(documents[1:], cp) == places[1:]).all()  # a sample's deal is its own


def test_attention_work_equals_a_slow_loop():
    documents = packed(64, 9, 3, seed=0)
    for row, work in zip(documents, attention_work(documents), strict=True):
        assert work.tolist() == [list(row[: i + 1]).count(row[i]) for i in range(64)]


def test_attention_work_within_windows_equals_a_slow_loop():
    """Layers with windows of 5 and 12 tokens, and one without, token by token."""
    layers = [5, 64, 5, 12]
    documents = packed(64, 9, 3, seed=0)
    for row, work in zip(documents, attention_work(documents, layers), strict=True):
        before = [list(row[: i + 1]).count(row[i]) for i in range(64)]
        assert work.tolist() == [sum(min(n, most) for most in layers) for n in before]
        assert num_pairs(np.unique(row, return_counts=True)[1], layers) == work.sum()


def max_by_mean(documents, cp, most_keys=()):
    """The most work of a rank of each sample, by the mean."""
    places = deal(documents, cp, most_keys)
    work = np.take_along_axis(attention_work(documents, most_keys)[:, None], places, 2).sum(-1)
    return work.max(1) / work.mean(1)


@pytest.mark.parametrize(("seq", "cp"), [(8192, 8), (32768, 8), (131072, 16)])
def test_ranks_have_equal_work(seq, cp):
    """With and without isolation. Cut into neighbours, the last rank has almost twice the mean."""
    assert max_by_mean(np.zeros((1, seq), dtype=int), cp).max() < 1.001
    documents = packed(seq, 4096, 1, seed=1)
    assert max_by_mean(documents, cp).max() <= 1.01
    assert max_by_mean(documents, cp, [1024, seq]).max() <= 1.01
    neighbours = attention_work(documents).reshape(1, cp, -1).sum(-1)
    assert (neighbours.max(1) / neighbours.mean(1)).max() > 1.2


@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3]))
def test_each_sample_is_in_one_microbatch_of_one_rank(micro_batch, dp, num_microbatches):
    documents = packed(64, 12, micro_batch * dp * num_microbatches, seed=dp)
    work = attention_work(documents).sum(-1)
    samples, numbers = balance(work, micro_batch, dp)
    assert samples.shape == (dp * num_microbatches, micro_batch)
    assert sorted(samples.ravel().tolist()) == list(range(len(work)))
    assert numbers.shape == (dp, num_microbatches)
    assert sorted(numbers.ravel().tolist()) == list(range(dp * num_microbatches))
    assert (np.diff(work[samples].sum(-1)[numbers]) <= 0).all()
    assert (balance(work, micro_batch, dp * num_microbatches)[0] == samples).all()  # any mesh
    expected = definitions.balanced(torch.from_numpy(documents), micro_batch, dp, [64])
    assert samples[numbers].reshape(dp, -1).tolist() == expected


def test_microbatches_and_dp_ranks_have_equal_work():
    work = attention_work(packed(1024, 256, 128, seed=1)).sum(-1)
    samples, numbers = balance(work, 4, 4)
    microbatch_work = work[samples].sum(-1)
    rank_work = microbatch_work[numbers].sum(-1)

    def max_of(work):
        return work.max() / work.mean()

    assert max_of(microbatch_work) < 1.1 < 1.5 < max_of(work.reshape(-1, 4).sum(-1))
    assert max_of(rank_work) < 1.01 < 1.05 < max_of(work.reshape(4, -1).sum(-1))
