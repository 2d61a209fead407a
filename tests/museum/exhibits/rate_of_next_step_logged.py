"""The learning rate on a line of metrics was that of the next step, because the scheduler had
already made its step.
"""

from copy import copy
from typing import Any

from parallel3d.config.learning_rate import rate
from parallel3d.train.observer import Step
from parallel3d.train.reporter import Reporter
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(__doc__, "2025-01-28", "huggingface/transformers#35942", kind="loop")


@in_place_of(Reporter, "metrics_of")
def plant(original: Any, reporter: Reporter, step: Step) -> Any:
    """The optimizer had the right one."""
    logged = copy(step)
    logged.lr = rate(reporter.config, step.end.step, step.end.next_sample)
    return original(reporter, logged)
