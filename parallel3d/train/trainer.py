"""The training loop: batch -> executor -> engine -> metrics -> checkpoint."""

import math
import time
from collections import deque
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from statistics import fmean, stdev
from typing import Any, NamedTuple, NoReturn

from parallel3d.base.errors import TrainingError
from parallel3d.base.fault import fault_point
from parallel3d.checkpoint.save import MOST_FAILURES, Saver
from parallel3d.checkpoint.state import RunState
from parallel3d.config.learning_rate import rate
from parallel3d.engine import StepResult
from parallel3d.mesh.mesh import Mesh
from parallel3d.mesh.pulse import rank as pulse
from parallel3d.models.common import role_rates
from parallel3d.tensor import compiled
from parallel3d.train.assembly import Assembly
from parallel3d.train.evaluation import HELD_OUT, Evaluation, Losses
from parallel3d.train.feed import Feed
from parallel3d.train.metrics import MetricsWriter, StepMetrics, peak_memory_bytes
from parallel3d.train.profiler import Profiler
from parallel3d.train.progress import Progress
from parallel3d.train.start import Start
from parallel3d.train.stopping import StopRequest
from parallel3d.train.watch import make_watch

_FEWEST, _MOST = 10, 50  # the closing loss is the mean of a tenth of the steps, within these limits
_PATIENCE = 20.0  # seconds for a step and a save; deepspeed's launcher waits 30 after a SIGTERM


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


class _Row(NamedTuple):
    """The numbers of one rank about a step, which all ranks gather."""

    loss: Any  # of its part of the batch; loss and norm stay on the device until gathered
    norm: Any
    memory: float  # peak, in bytes
    stop: float  # 1 if the rank was asked to stop, else 0
    save: float  # 1 if the rank was asked to save, else 0
    broken: float  # 1 if the rank's saves failed too often, else 0


