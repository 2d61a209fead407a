"""Documents that share a sample without seeing each other."""

from typing import NamedTuple

import torch
from torch import Tensor


class Segments(NamedTuple):
    """Where each token stands in its document, and which tokens it may look at.

    `positions` [batch, seq] restart at each document; `mask` [batch, 1, seq, seq] is True where a
    query (second last dim) sees a key: in its own document, not in the future.
    """

    positions: Tensor
    mask: Tensor

    @classmethod
    def of(cls, documents: Tensor) -> "Segments":
        """The segments of samples whose tokens belong to `documents`, ordinals [batch, seq]."""
        seq = documents.shape[-1]
        here = torch.arange(seq, device=documents.device)
        starts = torch.ones_like(documents, dtype=torch.bool)
        starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
        first = torch.where(starts, here, 0).cummax(-1).values  # where each document starts
        same = documents.unsqueeze(-1) == documents.unsqueeze(-2)  # [batch, seq, seq]
        return cls(here - first, same.tril().unsqueeze(1))
