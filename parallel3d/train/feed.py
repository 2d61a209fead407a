"""The microbatches of each step: built ahead in host memory, then copied to the device.

They are built in pinned memory, so that each step's copy runs while the host goes on.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from parallel3d import models
from parallel3d.base.errors import DataError, RankError
from parallel3d.config import CompleteConfig
from parallel3d.data.ahead import ReadAhead
from parallel3d.data.batches import Batches, documents_of, first_sample
from parallel3d.data.corpus import Corpus
from parallel3d.data.deal import balance, deal
from parallel3d.data.evaluation_samples import EvaluationSamples
from parallel3d.data.fim import Fim
from parallel3d.data.unchanged import OpenFiles
from parallel3d.mesh.mesh import Mesh
from parallel3d.mesh.pulse import rank as pulse
from parallel3d.pipeline.executor import Microbatch
from parallel3d.schedule.schedule import Schedule
from parallel3d.tensor.segments import Segments

_Run = tuple[int, int]
"""Consecutive samples: the global index of the first one, and their number."""


class _Step(NamedTuple):
    """A rank's part of a step, in host memory."""

    arrays: torch.Tensor
    """int64 [microbatches, kinds, batch, seq]"""
    numbers: Sequence[int]
    """The numbers of the microbatches, see `Microbatch`."""
    segments: tuple[Segments, ...] = ()
    """One per microbatch, for isolated documents."""
    weights: torch.Tensor | None = None
    """The weights of the labels: float32 [microbatches, batch, seq]."""
    documents: torch.Tensor | None = None
    """The documents of an evaluation's labels: [microbatches, batch, seq]."""


