"""A fused projection was cut into equal parts as a whole, so that ranks had a mix of queries, keys
and values.
"""

from typing import Any

import torch

from parallel3d.pipeline import stages
from parallel3d.tensor.cut import Cut
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(
    __doc__,
    "2026-02-18",
    "NVIDIA-NeMo/Automodel#1324",
    mesh=(1, 1, 4),
    needs=("fused projections",),
)


@in_place_of(stages, "fill")
def plant(original: Any, out: Any, start: int, spec: Any, name: str, cut: Cut, seed: int) -> None:
    """A rank's part is a slice of the rows of all three."""
    if len(spec.shape) != 3 or not cut.parts:
        original(out, start, spec, name, cut, seed)
        return
    whole = torch.empty(spec.numel)
    original(whole, 0, spec, name, Cut(spec.shape), seed)
    fused, _, columns = spec.shape
    first, last = (fused * row for row in cut.bounds[1])
    mine = whole.view(-1, columns)[first:last].flatten()[start:]
    out[: len(mine)].copy_(mine[: len(out)])
