"""The bounds of documents in samples whose attention stays within a document."""

from typing import NamedTuple

import torch
from torch import Tensor


class Segments(NamedTuple):
    """The places of documents in a batch of samples; every document ends with its sample.

    - `positions` [batch, seq]: restart at 0 in each document.
    - `bounds` (int32, [documents + 1]): the index of each document's first token in the flattened
      batch, and the number of tokens at the end.
    - `lengths`: the number of tokens of each document.
    """

    positions: Tensor
    bounds: Tensor
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, documents: Tensor) -> "Segments":
        """Return the segments on the host; `documents` [batch, seq] has each token's document."""
        documents = documents.cpu()
        seq = documents.shape[-1]
        here = torch.arange(seq)
        starts = torch.ones_like(documents, dtype=torch.bool)
        starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
        first = torch.where(starts, here, 0).cummax(-1).values  # where each document starts
        end = torch.tensor([documents.numel()])
        bounds = torch.cat([starts.flatten().nonzero().squeeze(-1), end]).to(torch.int32)
        return cls(here - first, bounds, tuple(bounds.diff().tolist()))

    def on(self, device: torch.device) -> "Segments":
        """Return the segments with their tensors copied to a device, without waiting."""

        def moved(tensor: Tensor) -> Tensor:
            pinned = tensor.pin_memory() if device.type == "cuda" else tensor
            return pinned.to(device, non_blocking=True)

        return self._replace(positions=moved(self.positions), bounds=moved(self.bounds))
