"""The observer that lets another rank compute a part of a step again."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from parallel3d.checkpoint.state import Position
from parallel3d.config import CompleteConfig
from parallel3d.extras.guard.recomputation import Recomputation
from parallel3d.mesh.mesh import Mesh
from parallel3d.train.assembly import Assembly
from parallel3d.train.check_bits import WrongBits
from parallel3d.train.observer import Observer, Step


class RecomputationCheck(Observer):
    """Checks a step and its update every `train.check_bits.recompute_every` steps.

    To create one is collective.
    """

    collectives = (
        "all_gather of digests, exchanges of inputs and weights between pairs of ranks, and "
        "ZeRO-3's gathers, before and after the update of every recompute_every steps"
    )

    def __init__(
        self, config: CompleteConfig, mesh: Mesh, parts: Assembly, position: Position
    ) -> None:
        self.every = config.train.check_bits.recompute_every
        self._config = config
        self._engine = parts.engine
        self._recomputation = Recomputation(config, mesh, parts)
        self.vouched = position.step

    @contextmanager
    def around(self, step: Step) -> Iterator[None]:
        """Record the batch of a step that is checked, and then its update."""
        if not self.is_due(step):
            yield
            return
        count = self._config.num_microbatches_at(step.start.next_sample)
        with ExitStack() as self._until:
            self._until.enter_context(self._recomputation.recording(step.number, count))
            yield
        self.vouched = step.number + 1

    def computed(self, step: Step) -> None:
        """Raise WrongBits, without an update, if a rank was wrong."""
        if not self.is_due(step):
            return
        self._until.close()
        try:
            self._recomputation.compare()
        except WrongBits:
            self._engine.step(step.lr, lambda _: False)  # drops the gradients
            raise
        self._until.enter_context(self._recomputation.updating())

    def rewound(self, position: Position, state: Mapping[str, Any]) -> None:
        """Vouch for no more than the checkpoint's step."""
        self.vouched = position.step
