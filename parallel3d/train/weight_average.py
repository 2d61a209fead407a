"""The observer of the exponential moving average of the weights."""

from collections.abc import Iterator
from contextlib import contextmanager

from parallel3d.config.parallel3d_block import EmaConfig
from parallel3d.engine import Engine
from parallel3d.train.observer import Observer, Step


class WeightAverage(Observer):
    """Lets the engine move the average of the weights every `train.ema.every` steps."""

    def __init__(self, ema: EmaConfig, engine: Engine) -> None:
        self.every = ema.every
        self._engine = engine

    @contextmanager
    def around(self, step: Step) -> Iterator[None]:
        """Tell the engine whether the average follows the update of this step."""
        self._engine.averages = self.is_due(step)
        yield
