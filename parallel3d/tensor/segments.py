"""Documents that share a sample without seeing each other."""

from typing import NamedTuple

import torch
from torch import Tensor


class Segments(NamedTuple):
    """Where the documents of some samples stand; a document ends with its sample.

    `positions` [batch, seq] restart at each document. `bounds` (int32, [documents + 1]) is where
    each one starts among the samples' tokens, and the last one ends; `lengths` are their tokens.
    """

    positions: Tensor
    bounds: Tensor
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, documents: Tensor) -> "Segments":
        """Return, on the host, the segments of tokens of `documents`, ordinals [batch, seq]."""
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
        """The segments with their tensors on a device; the host goes on during the copy."""

        def moved(tensor: Tensor) -> Tensor:
            pinned = tensor.pin_memory() if device.type == "cuda" else tensor
            return pinned.to(device, non_blocking=True)

        return self._replace(positions=moved(self.positions), bounds=moved(self.bounds))
