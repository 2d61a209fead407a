"""The gradient noise scale, from the gradients of single ranks and their mean."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

from parallel3d.config import CompleteConfig
from parallel3d.engine import Engine
from parallel3d.mesh.mesh import Mesh
from parallel3d.train.observer import Observer, Step


class GradientNoise(Observer):
    """Estimates the gradient noise scale every `train.noise_scale_every` steps."""

    def __init__(self, config: CompleteConfig, mesh: Mesh, engine: Engine) -> None:
        self.every = config.train.noise_scale_every
        self._config = config
        self._ranks = mesh.replicas.size
        self._engine = engine

    @contextmanager
    def around(self, step: Step) -> Iterator[None]:
        """Let the engine measure each rank's own gradient, which the ranks exchange."""
        if self.is_due(step):
            self._engine.measure_own_gradient()
        yield

    def after(self, step: Step) -> None:
        """Set the step's `gradient_noise`."""
        if self.is_due(step):
            squares = sum(row.own_squares for row in step.rows)
            small = squares / self._ranks / step.done.loss_scale**2
            batch = self._config.batch_size_at(step.start.next_sample)
            step.gradient_noise = gradient_noise(
                small, step.done.grad_norm**2, batch=batch, ranks=self._ranks
            )


def gradient_noise(small: float, big: float, *, batch: int, ranks: int) -> dict[str, float]:
    """Return StepMetrics.gradient_noise (arXiv:1812.06162, appendix A.1).

    - `small`: mean over dp ranks of the squared norm of a rank's own gradient
    - `big`: squared norm of their average, over `batch` samples
    """
    square = (ranks * big - small) / (ranks - 1)
    trace = (small - big) * batch / (ranks - 1)
    return {"trace": trace, "square": square, "scale": trace / square if square else math.nan}
