"""The checkpoint's moments were dropped without a word when a run was resumed, and momentum began
at zero.
"""

from typing import Any

from parallel3d.engine.optimizer_states import OptimizerStates
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(
    __doc__, "2026-05-27", "KempnerInstitute/KempnerForge#115", mesh=(2, 2, 1), needs=("resume",)
)


@in_place_of(OptimizerStates, "finish_loading")
def plant(original: Any, states: OptimizerStates) -> None:
    """What was read of them is cleared."""
    for block in range(len(states.blocks)):
        with states.opened(block, write=True) as pieces:
            for piece in pieces:
                piece["exp_avg"].zero_()
                piece["exp_avg_sq"].zero_()
    original(states)
