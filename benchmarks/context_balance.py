"""How evenly attention is dealt to context-parallel ranks, beside head-tail and torch's PTRR.

    python benchmarks/context_balance.py [--samples 16] [--microbatches | --window 4096]

For each packing of documents of log-normal lengths into samples: the most work of a rank, by the
ranks' mean, averaged over samples and at worst. Work is the pairs of query and key that attend.
Head-tail dealing (Megatron-LM, arXiv:2407.21783) gives a rank the i-th piece of 2 cp and the i-th
from the end. PTRR is torch's balancer of blocks for FlexAttention, which sorts blocks by the number
of their unmasked key blocks and deals them in turn, forwards and backwards.

With `--microbatches`, the same of the microbatches of a step and of its dp ranks: with the samples
in their order, and dealt (data.balance_microbatches). With `--window`, every second layer has that
window: dealt by the work of layers without one, and by that of all layers.
"""

import argparse
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch.distributed.tensor.experimental._context_parallel._load_balancer import (
    _PTRRLoadBalancer,
)

from parallel3d.data.deal import attention_work, balance, deal

BLOCK = 128
RANKS = {8192: 8, 32768: 8, 131072: 16}  # by the length of samples
DOCUMENTS = ((1024, 1.0), (4096, 1.0), (16384, 1.0), (4096, 2.0))  # mean tokens, sigma


def packed(seq: int, mean: int, sigma: float, samples: int) -> np.ndarray:
    """The document of each token, [samples, seq]: one after the other until the sample is full."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(samples):
        lengths = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, seq)
        ends = np.maximum(1, lengths).astype(np.int64).cumsum()
        rows.append(ends.searchsorted(np.arange(seq), side="right"))
    return np.stack(rows)


def in_blocks(blocks: np.ndarray) -> np.ndarray:
    """Places of tokens, [samples, cp, seq / cp], from the blocks of each rank."""
    places = blocks[..., None] * BLOCK + np.arange(BLOCK)
    return places.reshape(*blocks.shape[:2], -1)


def head_tail(documents: np.ndarray, cp: int) -> np.ndarray:
    """Each rank's i-th piece of 2 cp, and the i-th from the end."""
    samples, seq = documents.shape
    pieces = np.arange(seq).reshape(2 * cp, -1)
    own = np.stack([np.concatenate([pieces[i], pieces[-1 - i]]) for i in range(cp)])
    return np.broadcast_to(own, (samples, *own.shape))


def ptrr(documents: np.ndarray, cp: int) -> np.ndarray:
    """As torch deals the blocks: by the number of key blocks that a block attends to."""
    here = np.arange(documents.shape[1])
    first = (here + 1 - attention_work(documents)).reshape(len(documents), -1, BLOCK).min(-1)
    counts = torch.from_numpy(np.arange(first.shape[1]) - first // BLOCK + 1)
    dealt = [_PTRRLoadBalancer.ptrr_scheduling(own, cp).numpy() for own in counts]
    return in_blocks(np.stack(dealt))


DEALS: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "head-tail": head_tail,
    "torch's PTRR": ptrr,
    "longest first": deal,
}


def compare_microbatches() -> None:
    """Print the table of microbatches and dp ranks: 16 steps of 16 microbatches on 4 dp ranks."""
    print(
        "| sample | documents | a microbatch's samples | microbatches | balanced | dp ranks |"
        " balanced |",
        "|---|---|---|---|---|---|---|",
        sep="\n",
    )
    steps = 16
    microbatches = 16
    dp = 4
    for seq in (8192, 32768):
        for mean, sigma in DOCUMENTS:
            for size in (1, 4):
                samples = packed(seq, mean, sigma, steps * microbatches * size)
                work = np.stack([attention_work(row[None]).sum() for row in samples])
                columns = [list[float]() for _ in range(4)]
                for step in work.reshape(steps, -1):
                    dealt, numbers = balance(step, size, dp)
                    even = step[dealt].sum(-1)
                    sums = (
                        step.reshape(-1, size).sum(-1),
                        even,
                        step.reshape(dp, -1).sum(-1),
                        even[numbers].sum(-1),
                    )
                    for column, own in zip(columns, sums, strict=True):
                        column.append(own.max() / own.mean())
                cells = [f"{np.mean(column):.3f} ({max(column):.3f})" for column in columns]
                name = f"| {seq:,} | mean {mean:,}, σ {sigma:g} | {size} |"
                print(name, " | ".join(cells), "|", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--microbatches", action="store_true")
    parser.add_argument("--window", type=int)
    args = parser.parse_args()
    if args.microbatches:
        compare_microbatches()
        return
    for seq, cp in RANKS.items():
        deals = DEALS
        most_keys = [seq]
        if args.window:
            most_keys = [seq, args.window]
            by_all = partial(deal, most_keys=most_keys)
            deals = {"without windows": deal, "with windows": by_all}
        if seq == min(RANKS):
            columns = "|---" * len(deals)
            print(
                f"| sample, cp | documents | {' | '.join(deals)} |", f"|---|---{columns}|", sep="\n"
            )
        for mean, sigma in DOCUMENTS:
            documents = packed(seq, mean, sigma, args.samples)
            cells = []
            for dealt in deals.values():
                work = attention_work(documents, most_keys)[:, None]
                sums = np.take_along_axis(work, dealt(documents, cp), 2).sum(-1)
                ratios = sums.max(1) / sums.mean(1)
                cells.append(f"{ratios.mean():.3f} ({ratios.max():.3f})")
            name = f"| {seq:,}, {cp} | mean {mean:,}, σ {sigma:g} |"
            print(name, " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
