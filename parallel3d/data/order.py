"""The order of samples: a pure function of seed, epoch and global index.

Every epoch is a permutation of the samples, computed one index at a time. A Feistel network (Luby
and Rackoff 1988) permutes the smallest power of four that holds all samples; an output outside the
range is permuted again until it is inside (cycle walking; Black and Rogaway 2002, section 4).
Nothing is stored or shared: the state of a loader is one integer, the next global index.

In a mixture, the part of each sample is another function of the index. The shares are whole numbers
a_1, a_2, ... with the sum D, and a pattern of D samples is repeated. In the pattern, sample j of
part s (from 0) has a window: from index floor(j D / a_s) to index ceil((j + 1) D / a_s) - 1. Each
index is assigned to the part whose open window closes first. Every prefix of n samples then has
floor(n a_s / D) or ceil(n a_s / D) samples of part s (Baruah, Cohen, Plaxton, Varvel 1996,
"Proportionate progress").

In a stream of shards the order of an epoch is a permutation of the shards, cut into groups of at
most `window` shards. The samples of a group are shuffled together, and the groups follow each
other. So a run needs two groups of shards on its disk, and the state of a loader is still one
integer. If the window holds all shards, there is one group, ordered as a local corpus is.
"""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache, reduce
from itertools import chain
from math import gcd, lcm

import numpy as np
from numpy.typing import ArrayLike

ROUNDS = 8
# With fewer bits the round function has too few outcomes to mix well; small sets walk longer.
MIN_HALF_BITS = 3
GOLDEN = 0x9E3779B97F4A7C15
MASK64 = 2**64 - 1
# Longest pattern of a mixture; finer shares are rounded.
MAX_PATTERN = 2**16
# The order of the shards must not resemble that of the samples.
_SHARDS = 0x5348415244


def sample_index(seed: int, global_index: int | np.ndarray, num_samples: int) -> np.ndarray:
    """Return the sample at each global index: int64 [n] for n indices.

    The epoch is global_index // num_samples; each epoch has every sample once, in its own order.
    Checkpoints rely on these values, so they must never change.
    """
    assert num_samples > 0, num_samples
    index = np.atleast_1d(np.asarray(global_index, dtype=np.uint64))
    epoch, place = np.divmod(index, np.uint64(num_samples))
    keys = mix(mix(np.full_like(epoch, seed & MASK64)) + epoch)
    half_bits = max(MIN_HALF_BITS, ((num_samples - 1).bit_length() + 1) // 2)
    sample = _feistel(place, keys, half_bits)
    outside = sample >= num_samples
    while outside.any():
        sample[outside] = _feistel(sample[outside], keys[outside], half_bits)
        outside = sample >= num_samples
    return sample.astype(np.int64)


def _feistel(value: np.ndarray, keys: np.ndarray, half_bits: int) -> np.ndarray:
    """Permute 0 .. 4**half_bits - 1, each value with its own key."""
    shift = np.uint64(half_bits)
    mask = np.uint64((1 << half_bits) - 1)
    left = value >> shift
    right = value & mask
    for number in range(ROUNDS):
        round_keys = keys + np.uint64(number * GOLDEN & MASK64)
        left, right = right, left ^ (mix(right ^ round_keys) & mask)
    return left << shift | right


def mix(value: np.ndarray) -> np.ndarray:
    """Hash 64 bits to 64 bits with the output function of SplitMix64 (Steele 2014)."""
    value = value + np.uint64(GOLDEN)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = value ^ (value >> np.uint64(31))
    return mixed


def whole_shares(weights: Sequence[float]) -> list[int]:
    """Return whole numbers in the proportions of the weights, which are read as decimals.

    The sum is at most MAX_PATTERN. Finer shares are rounded by largest remainders, none to 0.
    """
    exact = [Fraction(repr(float(weight))) for weight in weights]
    denominator = lcm(*(weight.denominator for weight in exact))
    shares = [int(weight * denominator) for weight in exact]
    shares = [share // reduce(gcd, shares) for share in shares]
    if sum(shares) <= MAX_PATTERN:
        return shares
    ideal = [Fraction(share * MAX_PATTERN, sum(shares)) for share in shares]
    rounded = [max(1, int(share)) for share in ideal]
    while sum(rounded) != MAX_PATTERN:
        # Add to the largest remainders, or subtract from the smallest if some were raised to 1.
        step = 1 if sum(rounded) < MAX_PATTERN else -1
        owed = [
            (step * (ideal[part] - number), part)
            for part, number in enumerate(rounded)
            if number + step >= 1
        ]
        _, part = max(owed)
        rounded[part] += step
    return rounded


def bounds_of(sizes: ArrayLike) -> np.ndarray:
    """Return the bounds of consecutive parts of these sizes [n]: int64 [n + 1], from 0."""
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])


