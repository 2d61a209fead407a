"""Muon took the stack of a layer's experts for one tall matrix, and orthogonalised the experts
against each other.
"""

from itertools import groupby
from typing import Any

import torch

from parallel3d.engine.muon import Muon
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(__doc__, needs=("Muon", "experts"))


@in_place_of(Muon, "_orthogonalised")
def plant(original: Any, muon: Muon, matrices: Any) -> Any:
    """More than four equal matrices in a row, as many as attention has, are one."""
    updates = []
    for _, group in groupby(matrices, key=lambda matrix: matrix.shape):
        run = list(group)
        if len(run) <= 4:
            updates += original(muon, run)
        else:
            (update,) = original(muon, [torch.cat(run)])
            updates += update.split(len(run[0]))
    return updates
