"""The learning rate of each step was that of the step before."""

from typing import Any

from parallel3d.config import learning_rate
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(__doc__, kind="shared")


@in_place_of(learning_rate, "fraction")
def plant(original: Any, schedule: Any, step: int, num_steps: int) -> Any:
    """The schedule starts a step late."""
    return original(schedule, max(0, step - 1), num_steps)