class Cutter:
    """Cuts the samples of a dp coordinate into a rank's microbatches.

    A rank gets the arrays that its stages use: the first stage tokens, the last stage labels, each
    stage the segments. Each cp rank gets its tokens of every sample.
    """

    def __init__(self, config: CompleteConfig, mesh: Mesh, schedule: Schedule) -> None:
        own = config.parallel3d
        owners = schedule.pp_coord_of_stage
        coord = mesh.pipeline.coord
        used = {"tokens": owners[0] == coord, "labels": owners[-1] == coord}
        self.kinds = [name for name, is_used in used.items() if is_used]
        self.isolates = own.data.isolate_documents
        self.needs_segments = self.isolates or mesh.context.size > 1
        self._model = own.model
        self._size = config.micro_batch_size
        self._context = mesh.context
        self._mesh = mesh

    def nothing(self, numbers: Sequence[int], length: int) -> _Step:
        """Return the part of a rank that uses no sample."""
        shape = (len(numbers), 0, self._size, length)
        return _Step(self._readable(np.empty(shape, dtype=np.int64)), numbers)

    def cut(
        self,
        numbers: Sequence[int],
        arrays: Mapping[str, np.ndarray],
        documents: np.ndarray,
        *,
        weights: np.ndarray | None = None,
        labelled: np.ndarray | None = None,
    ) -> _Step:
        """Return this rank's part of samples, [samples, seq] each.

        - `numbers`: of the microbatches.
        - `arrays`: tokens and labels.
        - `documents`: the document of each token, if they are isolated; else 0.
        - `weights`: of the labels. `labelled`: the documents of an evaluation's labels.
        """
        length = documents.shape[1]
        cp = self._context
        places: np.ndarray | None = None
        if cp.size > 1:
            most_keys = models.most_keys(self._model, length)
            places = deal(documents, cp.size, most_keys)  # [samples, cp, seq / cp]

        def own(array: np.ndarray) -> np.ndarray:
            """Return this rank's tokens of the samples, cut into microbatches."""
            if places is not None:
                array = np.take_along_axis(array, places[:, cp.coord], axis=1)
            return array.reshape(len(numbers), self._size, -1)

        step = self.nothing(numbers, length)
        if self.kinds:
            used = np.stack([own(arrays[kind]) for kind in self.kinds], axis=1)
            step = step._replace(arrays=self._readable(used))
        if self.needs_segments:
            cut = torch.from_numpy(documents.reshape(len(numbers), self._size, length))
            if places is None:
                segments = map(Segments.of, cut)
            else:
                shape = (len(numbers), self._size, cp.size, -1)
                dealt = torch.from_numpy(places.reshape(shape))
                segments = map(partial(Segments.of, group=cp.group), cut, dealt)
            step = step._replace(segments=tuple(segments))
        if "labels" in self.kinds and weights is not None:
            step = step._replace(weights=self._readable(own(weights)))
        if "labels" in self.kinds and labelled is not None:
            step = step._replace(documents=self._readable(own(labelled)))
        return step

    def microbatches(self, step: _Step) -> list[Microbatch]:
        """Return the microbatches of a step, on the device."""
        fields: dict[str, Iterable[Any]] = {"number": step.numbers}
        fields |= zip(self.kinds, self.on_device(step.arrays).unbind(1), strict=True)
        if step.segments:
            fields["segments"] = [s.on(self._mesh.device) for s in step.segments]
        if step.weights is not None:
            fields["weights"] = self.on_device(step.weights)
        rows = zip(*fields.values(), strict=True)
        return [Microbatch(**dict(zip(fields, row, strict=True))) for row in rows]

    def on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Start copying a tensor to the device."""
        return tensor.to(self._mesh.device, non_blocking=True)

    def _readable(self, array: np.ndarray) -> torch.Tensor:
        """Return an array as a tensor in pinned memory, from any thread."""
        tensor = torch.from_numpy(array)
        if self._mesh.device.type == "cpu":
            return tensor
        with torch.accelerator.device_index(self._mesh.device.index):  # a new thread uses device 0
            return tensor.pin_memory()


class Feed:
    """The samples of a corpus, cut into microbatches for one dp coordinate.

    A thread builds `data.read_ahead` steps of training ahead until `close`. Raises RankError if
    samples cannot be read.
    """

    def __init__(
        self, config: CompleteConfig, mesh: Mesh, corpus: Corpus, schedule: Schedule
    ) -> None:
        own = config.parallel3d
        data = own.data
        length = own.data.sequence_length
        seed = own.train.seed
        self._config = config
        self._mesh = mesh
        self._end_of_text = corpus.end_of_text
        self._cutter = Cutter(config, mesh, schedule)
        self._most_keys = models.most_keys(own.model, length)
        fim = Fim.of(data.fim, corpus, seed)
        self._batches = Batches(corpus.train, length, seed, fim)
        self._files = OpenFiles(corpus)
        self._ahead = ReadAhead(
            lambda start: self._step(self._batches, start, config.num_microbatches_at(start))
        )

    def training(self, start: int) -> list[Microbatch]:
        """Return this dp coordinate's microbatches of the step that begins at sample `start`."""
        starts = [start]
        for _ in range(self._config.data.read_ahead + 1):
            starts.append(starts[-1] + self._config.batch_size_at(starts[-1]))
        with _naming(start, starts[1]):
            step = self._ahead.take(start, starts[1:-1], self._say_waiting)
            return self._cutter.microbatches(step)

    def evaluation(
        self, samples: EvaluationSamples, start: int
    ) -> tuple[list[Microbatch], torch.Tensor | None]:
        """Return this dp coordinate's evaluation microbatches and the documents of their labels.

        The documents are [microbatches, batch, seq]; None except on the last stage.
        """
        with _naming(start, start + self._config.global_batch_size):
            step = self._step(samples.batches, start, self._config.num_microbatches, samples)
        documents = None if step.documents is None else self._cutter.on_device(step.documents)
        return self._cutter.microbatches(step), documents

    def padding(self, start: int) -> int:
        """Return the padding in tokens of the step that begins at sample `start`, on all ranks."""
        return self._batches.padding(start, self._config.batch_size_at(start))

    def epochs(self, start: int) -> dict[str, float]:
        """Return how often each part of a mixture was read before the sample `start`."""
        if len(self._batches.streams) == 1:
            return {}
        epochs = self._batches.epochs(start)
        return {f"mixture.{number}": round(own, 6) for number, own in enumerate(epochs)}

    def close(self) -> None:
        """End the thread that builds samples ahead."""
        self._batches.close()
        self._ahead.close()
        self._files.close()

    def _step(
        self,
        batches: Batches,
        start: int,
        num_microbatches: int,
        samples: EvaluationSamples | None = None,
    ) -> _Step:
        """Build a step; with `samples` the labels' documents too."""
        self._files.check()
        config = self._config
        cutter = self._cutter
        numbers, runs = self._share(start, num_microbatches)
        if not cutter.kinds and not cutter.needs_segments:
            return cutter.nothing(numbers, config.data.sequence_length)
        if config.data.balance_microbatches and samples is None:
            numbers, runs = self._balanced(batches, start, num_microbatches)

        def read(part: Callable[[int, int], Sequence[np.ndarray]]) -> list[np.ndarray]:
            """Return arrays of this rank's samples, which are in runs (first, count)."""
            of_runs = [part(*run) for run in runs]
            return [np.concatenate(arrays) for arrays in zip(*of_runs, strict=True)]

        tokens, labels = read(batches.microbatch)
        documents: np.ndarray = np.zeros_like(tokens)
        if cutter.isolates and batches.is_packed:
            documents = read(batches.places)[2]
        elif cutter.isolates and batches.by_bounds:
            documents = np.concatenate([batches.documents(*run) for run in runs])
        elif cutter.isolates:
            documents = documents_of(tokens, self._end_of_text)
        weights = None
        labelled = None
        if "labels" in cutter.kinds and batches.weighs:
            weights = np.concatenate([batches.weights(*run) for run in runs])
        if "labels" in cutter.kinds and samples is not None:
            labelled = samples.documents(*runs[0])
        arrays = {"tokens": tokens, "labels": labels}
        return cutter.cut(numbers, arrays, documents, weights=weights, labelled=labelled)

    def _share(self, start: int, num_microbatches: int) -> tuple[Sequence[int], list[_Run]]:
        """Return the numbers of this dp coordinate's microbatches, and their samples: one run."""
        dp = self._mesh.samples
        size = self._config.micro_batch_size
        first = first_sample(
            start, 0, dp.coord, micro_batch=size, num_microbatches=num_microbatches, dp=dp.size
        )
        numbers = range(dp.coord * num_microbatches, (dp.coord + 1) * num_microbatches)
        return numbers, [(first, size * num_microbatches)]

    def _balanced(
        self, batches: Batches, start: int, num_microbatches: int
    ) -> tuple[Sequence[int], list[_Run]]:
        """Return what `_share` does, of microbatches with as much work: runs of one sample."""
        dp = self._mesh.samples
        size = self._config.micro_batch_size
        count = size * num_microbatches * dp.size
        work = batches.attention_work(start, count, self._most_keys)
        samples, numbers = balance(work, size, dp.size)
        own = numbers[dp.coord]
        return own.tolist(), [(start + i, 1) for i in samples[own].flatten().tolist()]

    def _say_waiting(self) -> None:
        shards = self._batches.shards
        if shards and shards.waiting_for:
            pulse.doing(f"waiting for the shard {shards.waiting_for}")


@contextmanager
def _naming(start: int, end: int) -> Iterator[None]:
    """Turn a DataError in the block into this rank's error, which names the samples."""
    try:
        yield
    except DataError as error:
        # Other ranks read other samples, without this error.
        raise RankError(f"{error} (in samples {start:,} to {end - 1:,})") from error