class Trainer:
    """The training loop up to `train.steps`, with evaluations and saves.

    Without `peak_flops` MFU is not reported, without a `saver` nothing is saved. Only the rank that
    reports has a `writer` and a `progress`.
    """

    def __init__(
        self,
        start: Start,
        mesh: Mesh,
        parts: Assembly,
        *,
        peak_flops: float | None = None,
        writer: MetricsWriter | None = None,
        progress: Progress | None = None,
        profiler: Profiler | None = None,
        saver: Saver | None = None,
        stop: StopRequest | None = None,
    ) -> None:
        config, corpus = start.config, start.corpus
        self.config, self.mesh, self.engine = config, mesh, parts.engine
        self.executor = parts.executor
        self.flops_per_token, self.peak_flops = parts.flops_per_token, peak_flops
        self.writer, self.progress, self.profiler = writer, progress, profiler
        self.watch = make_watch(config, mesh, parts, say=progress.say if progress else None)
        self.saver, self.stop, self.position = saver, stop or StopRequest(), start.position
        self._state = RunState(config, corpus) if saver else None
        self._role_rates = role_rates(config.model)
        self._step_tokens = config.tokens_per_step  # without padding
        self._stall: float | None = None  # of the last save, until a line of metrics contains it
        self._feed = Feed(config, mesh, corpus, parts.schedule)
        self._evaluation = Evaluation(
            config, mesh, corpus=corpus, feed=self._feed, evaluator=parts.evaluator, stop=self.stop
        )

    def run(self) -> Result:
        """Train to the last step or a request to stop.

        Raises TrainingError on every rank if a loss or gradient is not finite, or if checkpoints
        cannot be saved.
        """
        with closing(self._feed):
            return self._run()

    def _run(self) -> Result:
        result, first = Result(steps=self.position.step), self.position.step
        tokens, seconds, step_seconds = (
            0,
            0.0,
            0.0,
        )  # two exclude the first step, which also warms up
        window = min(max(self.config.num_steps // 10, _FEWEST), _MOST)
        losses: deque[float] = deque(maxlen=window)
        while result.steps < self.config.num_steps and not result.stopped:
            step = result.steps
            fault_point("trainer.step")
            with ExitStack() as observed:
                for observer in (self.profiler, self.watch):
                    if observer:
                        observed.enter_context(observer.step(step))
                began = time.perf_counter()
                lr = rate(self.config, step)
                rows, done = self._step(step, lr)
                step_seconds = time.perf_counter() - began
            seconds += step_seconds if step > first else 0.0
            if step == first:
                self.mesh.set_timeouts(self.config.train.timeout_seconds)
                self._warn_if_slow(step_seconds)
                if self.progress and (graphs := compiled.describe()):
                    self.progress.say(graphs)
            padding = self._feed.padding(self.position.next_sample)
            self._step_tokens = self.config.tokens_per_step - padding
            tokens += self._step_tokens if step > first else 0
            self.position = self.position.after(self.config, padding)
            result.steps = step + 1
            # Every tp rank of the last stage reports the loss of its dp coordinate.
            result.loss = sum(row.loss for row in rows) / (
                self.mesh.replicas.size * self.mesh.tensor.size
            )
            losses.append(result.loss)
            result.peak_memory_bytes = [int(row.memory) for row in rows]
            is_last, after = result.steps == self.config.num_steps, self.config.train.stop_after
            result.stopped = self.stop.stopping or (result.steps == after and not is_last)
            validation = {} if result.stopped else self._evaluated(result)
            self._report(result, lr, step_seconds, rows, done, validation)
            self._save_if_due(result)
        if self.profiler:
            self.profiler.finish()  # if the run was stopped within the profiled steps
        result.trained = result.steps - first
        if result.steps == first:
            # The run was already finished, or had been stopped at its last step.
            result.validation = self._evaluation.run() or {}
            if self.writer:
                self.writer.complete(result.validation)
            self.stop.finished()
        else:
            speed = self._speed(tokens or self._step_tokens, seconds or step_seconds)
            result.tokens_per_second, result.tflops_per_device, result.mfu = speed
            result.mean_loss, result.mean_loss_of = fmean(losses), len(losses)
            result.loss_deviation = stdev(losses) if len(losses) > 1 else math.nan
        return result

    def _warn_if_slow(self, step_seconds: float) -> None:
        """Warn if a step and a save take longer than launchers wait after a SIGTERM."""
        save_seconds = self.saver.expected_seconds() if self.saver else 0.0
        if self.progress and step_seconds + save_seconds > _PATIENCE:
            self.progress.say(
                f"a step took {step_seconds:.0f} s and a save takes about {save_seconds:.0f} s. "
                "After a SIGTERM a launcher may kill this run before it is saved (deepspeed waits "
                "30 s); to stop it, create a file named STOP in the run's folder"
            )

    def _evaluated(self, result: Result) -> Losses:
        """Return the losses of an evaluation if one is due after this step, else {}."""
        every = self.config.train.evaluate_every
        if result.steps < self.config.num_steps and not (every and result.steps % every == 0):
            return {}
        losses = self._evaluation.run()
        result.validation = losses if losses is not None else result.validation
        result.stopped = losses is None
        return losses or {}

    def _save_if_due(self, result: Result) -> None:
        """Save if a save is due; at the end of a run wait until it is on disk."""
        if self.saver is None or self._state is None:
            return
        self.saver.poll()
        settings, last = self.config.checkpoint, result.steps == self.config.num_steps
        is_due = result.steps in settings.at or (
            settings.every and result.steps % settings.every == 0
        )
        ends = result.stopped or last
        if ends or self.stop.saving or is_due:
            pulse.doing(f"saving step {self.position.step}")
            self._stall = self.saver.save(self._state.at(self.position), wait=ends)
            self.stop.saved()
        if ends:
            self.saver.require_saved()
            self.stop.finished()

    def _step(self, step: int, lr: float) -> tuple[list[_Row], StepResult]:
        """Take one step; return the rows of all ranks and the engine's result.

        The host waits for the device only once, at the end. A step with a loss that is not finite
        is therefore still taken, but never saved.
        """
        pulse.doing(f"the batch of step {step + 1}")
        loss = self.executor.run(self._feed.training(self.position.next_sample), step)
        pulse.doing(f"the optimizer's step {step + 1}")
        done = self.engine.step(lr)
        memory, broken = peak_memory_bytes(self.mesh.device), bool(self.saver and self.saver.broken)
        stop, save = self.stop.flags()
        own = _Row(loss, done.norm, memory, stop, save, broken)
        rows = [_Row(*row) for row in self.mesh.gather_floats(own)]
        for rank, row in enumerate(rows):
            if not math.isfinite(row.loss):
                self._give_up(
                    f"the loss on rank {rank} is {row.loss} at step {step + 1}, lr {lr:.3g}; "
                    "all ranks stop. Lower optimizer.params.lr, lengthen the warm-up, or check "
                    "the data of this step"
                )
        self.stop.agree([[row.stop, row.save] for row in rows])
        if any(row.broken for row in rows):
            raise TrainingError(
                f"{MOST_FAILURES} checkpoints in a row could not be saved; all ranks stop. Earlier "
                "checkpoints are intact: free some space or repair the disk, and start again"
            )
        norm = rows[self.mesh.rank].norm
        if not done.overflow and (not math.isfinite(norm) or norm < 0):
            self._give_up(
                f"the gradient norm is not finite at step {step + 1}, lr {lr:.3g}, although the "
                "losses are; all ranks stop. Lower optimizer.params.lr, or try fp32"
            )
        return rows, replace(done, norm=norm)

    def _give_up(self, message: str) -> NoReturn:
        """Finish a save of earlier steps, then raise TrainingError on all ranks."""
        if self.saver:
            self.saver.finish()
        raise TrainingError(message)

    def _speed(self, tokens: int, seconds: float) -> tuple[float, float, float | None]:
        """Return tokens per second of the mesh, model TFLOP/s per device, and MFU.

        Padding is none of the tokens.
        """
        rate_of_tokens = tokens / seconds
        flops = rate_of_tokens * self.flops_per_token / self.mesh.world.size
        return rate_of_tokens, flops / 1e12, flops / self.peak_flops if self.peak_flops else None

    def _report(
        self,
        result: Result,
        lr: float,
        seconds: float,
        rows: list[_Row],
        done: StepResult,
        validation: Losses,
    ) -> None:
        """Write and show a step's metrics, on the rank that reports."""
        tokens_per_second, tflops, mfu = self._speed(self._step_tokens, seconds)
        stall, self._stall = self._stall, None
        metrics = StepMetrics(
            step=result.steps,
            loss=result.loss,
            grad_norm=done.grad_norm,
            lr=lr,
            tokens=self.position.tokens,
            tokens_per_second=tokens_per_second,
            tflops_per_device=tflops,
            mfu=mfu,
            peak_memory_bytes=int(max(row.memory for row in rows)),
            step_seconds=seconds,
            role_lr={role: lr * factor for role, factor in self._role_rates.items()},
            part_epochs=self._feed.epochs(self.position.next_sample),
            validation=validation,
            loss_scale=done.loss_scale if self.config.fp16.enabled else None,
            checkpoint_stall_seconds=stall,
        )
        if self.writer:
            self.writer.write(metrics)
        if self.progress:
            self.progress.show(metrics)
