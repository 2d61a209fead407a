"""The order of the samples of a stream of shards: a pure function of seed, epoch and global index.

The order of an epoch is a permutation of the shards, cut into groups of at most `window` shards.
The samples of a group are shuffled together, and the groups follow each other. So a run needs two
groups of shards on its disk, and the state of a loader is still one integer. If the window holds
all shards, there is one group, and its order is `order.sample_index`, as that of a local corpus.
"""

from functools import lru_cache

import numpy as np

from parallel3d.data.order import mix, sample_index

# The order of the shards must not resemble that of the samples.
_SHARDS = 0x5348415244


class ShardOrder:
    """The order of samples in shards.

    - `counts` int64 [shards]: samples of each shard; sample numbers ascend from shard to shard
    - `window`: shards whose samples are shuffled together
    """

    def __init__(self, counts: np.ndarray, window: int) -> None:
        self.num_shards, self.window = len(counts), window
        self.firsts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self.num_samples = int(self.firsts[-1])
        self.num_groups = groups = -(-self.num_shards // window)
        # Groups of about equal size: a small one at the end would be shuffled less.
        self._cuts = np.arange(groups + 1) * self.num_shards // groups
        self._epoch = lru_cache(4)(self._make_epoch)

    def sample_index(self, seed: int, index: np.ndarray) -> np.ndarray:
        """Return the number of the sample at each global index: int64 [n]."""
        samples = np.empty(len(index), dtype=np.int64)
        for epoch, group, here, places in self._groups(seed, index):
            members, ends = self._members(seed, epoch, group)
            key = seed if group == 0 else seed ^ int(mix(np.array([group], np.uint64))[0])
            size = int(ends[-1])
            within = sample_index(key, epoch * size + places, size)
            shard = np.searchsorted(ends, within, side="right")
            begins = np.concatenate([[0], ends[:-1]])
            samples[here] = self.firsts[members[shard]] + within - begins[shard]
        return samples

    def wanted(self, seed: int, index: np.ndarray) -> tuple[list[int], list[int]]:
        """Return the shards of the groups of these global indices, and those of the next group.

        The latter are none if the indices are in several groups, which fill the cache.
        """
        now: list[int] = []
        groups = self._groups(seed, index)
        for epoch, group, _, _ in groups:
            now += self._members(seed, epoch, group)[0].tolist()
        if len(groups) > 1:
            return list(dict.fromkeys(now)), []
        epoch, group, _, _ = groups[0]
        epoch, group = divmod(epoch * self.num_groups + group + 1, self.num_groups)
        following = self._members(seed, epoch, group)[0].tolist()
        return list(dict.fromkeys(now)), following

    def group(self, seed: int, number: int) -> tuple[np.ndarray, range]:
        """Return the shards of a group and the global indices of its samples, over all epochs."""
        epoch, group = divmod(number, self.num_groups)
        ends, begin = self._epoch(seed, epoch)[1], epoch * self.num_samples
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
