"""How work is dealt: tokens of a sample to the cp ranks that share it, samples to microbatches.

Attention's work grows with a token's position in its document. Equal numbers of tokens are not
equal work, so blocks of tokens, and samples, are dealt by their work: the longest first, each to
whom has the least so far (the longest-processing-time rule of Graham 1969, SIAM J. Appl. Math. 17,
416). All get as many.
"""

from collections import Counter
from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np

from parallel3d.config.arithmetic import block_tokens


def attention_work(documents: np.ndarray, most_keys: Sequence[int] = ()) -> np.ndarray:
    """Return the number of keys that each token attends to: int64 [samples, seq].

    - `documents` [samples, seq] has each token's document; tokens of a document are neighbours.
    - `most_keys`: for each layer the most keys of a token, over which the numbers are added up.
      Without it there is one layer, whose tokens see all tokens before them.
    """
    seq = documents.shape[-1]
    here = np.arange(seq)
    starts = np.zeros_like(documents)
    starts[:, 1:] = np.where(documents[:, 1:] != documents[:, :-1], here[1:], 0)
    before = here + 1 - np.maximum.accumulate(starts, axis=1)
    layers = Counter(most_keys) or {seq: 1}
    work: np.ndarray = np.zeros_like(before)
    for most, number in layers.items():
        work += number * np.minimum(before, most)
    return work


def num_pairs(lengths: np.ndarray, most_keys: Sequence[int]) -> int:
    """Return the sum of `attention_work` over documents of these lengths."""
    short = np.minimum(lengths, np.array(most_keys)[:, None])  # [layers, documents]
    return int((short * (short + 1) // 2 + (lengths - short) * short).sum())


def deal(documents: np.ndarray, cp: int, most_keys: Sequence[int] = ()) -> np.ndarray:
    """Return the places of the tokens that each of `cp` ranks gets, in order.

    int64 [samples, cp, seq / cp]; a pure function of `documents` [samples, seq] and of each layer's
    `most_keys`. Every rank gets as many blocks.
    """
    num_samples, seq = documents.shape
    block = block_tokens(seq, cp)
    work = attention_work(documents, most_keys)
    work = work.reshape(num_samples, -1, block).sum(-1)  # [samples, blocks]
    dealt = np.stack([_deal(own, cp) for own in work])  # [samples, cp, blocks / cp]
    return (dealt[..., None] * block + np.arange(block)).reshape(num_samples, cp, -1)


def balance(work: np.ndarray, micro_batch: int, dp: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the samples of each microbatch of a step, and the microbatches of each dp rank.

    `work` [samples] is that of the step's samples. The first is int64 [microbatches of all ranks,
    micro_batch], and does not depend on `dp`; the second is int64 [dp, microbatches of a rank], the
    most work first: ranks that wait for each other within a step then have like microbatches.
    """
    samples = np.array(_deal(work, len(work) // micro_batch))
    totals = work[samples].sum(-1)
    numbers = np.array(_deal(totals, dp))
    order = np.argsort(-totals[numbers], axis=1, kind="stable")
    return samples, np.take_along_axis(numbers, order, axis=1)


def _deal(work: np.ndarray, ranks: int) -> list[list[int]]:
    """Return the items of each of `ranks`, in order; `work` [items]."""
    most = len(work) // ranks
    items = [list[int]() for _ in range(ranks)]
    least = [(0, rank) for rank in range(ranks)]  # a heap
    for item in np.argsort(-work, kind="stable").tolist():
        total, rank = heappop(least)
        items[rank].append(item)
        if len(items[rank]) < most:
            heappush(least, (total + int(work[item]), rank))
    return [sorted(own) for own in items]
