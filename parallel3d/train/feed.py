"""The microbatches of each step, on this rank's device (floor 5)."""

import numpy as np
import torch

from parallel3d.config import RunConfig
from parallel3d.data.batches import Batches, documents_of, first_sample
from parallel3d.data.corpus import Corpus
from parallel3d.mesh.mesh import Mesh
from parallel3d.pipeline.executor import Microbatch


class Feed:
    """The training and held-out samples of a corpus, cut into microbatches for one dp coordinate.

    `num_held_out`: how many samples there are to evaluate on.
    """

    def __init__(self, config: RunConfig, mesh: Mesh, corpus: Corpus) -> None:
        length = config.data.sequence_length
        self._config, self._mesh, self._end_of_text = config, mesh, corpus.end_of_text
        self._training = Batches(corpus.train, length, config.train.seed)
        self._held_out = Batches(corpus.held_out, length, seed=None)
        self.num_held_out = self._held_out.num_samples

    def training(self, start: int) -> list[Microbatch]:
        """This coordinate's microbatches of the step whose first sample is `start`."""
        return self._cut(self._training, start)

    def held_out(self, start: int) -> list[Microbatch]:
        """The same of the held-out samples."""
        return self._cut(self._held_out, start)

    def _cut(self, batches: Batches, start: int) -> list[Microbatch]:
        config, whole = self._config, []
        for m in range(config.num_microbatches):
            first = first_sample(
                start,
                m,
                self._mesh.coord("dp"),
                micro_batch=config.micro_batch_size,
                num_microbatches=config.num_microbatches,
                dp=self._mesh.size("dp"),
            )
            tokens, labels = batches.microbatch(first, config.micro_batch_size)
            arrays = [tokens, labels]
            if config.data.isolate_documents:
                arrays.append(documents_of(tokens, self._end_of_text))
            whole.append(np.stack(arrays))  # [2 or 3, batch, seq]
        return [Microbatch(*microbatch) for microbatch in self._on_device(np.stack(whole))]

    def _on_device(self, array: np.ndarray) -> torch.Tensor:
        """One copy, out of memory that the device reads while the host goes on."""
        tensor, device = torch.from_numpy(array), self._mesh.device
        if device.type != "cpu":
            tensor = tensor.pin_memory()
        return tensor.to(device, non_blocking=True)
