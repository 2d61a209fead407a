"""The learning rate on a line of metrics was that of the next step, because the scheduler had
already made its step.
"""

from typing import Any

from parallel3d.config.learning_rate import rate
from parallel3d.train.trainer import Trainer
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(__doc__, "2025-01-28", "huggingface/transformers#35942", kind="loop")


@in_place_of(Trainer, "_report")
def plant(original: Any, trainer: Trainer, result: Any, lr: float, *rest: Any) -> None:
    """The optimizer had the right one."""
    lr = rate(trainer.config, result.steps, trainer.position.next_sample)
    original(trainer, result, lr, *rest)
