"""Whether a held-out loss is one: a run's weights on held-out and on random training samples.

    python benchmarks/held_out.py runs/NAME [runs/NAME ...] [--samples 64]

The final weights of each run are evaluated by plain transformers on one process: on the held-out
samples of the run, on equally many random samples of its training part, and on as many of those of
its documents that are no larger than what is held out (the split lets the largest train). Of
several runs, the held-out losses are compared by pairs, in pooled standard errors: runs that differ
in data.held_out_seed alone should agree within 2.
"""

import argparse
from itertools import combinations
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from parallel3d.config import RunConfig
from parallel3d.data.corpus import Corpus, TokenStream
from parallel3d.data.evaluation_samples import EvaluationSamples, SetLoss, held_out_samples
from parallel3d.data.prepare import prepare
from parallel3d.verify.reference import in_our_names
from tests.verify.measuring import losses_of

AT_ONCE = 16  # samples


def main() -> None:
    """Print a line for each run, and one for each pair of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--samples", type=int, default=64)
    args = parser.parse_args()
    found = {run: losses_of_run(run, args.samples) for run in args.runs}
    for one, other in combinations(found, 2):
        print(f"{one.name} - {other.name}, held out: {apart(found[one], found[other])}")


def losses_of_run(run: Path, most: int) -> SetLoss:
    """Print what the weights of a run come to; give its held-out loss."""
    config = RunConfig.from_json(str(run / "config.json"))
    corpus = prepare(config.data)
    length = config.data.sequence_length
    weights = {}
    for path in sorted((run / "weights").glob("*.safetensors")):
        weights |= load_file(path)
    weights = in_our_names(config.model, weights)
    held_out = held_out_samples(corpus, length, most)
    training = EvaluationSamples(corpus.stream("train"), length, held_out.num_samples)
    alike = EvaluationSamples(no_larger(corpus), length, held_out.num_samples)
    sets = {"held out": held_out, "training": training, "training, no larger documents": alike}
    losses = {name: evaluate(config, weights, samples) for name, samples in sets.items()}
    for name, loss in losses.items():
        print(f"{run.name}, {name}: {loss.in_words()}")
    for name in list(sets)[1:]:
        print(f"{run.name}, held out - {name}: {apart(losses['held out'], losses[name])}")
    return losses["held out"]


def no_larger(corpus: Corpus) -> TokenStream:
    """The training documents that are no larger than the largest one that is held out."""
    stream = corpus.stream("train")
    held_out = corpus.stream("held_out")
    most = np.diff(held_out.bounds).max()
    lengths = np.diff(stream.bounds)
    chosen = np.repeat(lengths <= most, lengths)
    bounds = np.concatenate([[0], np.cumsum(lengths[lengths <= most])])
    return TokenStream(stream.tokens[:][chosen], bounds)


def evaluate(
    config: RunConfig, weights: dict[str, torch.Tensor], samples: EvaluationSamples
) -> SetLoss:
    """The loss of whole weights on samples, by transformers in fp64."""
    sums = np.zeros(samples.num_documents)
    for first in range(0, samples.num_samples, AT_ONCE):
        count = min(AT_ONCE, samples.num_samples - first)
        tokens, labels = map(torch.from_numpy, samples.batches.microbatch(first, count))
        losses = losses_of(config, weights, tokens, labels).numpy().ravel()
        np.add.at(sums, samples.documents(first, count).ravel(), losses)
    return samples.loss(sums)


def apart(one: SetLoss, other: SetLoss) -> str:
    """How far two losses are apart."""
    error = ((one.standard_error or 0) ** 2 + (other.standard_error or 0) ** 2) ** 0.5
    difference = one.loss - other.loss
    return f"{difference:+.4f} = {difference / error:+.2f} pooled standard errors ({error:.4f})"


if __name__ == "__main__":
    main()
