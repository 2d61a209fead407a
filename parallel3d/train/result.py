"""The result of a launch."""

import math
from dataclasses import dataclass, field

from parallel3d.train.evaluation import HELD_OUT, Losses


@dataclass
class Result:
    """The result of a launch: its steps, losses, speed and last evaluation."""

    steps: int = 0
    trained: int = 0
    """Steps of this launch."""
    loss: float = math.nan
    """Loss of the last step's batch."""
    mean_loss: float = math.nan
    """Mean loss of the last `mean_loss_of` steps of this launch."""
    loss_deviation: float = math.nan
    """Standard deviation of the loss of a single one of these steps."""
    mean_loss_of: int = 0
    validation: Losses = field(default_factory=dict)
    """Losses of the last evaluation: the held-out text, a mixture's parts, validation sets."""
    tokens_per_second: float = 0.0
    tflops_per_device: float = 0.0
    mfu: float | None = None
    peak_memory_bytes: list[int] = field(default_factory=list)
    stopped: bool = False

    @property
    def held_out_loss(self) -> float | None:
        """Held-out loss in nats per token; None if nothing was evaluated."""
        return self.validation[HELD_OUT].loss if HELD_OUT in self.validation else None
