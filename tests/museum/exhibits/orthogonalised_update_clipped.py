"""Gradient clipping scaled Muon's orthogonalised update, so the default limit divided steps by 4 to
85.
"""

from typing import Any

from parallel3d.engine.muon import Muon
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(
    __doc__, "2026-09-06", "deepspeedai/DeepSpeed#8439", mesh=(1, 1, 1), needs=("Muon",)
)


@in_place_of(Muon, "_orthogonalised")
def plant(original: Any, muon: Muon, matrices: Any) -> Any:
    """By the default limit of 1."""
    updates = original(muon, matrices)
    norm = sum(float(update.square().sum()) for update in updates) ** 0.5
    return [update / max(1.0, norm) for update in updates]
