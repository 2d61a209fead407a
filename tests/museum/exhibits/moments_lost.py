"""Adam's moments are zeros after a resume."""

from typing import Any

from parallel3d.engine.states import OptimizerStates
from tests.museum.exhibit import Exhibit, Planted, wrapped

EXHIBIT = Exhibit(
    date="2026-05-27",
    source="KempnerInstitute/KempnerForge#115",
    what=(
        "The checkpoint's moments were dropped without a word when a run was resumed, and "
        "momentum began at zero."
    ),
    mesh=(2, 2, 1),
    needs=("resume",),
)


def plant() -> Planted:
    """What was read of them is cleared."""

    def finish(original: Any, states: OptimizerStates) -> None:
        for block in range(len(states.blocks)):
            with states.opened(block, write=True) as pieces:
                for piece in pieces:
                    piece["exp_avg"].zero_()
                    piece["exp_avg_sq"].zero_()
        original(states)

    return wrapped(OptimizerStates, "finish_loading", finish)
