"""Log-likelihoods of texts on a run's mesh: rank 0 asks, all ranks compute."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch

from parallel3d.config import CompleteConfig
from parallel3d.mesh.mesh import Mesh
from parallel3d.mesh.pulse import rank as pulse
from parallel3d.model.spec import Shape
from parallel3d.pipeline.executor import Evaluator
from parallel3d.schedule.schedule import Schedule
from parallel3d.train.assembly import hidden_shape
from parallel3d.train.ending import StopRequest
from parallel3d.train.feed import Cutter


class Request(NamedTuple):
    """Token ids, at most `Scorer.longest` + 1, of which the last `num_scored` are predicted."""

    ids: list[int]
    num_scored: int


class Score(NamedTuple):
    """The summed log-likelihood of a request's predicted tokens in nats.

    `is_greedy` is True if each of them is the likeliest at its place.
    """

    log_likelihood: float
    is_greedy: bool


class Interrupted(Exception):
    """A request to stop, raised on all ranks after the same batch."""


class Scorer:
    """Computes log-likelihoods with the evaluator of a run; rank 0 leads, the others follow.

    Requests are padded on the right to the longest of their batch, rounded up to one of at most
    eight lengths. The last batch is filled up with empty rows. Neither counts.
    """

    def __init__(
        self,
        config: CompleteConfig,
        mesh: Mesh,
        *,
        evaluator: Evaluator,
        schedule: Schedule,
        stop: StopRequest,
    ) -> None:
        self.longest = config.data.sequence_length
        self.is_computing = False
        self._config = config
        self._mesh = mesh
        self._evaluator = evaluator
        self._cutter = Cutter(config, mesh, schedule)
        self._stop = stop
        self._num_rows = config.micro_batch_size * config.num_microbatches
        self._unit = _unit(self.longest, 8 * config.mesh.cp * config.mesh.tp)

    def lead(self, requests: Sequence[Request]) -> list[Score]:
        """Return the score of each request, on rank 0 while the other ranks `follow`.

        Raises Interrupted after a request to stop, as `follow` does.
        """
        order = sorted(range(len(requests)), key=lambda number: -len(requests[number].ids))
        scores: dict[int, Score] = {}
        at_once = self._num_rows * self._mesh.samples.size
        for first in range(0, len(order), at_once):
            chosen = order[first : first + at_once]
            rows = [requests[number] for number in chosen]
            self._mesh.messages.broadcast_text(json.dumps(rows))
            scores.update(zip(chosen, self._compute(rows), strict=True))
        return [scores[number] for number in range(len(requests))]

    def follow(self) -> None:
        """Take part in what rank 0 asks for, until it calls `end`."""
        while True:
            # Not as one that waits: rank 0 may work on a large task longer than a step may take.
            pulse.doing("following rank 0, which scores tasks")
            rows = json.loads(self._mesh.messages.broadcast_text(""))
            if not rows:
                return
            self._compute([Request(*row) for row in rows])

    def end(self) -> None:
        """Let the other ranks return from `follow`."""
        self._mesh.messages.broadcast_text("[]")

    def _compute(self, rows: Sequence[Request]) -> list[Score]:
        """Return the scores of at most one batch of requests; collective."""
        pulse.doing("scoring tasks")
        self.is_computing = True  # an error from here on is not of this rank alone
        dp = self._mesh.samples
        longest = max(len(row.ids) for row in rows) - 1
        length = min(-(-longest // self._unit) * self._unit, self.longest)
        num_all = self._num_rows * dp.size
        tokens, labels = np.zeros((2, num_all, length), dtype=np.int64)
        owners = np.full((num_all, length), num_all)  # the request of each label that counts
        for number, row in enumerate(rows):
            end = len(row.ids) - 1
            tokens[number, :end] = row.ids[:-1]
            labels[number, :end] = row.ids[1:]
            owners[number, end - row.num_scored : end] = number
        own = slice(dp.coord * self._num_rows, (dp.coord + 1) * self._num_rows)
        count = self._config.num_microbatches
        step = self._cutter.cut(
            range(dp.coord * count, (dp.coord + 1) * count),
            {"tokens": tokens[own], "labels": labels[own]},
            np.zeros_like(tokens[own]),
            labelled=owners[own],
        )
        with self._of_length(length):
            self._evaluator.run(self._cutter.microbatches(step))
        sums = torch.zeros(2, num_all + 1, dtype=torch.float64, device=self._mesh.device)
        losses = self._evaluator.token_losses
        hits = self._evaluator.token_hits
        if step.documents is not None and losses is not None and hits is not None:
            places = self._cutter.on_device(step.documents).flatten()
            sums[0].index_add_(0, places, losses.flatten().to(sums.dtype))
            sums[1].index_add_(0, places, hits.logical_not().flatten().to(sums.dtype))
        # Every tp rank of the last stage adds the losses of its dp coordinate.
        total = np.array(self._mesh.messages.sum_floats(sums.flatten())) / self._mesh.tensor.size
        total = total.reshape(2, -1)[:, : len(rows)]
        self._stop.agree(self._mesh.messages.gather_floats(self._stop.flags()))
        self.is_computing = False
        if self._stop.stopping:
            raise Interrupted
        return [Score(-loss, misses == 0) for loss, misses in total.T.tolist()]

    @contextmanager
    def _of_length(self, length: int) -> Iterator[None]:
        """Let the evaluator take samples of this length in the block."""
        before = self._evaluator.hidden_shape
        shape = Shape(self._config.micro_batch_size, length)
        self._evaluator.hidden_shape = hidden_shape(
            self._config.mesh, shape, self._config.model.hidden_size
        )
        try:
            yield
        finally:
            self._evaluator.hidden_shape = before


def _unit(length: int, multiple: int) -> int:
    """Return an eighth, a quarter or half of `length` that is a multiple, or else `length`."""
    for parts in (8, 4, 2):
        if length % (parts * multiple) == 0:
            return length // parts
    return length
