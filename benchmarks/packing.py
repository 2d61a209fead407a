"""Measure packing: its time, and the padding and cut documents with and without it (docs/data.md).

    python -m benchmarks.packing CACHE [--documents 10000000]

packs Python's standard library (prepared in the folder CACHE), and so many documents whose lengths
have a log-normal distribution with a median of 490 tokens and a mean of 1,000.
"""

import argparse
import time

import numpy as np

from parallel3d.config.data import DataConfig
from parallel3d.data.facts import Facts
from parallel3d.data.packing import Packing
from parallel3d.data.prepare import prepare


def cut_by_windows(bounds: np.ndarray, length: int) -> np.ndarray:
    """Return which documents are in more than one sample without packing: bool [documents]."""
    last = np.minimum(bounds[1:], bounds[-1] - 1) - 1
    return np.asarray(last // length > bounds[:-1] // length)


def measure(name: str, bounds: np.ndarray, length: int) -> None:
    """Print a row of the table in docs/data.md."""
    began = time.process_time()
    packing = Packing.make(bounds, length)
    seconds = time.process_time() - began
    facts = packing.add_facts(Facts(), bounds)
    cut = cut_by_windows(bounds, length)
    print(
        f"| {name} | {length:,} | {cut.mean():.1%} | {facts.packed_cut_share:.1%} |"
        f" {facts.packed_padding_share:.3%} | {seconds:.2f} s |",
        flush=True,
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("cache")
    parser.add_argument("--documents", type=int, default=10**7)
    args = parser.parse_args()
    corpus = prepare(DataConfig(sequence_length=1024, cache=args.cache, vocab_size=32768))
    own = np.asarray(corpus.stream("train").bounds)
    lengths = np.random.default_rng(0).lognormal(6.2, 1.2, args.documents).astype(np.int64) + 1
    drawn = np.concatenate([[0], np.cumsum(lengths)])
    print("| documents | sample | cut without packing | cut | padding | time |")
    print("|---|---|---|---|---|---|")
    for name, bounds in ((f"{len(own) - 1:,} of Python", own), (f"{args.documents:,}", drawn)):
        for length in (1024, 4096, 8192):
            measure(name, bounds, length)


if __name__ == "__main__":
    main()
