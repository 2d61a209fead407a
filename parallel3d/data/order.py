"""The order of samples: a pure function of seed, epoch and global index.

Every epoch is a permutation of the samples that is computed one index at a time: a Feistel network
(Luby and Rackoff 1988) permutes the smallest power of four that holds the samples, and what falls
outside is permuted again until it falls inside (cycle walking; Black and Rogaway 2002, section 4).
Nothing is stored or shared: the state of a loader is one integer, the next global index.
"""

import numpy as np

ROUNDS = 8
# Fewer bits give round functions with too few outcomes to mix well; small sets just walk longer.
MIN_HALF_BITS = 3
GOLDEN = 0x9E3779B97F4A7C15
MASK64 = 2**64 - 1


def sample_index(seed: int, global_index: int | np.ndarray, num_samples: int) -> np.ndarray:
    """The sample at each global index: int64, [n] for n indices.

    The epoch is global_index // num_samples; each epoch holds every sample once, in its own order.
    These values are part of what a checkpoint relies on: they never change.
    """
    assert num_samples > 0, num_samples
    index = np.atleast_1d(np.asarray(global_index, dtype=np.uint64))
    epoch, place = np.divmod(index, np.uint64(num_samples))
    keys = mix(mix(np.full_like(epoch, seed & MASK64)) + epoch)
    half_bits = max(MIN_HALF_BITS, ((num_samples - 1).bit_length() + 1) // 2)
    sample = _feistel(place, keys, half_bits)
    while (outside := sample >= num_samples).any():
        sample[outside] = _feistel(sample[outside], keys[outside], half_bits)
    return sample.astype(np.int64)


def _feistel(value: np.ndarray, keys: np.ndarray, half_bits: int) -> np.ndarray:
    """Permute 0 .. 4**half_bits - 1; each value under its own key."""
    shift = np.uint64(half_bits)
    mask = np.uint64((1 << half_bits) - 1)
    left, right = value >> shift, value & mask
    for number in range(ROUNDS):
        round_keys = keys + np.uint64(number * GOLDEN & MASK64)
        left, right = right, left ^ (mix(right ^ round_keys) & mask)
    return left << shift | right


def mix(value: np.ndarray) -> np.ndarray:
    """64 well mixed bits from 64 bits: the output function of SplitMix64 (Steele 2014)."""
    value = value + np.uint64(GOLDEN)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = value ^ (value >> np.uint64(31))
    return mixed
