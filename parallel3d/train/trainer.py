"""The training loop: batch, executor, update, and what the ranks agree on about the step."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace

from torch import Tensor

from parallel3d.base.fault import fault_point
from parallel3d.base.journal import reached
from parallel3d.checkpoint.state import Position
from parallel3d.config.learning_rate import rate
from parallel3d.engine import StepResult
from parallel3d.mesh.mesh import Mesh
from parallel3d.mesh.pulse import rank as pulse
from parallel3d.train.assembly import Assembly
from parallel3d.train.ending import StopRequest
from parallel3d.train.feed import Feed
from parallel3d.train.metrics import Result
from parallel3d.train.observer import Observer, Rewind, Step
from parallel3d.train.rank_step import RankStep, gather_rank_steps, mean_of_ranks
from parallel3d.train.rewinding import Rewinder
from parallel3d.train.start import Start


class Trainer:
    """The training loop up to `train.steps`.

    Everything else is done by `observers`, which `train/observers.py` puts in order.
    """

    def __init__(
        self,
        start: Start,
        mesh: Mesh,
        parts: Assembly,
        *,
        feed: Feed,
        observers: Sequence[Observer],
        rewinder: Rewinder,
        stop: StopRequest,
    ) -> None:
        self.config = start.config
        self.position = start.position
        self.mesh = mesh
        self.engine = parts.engine
        self.executor = parts.executor
        self.feed = feed
        self.observers = observers
        self.rewinder = rewinder
        self.stop = stop
        self._side_losses = parts.side_losses

    def run(self) -> Result:
        """Train to the last step or a request to stop.

        Raises TrainingError on every rank if a loss or gradient is not finite (unless
        `train.on_nonfinite` says otherwise), or if checkpoints cannot be saved.
        """
        first = self.position.step
        result = Result(steps=first)
        with closing(self.feed):
            while result.steps < self.config.num_steps and not result.stopped:
                result.stopped = self._advance(is_first=result.steps == first)
                result.steps = self.position.step
            result.trained = result.steps - first
            for observer in self.observers:
                observer.at_end(result)
        return result

    def _advance(self, is_first: bool) -> bool:
        """Take a step, or go back to a checkpoint; return True if the run ends on request."""
        number = self.position.step
        reached(number)
        fault_point("trainer.step")
        try:
            step = self.take_step(number)
            if is_first:
                self.mesh.set_timeouts(self.config.train.timeout_seconds)
            for observer in self.observers:
                observer.after(step)
        except Rewind as error:
            self._go_back(number, error)
            return False
        self.position = step.end
        return step.stops

    def take_step(self, number: int) -> Step:
        """Take the step after `number` steps; return it with the numbers of all ranks.

        The host waits for the device only once, in their exchange. A step with a loss that is not
        finite is therefore still taken, but never saved.
        """
        lr = rate(self.config, number, self.position.next_sample)
        step = Step(number=number, start=self.position, lr=lr)
        pulse.doing(f"the batch of step {number + 1}")
        with ExitStack() as until:
            for observer in self.observers:
                until.enter_context(observer.around(step))
            began = time.perf_counter()
            batch = self.feed.training(step.start.next_sample)
            step.loss = self.executor.run(batch, number)
            sums = self.executor.side_losses
            step.side_losses = {name: sums.get(name, 0.0) for name in self._side_losses}
            for observer in self.observers:
                observer.computed(step)
            pulse.doing(f"the optimizer's step {number + 1}")
            done = self.engine.step(lr, self._asking(step))
            step.rows = self._agree(step, done)
            step.seconds = time.perf_counter() - began
        step.done = replace(done, norm=step.rows[self.mesh.rank].norm)
        step.mean_loss = mean_of_ranks(self.mesh, [row.loss for row in step.rows])
        step.end = step.start.after(self.config, self.feed.padding(step.start.next_sample))
        return step

    def _asking(self, step: Step) -> Callable[[Tensor], bool] | None:
        """Return the question before an update, if an observer may answer with no.

        It is asked only then, because it takes one more exchange.
        """
        judges = [observer for observer in self.observers if observer.may_skip]
        if not judges:
            return None
        return lambda norm: all([judge.may_update(step, norm) for judge in judges])

    def _agree(self, step: Step, done: StepResult) -> list[RankStep]:
        """Exchange the ranks' numbers about a step, and what they were asked to do after it."""
        stop, save = self.stop.flags()
        rows = gather_rank_steps(
            self.mesh,
            loss=step.loss,
            norm=done.norm,
            stop=stop,
            save=save,
            is_broken=any(observer.is_broken for observer in self.observers),
            own_squares=done.own_squares,
            side_losses=[*step.side_losses.values()],
        )
        self.stop.agree([[row.stop, row.save] for row in rows])
        after = step.number + 1
        ends_early = after == self.config.train.stop_after and after < self.config.num_steps
        step.stops = self.stop.stopping or ends_early
        return rows

    def _go_back(self, number: int, error: Rewind) -> None:
        """Go on from the newest checkpoint, because of what an observer found in a step."""
        vouched = [seen.vouched for seen in self.observers if seen.vouched is not None]
        state = self.rewinder.load_newest(number, error, min(vouched, default=0))
        position = Position.of(state)
        if error.leaves_out:
            after = self.position.after(self.config)
            position = replace(position, next_sample=after.next_sample)
        self.position = position
        for observer in self.observers:
            observer.rewound(position, state)
