"""Muon orthogonalised each tensor-parallel part of a matrix instead of the matrix."""

from typing import Any

import torch

from parallel3d.engine.whole_matrices import WholeMatrices
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(
    __doc__, "2026-09-06", "deepspeedai/DeepSpeed#8437", mesh=(1, 1, 4), needs=("Muon",)
)


@in_place_of(WholeMatrices, "map")
def plant(original: Any, matrices: WholeMatrices, flat: torch.Tensor, function: Any) -> Any:
    """The parts before ZeRO cuts them are taken for matrices."""

    def by_part(wholes: list[torch.Tensor]) -> list[torch.Tensor]:
        changed = [whole.clone() for whole in wholes]
        for matrix, result in zip(matrices._own, changed, strict=True):
            for rows, columns in {(p.rows, p.columns) for p in matrix.sources}:
                part = result[slice(*rows), slice(*columns)]
                part.copy_(function([part.clone()])[0])
        return changed

    return original(matrices, flat, by_part)
