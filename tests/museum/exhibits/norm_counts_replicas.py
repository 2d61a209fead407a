"""Replicated weights were marked as tensor-parallel, and the gradient norm counted them on every
rank.
"""

from typing import Any

from parallel3d.engine.quirks import core
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(__doc__, "2026-08-25", "ROCm/TransformerEngine#715", mesh=(1, 1, 4))


@in_place_of(core, "count_once")
def plant(original: Any, held: Any) -> None:
    """Everything is marked as cut."""
    for h in held:
        h.parameter.model_parallel = not h.copy
