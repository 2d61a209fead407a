"""Parameters cut by tensor parallelism were taken for replicated ones, so the norm was that of the
first rank's parts.
"""

from typing import Any

from parallel3d.engine.quirks import core
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(__doc__, "2024-04-15", "deepspeedai/DeepSpeed#5411", mesh=(1, 1, 4))


@in_place_of(core, "count_once")
def plant(original: Any, held: Any) -> None:
    """Nothing is marked as cut."""
    for h in held:
        h.parameter.model_parallel = False
