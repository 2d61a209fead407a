"""How the tokens of a sample are dealt to the context-parallel ranks that share it.

Attention's work grows with a token's position in its document. Equal numbers of tokens are not
equal work, so blocks of tokens are dealt by their work: the longest first, each to the rank with
the least so far (the longest-processing-time rule of Graham 1969, SIAM J. Appl. Math. 17, 416).
"""

from heapq import heapify, heappop, heappush

import numpy as np

from parallel3d.config.arithmetic import block_tokens


def attention_work(documents: np.ndarray) -> np.ndarray:
    """Return the number of keys that each token attends to: int64 [samples, seq].

    `documents` [samples, seq] has each token's document; tokens of a document are neighbours.
    """
    here = np.arange(documents.shape[-1])
    starts = np.zeros_like(documents)
    starts[:, 1:] = np.where(documents[:, 1:] != documents[:, :-1], here[1:], 0)
    return here + 1 - np.maximum.accumulate(starts, axis=1)


def deal(documents: np.ndarray, cp: int) -> np.ndarray:
    """Return the places of the tokens that each of `cp` ranks gets, in order.

    int64 [samples, cp, seq / cp]; a pure function of `documents` [samples, seq]. Every rank gets as
    many blocks.
    """
    num_samples, seq = documents.shape
    block = block_tokens(seq, cp)
    work = attention_work(documents).reshape(num_samples, -1, block).sum(-1)  # [samples, blocks]
    dealt = np.stack([_deal_blocks(own, cp) for own in work])  # [samples, cp, blocks / cp]
    return (dealt[..., None] * block + np.arange(block)).reshape(num_samples, cp, -1)


def _deal_blocks(work: np.ndarray, cp: int) -> list[list[int]]:
    """Return the blocks of each rank, in order; `work` [blocks]."""
    most, blocks = len(work) // cp, [list[int]() for _ in range(cp)]
    ranks = [(0, rank) for rank in range(cp)]
    heapify(ranks)
    for block in np.argsort(-work, kind="stable").tolist():
        total, rank = heappop(ranks)
        blocks[rank].append(block)
        if len(blocks[rank]) < most:
            heappush(ranks, (total + int(work[block]), rank))
    return [sorted(own) for own in blocks]
