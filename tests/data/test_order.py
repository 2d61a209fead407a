"""The order of samples: a bijection each epoch, well mixed, and the same for ever."""

import numpy as np
import pytest

from parallel3d.data.order import sample_index

pytestmark = pytest.mark.gloo

LARGE = [255, 256, 257, 1000, 4095, 4096, 4097, 65537]


SMALL = [*range(1, 40), *range(40, 200, 7)]


@pytest.mark.parametrize("sizes", [SMALL, LARGE])
def test_every_epoch_holds_every_sample_once(sizes):
    for size in sizes:
        for epoch in (0, 3):
            order = sample_index(7, epoch * size + np.arange(size), size)
            assert order.dtype == np.int64
            assert np.array_equal(np.sort(order), np.arange(size)), (size, epoch)


def test_order_never_changes():
    assert sample_index(0, np.arange(10), 10).tolist() == PINNED_10
    assert sample_index(1234, np.arange(996, 1004), 1000).tolist() == PINNED_1000
    assert sample_index(-1, 10**15, 10**9 + 7).tolist() == PINNED_LARGE


PINNED_10 = [8, 1, 2, 0, 3, 4, 6, 5, 9, 7]
PINNED_1000 = [426, 352, 625, 220, 237, 637, 105, 422]
PINNED_LARGE = [390671914]


def test_single_indices_equal_a_vector_of_indices():
    index = np.array([5, 0, 99, 100, 101, 250, 5])
    together = sample_index(3, index, 100)
    assert together.tolist() == [sample_index(3, int(i), 100).item() for i in index]


def test_epochs_and_seeds_differ():
    orders = [
        tuple(sample_index(seed, epoch * 50 + np.arange(50), 50))
        for seed in (0, 1, 2, 2**40)
        for epoch in range(5)
    ]
    assert len(set(orders)) == len(orders)


@pytest.mark.parametrize("size", [2, 5, 64, 100])
def test_first_sample_is_uniformly_distributed(size):
    num_epochs = 400 * size
    first = sample_index(11, np.arange(num_epochs) * size, size)
    counts = np.bincount(first, minlength=size)
    chi_squared = ((counts - 400) ** 2 / 400).sum()
    # Mean size - 1, variance 2 (size - 1); five standard deviations.
    assert chi_squared < size - 1 + 5 * np.sqrt(2 * (size - 1)) + 5


def test_neighbours_are_separated():
    order = sample_index(0, np.arange(10_000), 10_000)
    assert np.mean(np.abs(np.diff(order)) == 1) < 0.002
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05
