"""Losses on held-out text and validation sets, with standard errors over documents."""

from collections.abc import Mapping

import numpy as np
import torch

from parallel3d.base.errors import DataError
from parallel3d.config import CompleteConfig
from parallel3d.data.corpus import Corpus
from parallel3d.data.evaluation_samples import (
    EvaluationSamples,
    SetLoss,
    held_out_samples,
    parts_of,
)
from parallel3d.data.sources import Progress, no_progress
from parallel3d.mesh.mesh import Mesh
from parallel3d.mesh.pulse import rank as pulse
from parallel3d.pipeline.executor import Evaluator
from parallel3d.train.ending import StopRequest
from parallel3d.train.feed import Feed

HELD_OUT = "held_out"
OF_EMA = "_ema"
"""The end of a set's name if the averaged weights were evaluated on it."""
Losses = Mapping[str, SetLoss]


class Evaluation:
    """Evaluates the model on every set: held-out text, a mixture's parts, validation sets.

    The samples of a set are the same on every mesh, in every run and at every global batch.
    """

    def __init__(
        self,
        config: CompleteConfig,
        mesh: Mesh,
        *,
        corpus: Corpus,
        feed: Feed,
        evaluator: Evaluator,
        stop: StopRequest,
        progress: Progress = no_progress,
    ) -> None:
        """Prepare the samples of all sets; `progress` is told how many samples are done."""
        self._mesh = mesh
        self._feed = feed
        self._evaluator = evaluator
        self._stop = stop
        self._progress = progress
        self._batch = config.global_batch_size
        own = config.parallel3d
        self._sets = {
            name: held_out_samples(part, own.data.sequence_length, own.train.evaluate_samples)
            for name, part in evaluation_corpora(corpus).items()
        }

    def run(self) -> Losses | None:
        """Return the loss of each evaluation set; collective.

        Returns None after a request to stop, on every rank after the same batch.
        """
        losses = {}
        for name, samples in self._sets.items():
            pulse.doing(f"evaluating {name}")
            loss = self._run(name, samples)
            if loss is None:
                return None
            losses[name] = loss
        return losses

    def _run(self, name: str, samples: EvaluationSamples) -> SetLoss | None:
        # The last entry collects the samples that fill up the last batch.
        like = {"dtype": torch.float64, "device": self._mesh.device}
        sums, weights = torch.zeros(2, samples.num_documents + 1, **like)  # type: ignore[call-overload]
        for start in range(0, samples.num_samples, self._batch):
            self._progress(f"evaluating {name} (samples)", start, samples.num_samples)
            batch, documents = self._feed.evaluation(samples, start)
            self._evaluator.run(batch)
            losses = self._evaluator.token_losses
            if losses is not None and documents is not None:
                losses = losses.flatten().to(torch.float64)
                places = documents.flatten()
                if samples.batches.weighs:
                    own = torch.stack([m.weights for m in batch if m.weights is not None])
                    own = own.flatten().to(torch.float64)
                    losses = losses * own
                    weights.index_add_(0, places, own)
                sums.index_add_(0, places, losses)
            self._stop.agree(self._mesh.messages.gather_floats(self._stop.flags()))
            if self._stop.stopping:
                return None
        # Every tp rank of the last stage adds the losses of its dp coordinate.
        tp = self._mesh.tensor.size
        total = np.array(self._mesh.messages.sum_floats(sums)[:-1]) / tp
        if not samples.batches.weighs:
            return samples.loss(total)
        own_weights = np.array(self._mesh.messages.sum_floats(weights)[:-1]) / tp
        try:
            return samples.loss(total, own_weights)
        except DataError as error:
            raise DataError(f"evaluation of {name}: {error}") from None


def evaluation_corpora(corpus: Corpus) -> dict[str, Corpus]:
    """Return the corpora whose held-out text is evaluated, by name; {} if nothing is held out."""
    corpora = {HELD_OUT: corpus, **parts_of(corpus), **corpus.validation}
    return {name: part for name, part in corpora.items() if len(part.held_out)}
