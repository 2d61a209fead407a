"""When a run is evaluated: every so many steps, and at its end."""

from parallel3d.config import CompleteConfig
from parallel3d.engine import Engine
from parallel3d.train.evaluation import OF_EMA, Evaluation, Losses
from parallel3d.train.metrics import Result
from parallel3d.train.observer import Observer, Step, is_due


class ScheduledEvaluation(Observer):
    """Evaluates after the steps of `train.evaluate_every`, and after the last one."""

    collectives = "those of an evaluation, after the steps that are evaluated"

    def __init__(self, config: CompleteConfig, evaluation: Evaluation, engine: Engine) -> None:
        self._config = config
        self._evaluation = evaluation
        self._engine = engine
        self._newest: Losses = {}

    def after(self, step: Step) -> None:
        """Set the step's `validation`, or `stops` if a request to stop interrupts it."""
        done = step.number + 1
        is_last = done == self._config.num_steps
        if step.stops or not (is_last or is_due(self._config.train.evaluate_every, done)):
            return
        losses = self._run()
        if losses is None:
            step.stops = True
        else:
            step.validation = losses
            self._newest = losses

    def at_end(self, result: Result) -> None:
        """Return the last evaluation, of a run that was over before this launch a new one."""
        if not result.trained:
            # It was finished, or had been stopped at its last step.
            self._newest = self._run() or {}
        result.validation = self._newest

    def _run(self) -> Losses | None:
        """Return the loss of each set, and of the averaged weights if they are kept."""
        losses = self._evaluation.run()
        if losses is None or self._config.train.ema is None:
            return losses
        with self._engine.averaged():
            averages = self._evaluation.run()
        if averages is None:
            return None
        return {**losses, **{f"{name}{OF_EMA}": loss for name, loss in averages.items()}}