def each_number(numbers: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield each distinct number, and which of the numbers are equal to it: bool [n]."""
    for number in np.unique(numbers).tolist():
        yield number, numbers == number


class Mixing:
    """A mapping from global sample index to a part of a mixture and a place in that part.

    `changes` are (first global index, weights from there on). Each part goes on where it was.
    """

    def __init__(
        self, weights: Sequence[float], changes: Sequence[tuple[int, Sequence[float]]] = ()
    ) -> None:
        self.shares = np.array(whole_shares(weights), dtype=np.int64)
        self.period = int(self.shares.sum())
        self._part = _pattern(self.shares.tolist())
        # For each place in the pattern: the number of earlier samples of the same part.
        self._before = np.empty(self.period, dtype=np.int64)
        for part, share in enumerate(self.shares):
            self._before[self._part == part] = np.arange(share)
        # The mixings one after another, their first indices, and the samples of each part by then.
        self._mixings = [self, *(Mixing(own) for _, own in changes)]
        self._firsts = np.array([0, *(first for first, _ in changes)])
        counts = zip(self._mixings, np.diff(self._firsts).tolist(), strict=False)
        done = [np.zeros_like(self.shares), *(one._count(number) for one, number in counts)]
        self._done = np.cumsum(done, axis=0)

    def assign(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the part of each global index [n], and the place in that part's own order."""
        parts, places = np.empty((2, len(index)), dtype=np.int64)
        numbers = np.searchsorted(self._firsts, index, side="right") - 1
        for number, here in each_number(numbers):
            mixing = self._mixings[number]
            block, place = np.divmod(index[here] - self._firsts[number], mixing.period)
            part = mixing._part[place]
            parts[here] = part
            own = block * mixing.shares[part] + mixing._before[place]
            places[here] = self._done[number][part] + own
        return parts, places

    def index_of(self, part: int, place: int) -> int:
        """Return the global index of a place in a part's order."""
        number = int(np.searchsorted(self._done[:, part], place, side="right")) - 1
        mixing = self._mixings[number]
        place = place - int(self._done[number, part])
        block, before = divmod(place, int(mixing.shares[part]))
        within = int(np.flatnonzero(mixing._part == part)[before])
        return int(self._firsts[number]) + block * mixing.period + within

    def counts(self, index: int) -> np.ndarray:
        """Return the number of samples of each part before a global index: int64 [parts]."""
        number = int(np.searchsorted(self._firsts, index, side="right")) - 1
        within = self._mixings[number]._count(index - int(self._firsts[number]))
        return np.asarray(self._done[number] + within)

    def _count(self, number: int) -> np.ndarray:
        """Return how many of the first samples of this mixing are of each part."""
        block, rest = divmod(number, self.period)
        some = np.bincount(self._part[:rest], minlength=len(self.shares))
        return np.asarray(block * self.shares + some)


def _pattern(shares: list[int]) -> np.ndarray:
    period = sum(shares)
    pattern = np.empty(period, dtype=np.int64)
    num_assigned = [0] * len(shares)
    for index in range(period):
        # The window of a part's sample j opens at j D / a and closes at ceil((j + 1) D / a) - 1.
        closing = []
        for part, share in enumerate(shares):
            number = num_assigned[part]
            if number * period // share <= index:
                closing.append((-(-(number + 1) * period // share), part))
        _, part = min(closing)
        pattern[index] = part
        num_assigned[part] += 1
    return pattern


class ShardOrder:
    """The order of samples in shards.

    - `counts` int64 [shards]: samples of each shard; sample numbers ascend from shard to shard
    - `window`: shards whose samples are shuffled together
    """

    def __init__(self, counts: np.ndarray, window: int) -> None:
        self.num_shards = len(counts)
        self.window = window
        self.firsts = bounds_of(counts)
        self.num_samples = int(self.firsts[-1])
        self.num_groups = -(-self.num_shards // window)
        # Groups of about equal size: a small one at the end would be shuffled less.
        self._cuts = np.arange(self.num_groups + 1) * self.num_shards // self.num_groups
        self._epoch = lru_cache(4)(self._make_epoch)

    def sample_index(self, seed: int, index: np.ndarray) -> np.ndarray:
        """Return the number of the sample at each global index: int64 [n]."""
        samples = np.empty(len(index), dtype=np.int64)
        for epoch, group, here, places in self._groups(seed, index):
            members, ends = self._members(seed, epoch, group)
            key = seed
            if group:
                key = seed ^ int(mix(np.array([group], np.uint64))[0])
            size = int(ends[-1])
            within = sample_index(key, epoch * size + places, size)
            shard = np.searchsorted(ends, within, side="right")
            begins = np.concatenate([[0], ends[:-1]])
            samples[here] = self.firsts[members[shard]] + within - begins[shard]
        return samples

    def wanted(self, seed: int, index: np.ndarray) -> list[int]:
        """Return the shards of the groups of these global indices, and those of the next group.

        The latter are left out if the indices are in several groups, which fill the cache.
        """
        numbers = [n * self.num_groups + group for n, group, _, _ in self._groups(seed, index)]
        if len(numbers) == 1:
            numbers = [numbers[0], numbers[0] + 1]
        return self.shards_of(seed, numbers)

    def shards_of(self, seed: int, numbers: Sequence[int]) -> list[int]:
        """Return the shards of groups, which are numbered over all epochs; each shard once."""
        members = [self.group(seed, number)[0].tolist() for number in numbers]
        return list(dict.fromkeys(chain.from_iterable(members)))

    def group(self, seed: int, number: int) -> tuple[np.ndarray, range]:
        """Return the shards of a group and the global indices of its samples, over all epochs."""
        epoch, group = divmod(number, self.num_groups)
        ends = self._epoch(seed, epoch)[1]
        begin = epoch * self.num_samples
        first = int(ends[group - 1]) if group else 0
        return self._members(seed, epoch, group)[0], range(begin + first, begin + int(ends[group]))

    def _groups(
        self, seed: int, index: np.ndarray
    ) -> list[tuple[int, int, np.ndarray, np.ndarray]]:
        """Return (epoch, group, which of the indices are in it, their places in it), in order."""
        epochs, places = np.divmod(np.asarray(index, np.int64), self.num_samples)
        groups = []
        for epoch in np.unique(epochs).tolist():
            ends = self._epoch(seed, epoch)[1]
            numbers = np.searchsorted(ends, places, side="right")
            for group in np.unique(numbers[epochs == epoch]).tolist():
                here = (epochs == epoch) & (numbers == group)
                first = int(ends[group - 1]) if group else 0
                groups.append((epoch, group, here, places[here] - first))
        return groups

    def _members(self, seed: int, epoch: int, group: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the shards of a group, ascending, and the ends of their samples in it."""
        permutation = self._epoch(seed, epoch)[0]
        members = np.sort(permutation[self._cuts[group] : self._cuts[group + 1]])
        return members, np.cumsum(self.firsts[members + 1] - self.firsts[members])

    def _make_epoch(self, seed: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the permutation of the shards, and the end of each group in the epoch."""
        count = self.num_shards
        permutation = sample_index(seed ^ _SHARDS, epoch * count + np.arange(count), count)
        sizes = (self.firsts[permutation + 1] - self.firsts[permutation]).astype(np.int64)
        return permutation, np.cumsum(sizes)[self._cuts[1:] - 1]


def windows_per_shard(tokens: np.ndarray, sequence_length: int) -> np.ndarray:
    """Return the number of samples that begin in each shard of so many tokens: int64 [shards].

    Samples are those of one stream of all shards: they may end in a later shard.
    """
    ends = np.cumsum(tokens)
    num_samples = max(0, (int(ends[-1]) - 1) // sequence_length)
    before = np.minimum(num_samples, -(-ends // sequence_length))
    return np.diff(before, prepend=0)
