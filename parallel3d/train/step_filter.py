"""The observer that leaves out bad steps: skipped, rewound, or the end of the run."""

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from torch import Tensor

from parallel3d.base.errors import TrainingError
from parallel3d.base.say import Say
from parallel3d.checkpoint.state import Position
from parallel3d.config import CompleteConfig
from parallel3d.mesh.mesh import Mesh
from parallel3d.train.bad_steps import BadSteps, Overflows, Verdict
from parallel3d.train.layer_history import LayerHistory
from parallel3d.train.metrics import Result
from parallel3d.train.observer import Observer, Rewind, Step
from parallel3d.train.rank_step import mean_of_ranks
from parallel3d.train.rewinding import Rewinder


class BadStep(Rewind):
    """A step whose loss or gradient is not finite, or spikes; its samples are left out."""

    leaves_out = True


class StepFilter(Observer):
    """Stops the run at a bad step, skips it, or asks to rewind, as the settings say."""

    collectives = (
        "all_gather of losses and norm before the update, if steps may be skipped; those of the "
        "layers' history at a bad step"
    )

    def __init__(
        self,
        config: CompleteConfig,
        mesh: Mesh,
        bad: BadSteps,
        rewinder: Rewinder,
        say: Say,
        history: LayerHistory | None = None,
    ) -> None:
        """Create the filter; `history` is written when a step is bad, or spikes."""
        self._config = config
        self._mesh = mesh
        self._bad = bad
        self._rewinder = rewinder
        self._say = say
        self._history = history
        self._verdict: Verdict | None = None
        self._rewinding: tuple[Step, Verdict] | None = None
        self._overflows = Overflows(config.fp16.hysteresis, bool(config.fp16.loss_scale))
        self._num_overflows = 0
        self.may_skip = bad.may_skip

    def may_update(self, step: Step, norm: Tensor) -> bool:
        """Judge the step before its update, by the numbers of all ranks."""
        own = [norm, step.loss, *step.side_losses.values()]
        early = self._mesh.messages.gather_floats(own)
        self._verdict = self._judge(step, [row[1:] for row in early], early[0][0])
        return self._verdict.action != "skip"

    def after(self, step: Step) -> None:
        """Judge a step that was not judged before its update, and act on the verdict."""
        verdict = self._verdict
        self._verdict = None
        norm = None if step.done.overflow else step.rows[0].norm
        if verdict is None:
            rows = [(row.loss, *row.side_losses) for row in step.rows]
            verdict = self._judge(step, rows, norm)
        self._num_overflows += step.done.overflow
        overflow = self._overflows.add(step.done.loss_scale if step.done.overflow else None)
        if verdict.action == "train" and overflow.action == "stop":
            verdict = overflow
        if verdict.reason and self._history:
            is_trained_on = verdict.action == "train"
            self._history.write(step.end.step, verdict.reason, once=is_trained_on)
        if verdict.action == "stop":
            self._rewinder.finish_saves()
            raise TrainingError(
                f"{verdict.reason} at step {step.number + 1}, lr {step.lr:.3g}; all ranks stop. "
                f"{verdict.remedy}"
            )
        if verdict.action == "train":
            self._bad.add(step.mean_loss, norm)
            return
        step.is_trained = False
        if verdict.action == "rewind":
            self._rewinding = step, verdict
            raise BadStep(verdict.reason)
        self._leave_out(step, verdict, step.start.next_sample)

    def rewound(self, position: Position, state: Mapping[str, Any]) -> None:
        """Judge on as from the checkpoint, without the samples that the rewind leaves out."""
        there = Position.of(state)
        self._bad.rewind_to(state)
        self._bad.left_out += position.next_sample - there.next_sample
        self._verdict = None
        if self._rewinding:
            step, verdict = self._rewinding
            self._leave_out(step, verdict, there.next_sample, to=there.step)
            self._rewinding = None

    def at_end(self, result: Result) -> None:
        """Say so if all steps overflowed: a short run ends before `Overflows` stops it."""
        remedy = "train for more steps, lower fp16.initial_scale_power"
        if self._config.fp16.loss_scale:
            remedy = "lower fp16.loss_scale, set it to 0, with which the scale is found"
        if self._num_overflows == result.trained > 0:
            self._say(
                f"NOT TRAINED: the gradients of all {result.trained} steps overflowed in fp16, so "
                f"no weight has changed; {remedy}, or use bf16"
            )

    def _judge(self, step: Step, rows: Sequence[Sequence[float]], norm: float | None) -> Verdict:
        """Return what to do with a step; a row is a rank's loss and side losses."""
        if self._config.fp16.enabled and norm is not None and not isfinite(norm):
            norm = None  # DeepSpeed finds the overflow after it has asked
        columns = zip(*rows, strict=True)
        losses = dict(zip(("loss", *step.side_losses), columns, strict=True))
        return self._bad.judge(losses, mean_of_ranks(self._mesh, losses["loss"]), norm)

    def _leave_out(self, step: Step, verdict: Verdict, first: int, **place: int) -> None:
        """Count a bad step; show and record what is left out, from sample `first` on."""
        self._bad.count += 1
        samples = first, step.start.after(self._config).next_sample - 1
        rewinds = f" rewound to step {place['to']}," if place else ""
        self._say(
            f"step {step.number + 1}: {verdict.reason};{rewinds} samples {samples[0]:,} to "
            f"{samples[1]:,} are left out ({self._bad.count} of at most "
            f"{self._config.train.max_skips} times)"
        )
        self._rewinder.record(
            verdict.action,
            step=step.number + 1,
            **place,
            samples=samples,
            count=self._bad.count,
            reason=verdict.reason,
        )
