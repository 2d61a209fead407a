"""The protocol of everything that looks at a run's steps, and the step that it looks at."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from parallel3d.base.errors import TrainingError
from parallel3d.checkpoint.state import Position
from parallel3d.engine import StepResult
from parallel3d.train.evaluation import Losses
from parallel3d.train.metrics import Result
from parallel3d.train.rank_step import Number, RankStep


@dataclass(kw_only=True)
class Step:
    """One step of training, which the trainer and the observers fill in as it proceeds."""

    number: int
    """The steps that were done before it."""
    start: Position
    """The position of its batch."""
    lr: float
    loss: Tensor = field(init=False)
    """The loss of this rank's part of the batch, on the device."""
    side_losses: dict[str, Number] = field(init=False)
    """Each side loss of the model, summed over this rank's layers."""
    done: StepResult = field(init=False)
    """The engine's result, with this rank's norm as a number."""
    rows: list[RankStep] = field(init=False)
    """The numbers of all ranks, known after the update."""
    mean_loss: float = field(init=False)
    """The loss of the whole batch, nats per token."""
    seconds: float = field(init=False)
    end: Position = field(init=False)
    """The position after it."""
    stops: bool = field(init=False)
    """True if the run ends after this step on request; an evaluation may set it."""
    is_trained: bool = True
    """False if the update was left out."""
    gradient_noise: Mapping[str, float] = field(default_factory=dict)
    validation: Losses = field(default_factory=dict)
    scores: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Task -> metric -> value, if the run was scored on tasks."""


class Rewind(TrainingError):
    """An observer's demand, raised on all ranks, to go on from the newest checkpoint."""

    leaves_out = False
    """True if the samples up to the end of this step are not trained on again."""


class Observer:
    """Looks at each step of a run, and may act on it.

    All ranks call the methods of the same observers in the same order, that of
    `train/observers.py`, so a method may be collective if the settings and the step's shared
    numbers alone decide what it does. Any method but `rewound` and `at_end` may raise `Rewind` or
    TrainingError, on all ranks.
    """

    collectives = "none"
    """The collectives that it makes, in words, and when."""
    every = 0
    """Number of steps from one that it acts on to the next; 0 if other rules say when it acts."""
    may_skip = False
    """True if `may_update` must be asked, which takes the host's wait for the norm."""
    vouched: int | None = None
    """The newest step whose state it has checked; None if it checks no state."""

    def is_due(self, step: Step) -> bool:
        """Return True if it acts on this step, by `every`."""
        return is_due(self.every, step.number + 1)

    @property
    def is_broken(self) -> bool:
        """True if this rank cannot go on with its work; the ranks exchange it once a step."""
        return False

    def around(self, step: Step) -> AbstractContextManager[None]:
        """Return the context of a step, from before its batch to the exchange of its numbers."""
        return nullcontext()

    def computed(self, step: Step) -> None:
        """Look at the gradients, which are there and reduced, before the update."""

    def may_update(self, step: Step, norm: Tensor) -> bool:
        """Return False to drop the update; `norm` is the gradient's, on the device.

        The answer is the same on all ranks. Gradients that overflow in fp16 are dropped unasked.
        """
        return True

    def after(self, step: Step) -> None:
        """Act on a step whose numbers all ranks know."""

    def rewound(self, position: Position, state: Mapping[str, Any]) -> None:
        """Forget later steps: a checkpoint was loaded, and the run goes on from `position`.

        `state` is the checkpoint's state.json.
        """

    def at_end(self, result: Result) -> None:
        """Complete the result of the launch; the run is over, or was over before it began."""


def is_due(every: int, step: int) -> bool:
    """Return True if something is done after this step, counted from 1; `every` 0 is never."""
    return every > 0 and step % every == 0
