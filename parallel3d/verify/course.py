"""What verify trains on: samples in an order of epochs, loud and quiet steps, a warm-up.

A stream of tokens in memory is read by the feed that reads a corpus. Its second step is loud: one
token again and again, so that its gradient is several times the others', and it alone is clipped.
The last step begins the second epoch, and the learning rate is not that of the first.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from parallel3d.config import RunConfig
from parallel3d.config.learning_rate import rate
from parallel3d.data.batches import Batches, documents_of
from parallel3d.data.corpus import Corpus, TokenStream
from parallel3d.data.order import sample_index

LOUD_STEP = 1
Batch = tuple[Tensor, Tensor, Tensor | None]  # tokens, labels, documents: [batch, seq] each


@dataclass(frozen=True)
class Course:
    """Each step's global batch and learning rate, and what is evaluated after the last."""

    steps: list[Batch]
    rates: list[float]
    evaluated: Batch


def corpus_of(config: RunConfig, folder: Path) -> Corpus:
    """The corpus of a small config, in memory; `folder` stands for its tokenizer's.

    Two and a half steps make an epoch.
    """
    length, vocab = config.data.sequence_length, int(config.model.vocab_size)
    size, end = config.global_batch_size, vocab - 1
    count = 2 * size + size // 2
    generator = np.random.default_rng(7)
    tokens = generator.integers(end, size=count * length + 1, dtype=np.int64)
    tokens[generator.random(len(tokens)) < 0.2] = end
    loud = np.arange(LOUD_STEP * size, (LOUD_STEP + 1) * size)
    for window in sample_index(config.train.seed, loud, count):
        tokens[window * length : (window + 1) * length] = end // 2
    everything = TokenStream(tokens, np.array([0, len(tokens)]))
    return Corpus(
        directory=folder,
        vocab_size=vocab,
        end_of_text=end,
        unigram_entropy=0.0,
        train=everything,
        held_out=everything,
        key="verify",
    )


def course_of(config: RunConfig) -> Course:
    """The course of a small config, as one process reads it."""
    corpus = corpus_of(config, Path())
    samples = Batches(corpus.train, config.data.sequence_length, config.train.seed)
    size, count = config.global_batch_size, config.num_steps

    def batch(step: int) -> Batch:
        tokens, labels = samples.microbatch(step * size, size)
        documents = torch.from_numpy(documents_of(tokens, corpus.end_of_text))
        isolated = documents if config.data.isolate_documents else None
        return torch.from_numpy(tokens), torch.from_numpy(labels), isolated

    return Course(
        [batch(step) for step in range(count)],
        [rate(config, step) for step in range(count)],
        batch(count),
    )
