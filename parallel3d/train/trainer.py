"""The training loop: batch -> executor -> engine -> metrics -> checkpoint."""

import math
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from itertools import islice
from statistics import fmean, stdev
from typing import Any

import psutil
import torch
from torch import Tensor

from parallel3d.base.errors import TrainingError
from parallel3d.base.fault import fault_point
from parallel3d.base.journal import reached, record
from parallel3d.checkpoint import find
from parallel3d.checkpoint.chunk_runs import state_checksums
from parallel3d.checkpoint.load import load
from parallel3d.checkpoint.save import MOST_FAILURES, Saver
from parallel3d.checkpoint.state import Position, RunState
from parallel3d.config.learning_rate import rate
from parallel3d.engine import StepResult
from parallel3d.mesh.mesh import Mesh
from parallel3d.mesh.pulse import rank as pulse
from parallel3d.model.spec import named_params
from parallel3d.models.common import role_lrs
from parallel3d.tensor import compiled
from parallel3d.train.assembly import Assembly
from parallel3d.train.bad_steps import BadSteps, Verdict
from parallel3d.train.check_bits import WrongBits, check_bits, noting_messages
from parallel3d.train.digests import append_digest
from parallel3d.train.ending import StopRequest
from parallel3d.train.evaluation import Evaluation, Losses
from parallel3d.train.feed import Feed
from parallel3d.train.memory import begin_memory
from parallel3d.train.metrics import MetricsWriter, Result, StepMetrics, gradient_noise
from parallel3d.train.profiler import Profiler, StepWatch
from parallel3d.train.progress import Progress
from parallel3d.train.rank_step import RankStep, gather_rank_steps
from parallel3d.train.recomputation import Recomputation
from parallel3d.train.start import Start


def _is_due(every: int, step: int) -> bool:
    """Return True if something is done after this step, counted from 1; `every` 0 is never."""
    return every > 0 and step % every == 0


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
        config = start.config
        corpus = start.corpus
        own = start.config.parallel3d
        self._start = start
        self._layers = parts.layers
        stages = parts.schedule.pp_coord_of_stage
        self._ends = stages[0], stages[-1]
        self._shapes = {name: spec.shape for name, spec in named_params(parts.layers).items()}
        self.config = config
        self.mesh = mesh
        self.engine = parts.engine
        self.executor = parts.executor
        self.flops_per_token = parts.flops_per_token
        self.peak_flops = peak_flops
        self.writer = writer
        self.progress = progress
        self.profiler = profiler
        self._say = progress.say if progress else (lambda text: None)
        self.watch = StepWatch(config, mesh, parts, say=self._say)
        self.saver = saver
        self.stop = stop or StopRequest()
        self.position = start.position
        self._state = RunState(config, corpus) if saver else None
        self._bad = BadSteps(own.train, start.checkpoint.state if start.checkpoint else None)
        recomputes = own.train.check_bits.recompute_every
        self._recomputation = Recomputation(config, mesh, parts) if recomputes else None
        # The newest step that each check of bits vouches for; the last that was wrong and rewound.
        self._clean = dict.fromkeys(("every", "recompute_every"), start.position.step)
        self._wrong_at = -1
        self._role_lrs = role_lrs(own.model, config.optimizer.params)
        # The number of layers with each side loss.
        self._side_losses = Counter(name for layer in parts.layers for name in layer.side_losses)
        self._sparse = [layer for layer in parts.layers if layer.num_experts]
        # A sum over the ranks of a stage, divided by their number, is the batch's mean.
        self._copies = mesh.replicas.size * mesh.tensor.size
        self._noise: dict[str, float] = {}
        # The stall of the last save, until a line of metrics contains it.
        self._stall: float | None = None
        self._feed = Feed(config, mesh, corpus, parts.schedule)
        self._evaluation = Evaluation(
            config, mesh, corpus=corpus, feed=self._feed, evaluator=parts.evaluator, stop=self.stop
        )

    def run(self) -> Result:
        """Train to the last step or a request to stop.

        Raises TrainingError on every rank if a loss or gradient is not finite (unless
        `train.on_nonfinite` says otherwise), or if checkpoints cannot be saved.
        """
        with closing(self._feed):
            return self._run()

    def _run(self) -> Result:
        result = Result(steps=self.position.step)
        first = self.position.step
        # The speed is measured without the first step, which also warms up, if there are more.
        seconds = 0.0
        tokens = 0
        step_seconds = 0.0
        step_tokens = 0
        # The closing loss is the mean of a tenth of the steps, within limits.
        window = min(max(self.config.num_steps // 10, 10), 50)
        losses: deque[float] = deque(maxlen=window)
        while result.steps < self.config.num_steps and not result.stopped:
            step = result.steps
            reached(step)
            fault_point("trainer.step")
            try:
                profiled = self.profiler.step(step) if self.profiler else nullcontext()
                with profiled, self.watch.step(step):
                    began = time.perf_counter()
                    lr = rate(self.config, step, self.position.next_sample)
                    rows, done, verdict = self.take_step(step, lr)
                    step_seconds = time.perf_counter() - began
                self._check_bits_if_due(step + 1, done)
            except WrongBits as error:
                result.steps = self._go_back(step, f"after step {step + 1} {error}")
                continue
            if step == first:
                self.mesh.set_timeouts(self.config.train.timeout_seconds)
                began_at = psutil.Process().create_time()
                self._record("first_step", step=step + 1, seconds=round(time.time() - began_at, 3))
                graphs = compiled.describe(self.config.train.compile)
                if graphs:
                    self._say(graphs)
            if verdict.action == "rewind":
                result.steps = self._rewind(verdict, step)
                continue
            padding = self._feed.padding(self.position.next_sample)
            before = self.position
            self.position = self.position.after(self.config, padding)
            step_tokens = self.position.tokens - before.tokens
            if step > first:
                seconds += step_seconds
                tokens += step_tokens
            result.steps = step + 1
            result.loss = self._mean_loss(row.loss for row in rows)
            if verdict.action == "train":
                losses.append(result.loss)
            result.peak_memory_bytes = [int(row.peak_memory_bytes) for row in rows]
            is_last = result.steps == self.config.num_steps
            after = self.config.train.stop_after
            result.stopped = self.stop.stopping or (result.steps == after and not is_last)
            validation = {} if result.stopped else self._evaluated(result)
            self._report(result, lr, step_seconds, step_tokens, rows, done, validation)
            self._digest_if_due(result.steps)
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
            if not tokens:
                tokens = step_tokens
                seconds = step_seconds
            speed = self._speed(tokens, seconds)
            result.tokens_per_second, result.tflops_per_device, result.mfu = speed
            result.mean_loss = fmean(losses) if losses else math.nan
            result.mean_loss_of = len(losses)
            result.loss_deviation = stdev(losses) if len(losses) > 1 else math.nan
        return result

    def _evaluated(self, result: Result) -> Losses:
        """Return the losses of an evaluation if one is due after this step, else {}."""
        every = self.config.train.evaluate_every
        if result.steps < self.config.num_steps and not (every and result.steps % every == 0):
            return {}
        losses = self._evaluation.run()
        result.validation = losses if losses is not None else result.validation
        result.stopped = losses is None
        return losses or {}

    def _check_bits_if_due(self, step: int, done: StepResult) -> None:
        """Raise WrongBits if ranks differ in what they must all hold; collective."""
        if _is_due(self.config.train.check_bits.every, step):
            pulse.doing(f"comparing the ranks' bits after step {step}")
            check_bits(self.engine, self.mesh, done.grad_norm, self._ends, self._messages)
            self._clean["every"] = step

    def _go_back(self, step: int, reason: str) -> int:
        """Stop because of wrong bits, or return the step of the checkpoint that was loaded.

        Checkpoints that no check vouches for are set aside. The same wrong bits again end the run.
        """
        self._record("wrong_bits", step=step + 1, reason=reason)
        settings = self.config.train.check_bits
        if self.saver:
            self.saver.finish()
            begin_memory(self._start.memory, self.mesh, self._start.folder)
            vouched = min(at for name, at in self._clean.items() if getattr(settings, name))
            if names := find.set_aside(self._start.folder / "checkpoints", vouched, self.mesh):
                reason += f". Set aside: {', '.join(names)}"
        if settings.on_wrong == "stop" or step <= self._wrong_at:
            raise TrainingError(f"{reason}. All ranks stop")
        self.position = self._load_newest(step, f"{reason}. ")
        to = self.position.step
        self._clean = dict.fromkeys(self._clean, to)
        self._wrong_at = step
        self._say(f"{reason}. Rewound to step {to}")
        self._record("rewind", step=step + 1, to=to, reason="wrong bits")
        return to

    def _digest_if_due(self, step: int) -> None:
        """Write a digest of the state if one is due after this step; collective."""
        if _is_due(self.config.train.digest_every, step):
            pulse.doing(f"the digest of step {step}")
            checksums = state_checksums(self.engine, self.mesh, self._shapes)
            if self.writer:
                append_digest(self._start.folder, step, checksums)

    def _save_if_due(self, result: Result) -> None:
        """Save if a save is due; at the end of a run wait until it is on disk."""
        if self.saver is None or self._state is None:
            return
        self.saver.poll()
        step = result.steps
        settings = self.config.checkpoint
        ends = result.stopped or step == self.config.num_steps
        asked = ends or self.stop.saving
        on_disk = asked or step in settings.at or _is_due(settings.every, step)
        in_memory = not asked and _is_due(settings.in_memory_every, step)
        if on_disk or in_memory:
            pulse.doing(f"saving step {self.position.step}")
            state = self._state.at(self.position) | self._bad.state()
            self._stall = self.saver.save_in_memory(state) if in_memory else 0.0
            self._stall += self.saver.save(state, wait=ends) if on_disk else 0.0
        if on_disk:
            self.stop.saved()
        if ends:
            self.saver.require_saved()
            self.stop.finished()

    def take_step(self, step: int, lr: float) -> tuple[list[RankStep], StepResult, Verdict]:
        """Take one step; return the rows of all ranks, the engine's result, and the verdict.

        The host waits for the device only once, at the end. A step with a loss that is not finite
        is therefore still taken, but never saved. Only if the settings may skip a batch do the
        ranks judge it before the update, which takes one more exchange.
        """
        pulse.doing(f"the batch of step {step + 1}")
        train = self.config.train
        is_measured = _is_due(train.noise_scale_every, step + 1)
        if is_measured:
            self.engine.measure_own_gradient()
        recomputes = _is_due(train.check_bits.recompute_every, step + 1)
        check = self._recomputation if recomputes else None
        loss = self._forward_and_backward(step, check)
        if check:
            try:
                check.compare()
            except WrongBits:
                self.engine.step(lr, lambda _: False)  # drops the gradients
                raise
        pulse.doing(f"the optimizer's step {step + 1}")
        side_losses = [self.executor.side_losses.get(name, 0.0) for name in self._side_losses]
        verdict: Verdict | None = None

        def is_kept(own_norm: Any) -> bool:
            nonlocal verdict
            early = self.mesh.messages.gather_floats([own_norm, loss, *side_losses])
            norm = early[0][0]
            verdict = self._judge([row[1:] for row in early], norm)
            return verdict.action != "skip"

        with check.updating() if check else nullcontext():
            done = self.engine.step(lr, is_kept if self._bad.may_skip else None)
        if check:
            self._clean["recompute_every"] = step + 1
        stop, save = self.stop.flags()
        rows = gather_rank_steps(
            self.mesh,
            loss=loss,
            norm=done.norm,
            stop=stop,
            save=save,
            is_broken=self.saver is not None and self.saver.broken,
            own_squares=done.own_squares,
            side_losses=side_losses,
        )
        done = replace(done, norm=rows[self.mesh.rank].norm)
        self._noise = self._gradient_noise(rows, done) if is_measured else {}
        if verdict is None:
            norm = None if done.overflow else rows[0].norm
            verdict = self._judge([(row.loss, *row.side_losses) for row in rows], norm)
        if verdict.action == "stop":
            if self.saver:
                self.saver.finish()  # it may save an earlier step
            raise TrainingError(
                f"{verdict.reason} at step {step + 1}, lr {lr:.3g}; all ranks stop. "
                f"{verdict.remedy}"
            )
        self.stop.agree([[row.stop, row.save] for row in rows])
        if any(row.is_broken for row in rows):
            raise TrainingError(
                f"{MOST_FAILURES} checkpoints in a row could not be saved; all ranks stop. Earlier "
                "checkpoints are intact: free some space or repair the disk, and start again"
            )
        if verdict.action == "train":
            mean_loss = self._mean_loss(row.loss for row in rows)
            self._bad.add(mean_loss, None if done.overflow else rows[0].norm)
        elif verdict.action == "skip":
            self._leave_out(verdict, step, self.position.next_sample)
        return rows, done, verdict

    def _forward_and_backward(self, step: int, check: Recomputation | None) -> Tensor:
        """Run the batch of a step, and return this rank's part of its loss."""
        batch = self._feed.training(self.position.next_sample)
        is_noted = _is_due(self.config.train.check_bits.every, step + 1)
        recording = check.recording(batch, step) if check else nullcontext()
        with recording, noting_messages(self.executor, is_noted) as self._messages:
            return self.executor.run(batch, step)

    def _gradient_noise(self, rows: Sequence[RankStep], done: StepResult) -> dict[str, float]:
        """Return the gradient noise of a step whose ranks measured their own gradients."""
        ranks = self.mesh.replicas.size
        small = sum(row.own_squares for row in rows) / ranks / done.loss_scale**2
        batch = self.config.batch_size_at(self.position.next_sample)
        return gradient_noise(small, done.grad_norm**2, batch=batch, ranks=ranks)

    def _judge(self, rows: Sequence[Sequence[float]], norm: float | None) -> Verdict:
        """Return what to do with a step; a row is a rank's loss and side losses."""
        if self.config.fp16.enabled and norm is not None and not math.isfinite(norm):
            norm = None  # DeepSpeed finds the overflow after it has asked
        columns = zip(*rows, strict=True)
        losses = dict(zip(("loss", *self._side_losses), columns, strict=True))
        return self._bad.judge(losses, self._mean_loss(losses["loss"]), norm)

    def _mean_loss(self, losses: Iterable[float]) -> float:
        """Return the loss of the batch; tp ranks of the last stage have their dp coordinate's."""
        return sum(losses) / self._copies

    def _leave_out(self, verdict: Verdict, step: int, first: int, **place: int) -> None:
        """Count a bad step; show and record what is left out, from sample `first` on."""
        self._bad.count += 1
        samples = first, self.position.after(self.config).next_sample - 1
        rewinds = f" rewound to step {place['to']}," if place else ""
        self._say(
            f"step {step + 1}: {verdict.reason};{rewinds} samples {samples[0]:,} to "
            f"{samples[1]:,} are left out ({self._bad.count} of at most "
            f"{self.config.train.max_skips} times)"
        )
        self._record(
            verdict.action,
            step=step + 1,
            **place,
            samples=samples,
            count=self._bad.count,
            reason=verdict.reason,
        )

    def _record(self, event: str, **values: object) -> None:
        """Write an event to the run's journal, on rank 0."""
        if self.writer:
            record(event, **values)

    def _rewind(self, verdict: Verdict, step: int) -> int:
        """Load the newest checkpoint and return its step, after which the next batch is trained."""
        there = self._load_newest(step)
        self._leave_out(verdict, step, there.next_sample, to=there.step)
        next_sample = self.position.after(self.config).next_sample
        self._bad.left_out += next_sample - there.next_sample
        self.position = replace(there, next_sample=next_sample)
        return there.step

    def _load_newest(self, step: int, reason: str = "") -> Position:
        """Load the newest checkpoint instead of the state in `step`, and return its position.

        Later ones are set aside.
        """
        pulse.doing(f"rewinding from step {step + 1}")
        self.mesh.set_timeouts(1800.0)  # for ranks that wait for one that reads a checkpoint
        checkpoint = self._start.on_disk
        folder = self._start.folder / "checkpoints"
        if self.saver:
            self.saver.finish()
            begin_memory(self._start.memory, self.mesh, self._start.folder)
            checkpoint = find.find(folder, "auto", self.mesh)[0] or checkpoint
        if checkpoint is None:
            raise TrainingError(
                f"{reason}Step {step + 1} has no checkpoint before it to rewind to; all ranks "
                "stop. Lower checkpoint.every, or set train.on_nonfinite, train.on_spike and "
                "train.check_bits.on_wrong to other values"
            )
        find.set_aside(folder, checkpoint.step, self.mesh)
        load(checkpoint, engine=self.engine, mesh=self.mesh, layers=self._layers)
        if self.writer:
            self.writer.rewind(checkpoint.step)
        self.mesh.set_timeouts(self.config.train.timeout_seconds)
        self._bad.rewind_to(checkpoint.state)
        return Position.of(checkpoint.state)

    def _speed(self, num_tokens: int, seconds: float) -> tuple[float, float, float | None]:
        """Return tokens per second of the mesh, model TFLOP/s per device, and MFU."""
        tokens = num_tokens / seconds
        flops = tokens * self.flops_per_token / self.mesh.world.size
        mfu = flops / self.peak_flops if self.peak_flops else None
        return tokens, flops / 1e12, mfu

    def _means_of_side_losses(self, rows: list[RankStep]) -> dict[str, float]:
        """Return the mean of each side loss over the layers that have it and over the batch."""
        means = {}
        columns = zip(*(row.side_losses for row in rows), strict=True)
        for (name, num_layers), column in zip(self._side_losses.items(), columns, strict=True):
            means[name] = sum(column) / (self._copies * num_layers)
        return means

    def _loads(self) -> dict[str, list[float]]:
        """Return the loads of each layer's experts over the batch (`LayerSpec`); collective."""
        if not self._sparse:
            return {}
        device = self.mesh.device
        own = []
        for layer in self._sparse:
            of_another_rank = torch.zeros(layer.num_experts + 1, device=device)
            own.append(self.executor.side_losses.get(layer.loads, of_another_rank))
        means = iter(self.mesh.messages.sum_floats(torch.cat(own) / self._copies))
        return {layer.name: [*islice(means, layer.num_experts + 1)] for layer in self._sparse}

    def _report(
        self,
        result: Result,
        lr: float,
        seconds: float,
        tokens: int,
        rows: list[RankStep],
        done: StepResult,
        validation: Losses,
    ) -> None:
        """Write and show a step's metrics, on the rank that reports."""
        tokens_per_second, tflops, mfu = self._speed(tokens, seconds)
        stall = self._stall
        self._stall = None
        metrics = StepMetrics(
            step=result.steps,
            loss=result.loss,
            grad_norm=done.grad_norm,
            lr=lr,
            tokens=self.position.tokens,
            tokens_per_second=tokens_per_second,
            tflops_per_device=tflops,
            mfu=mfu,
            peak_memory_bytes=int(max(row.peak_memory_bytes for row in rows)),
            step_seconds=seconds,
            role_lr={role: lr * factor for role, factor in self._role_lrs.items()},
            side_losses=self._means_of_side_losses(rows),
            experts=self._loads(),
            gradient_noise=self._noise,
            part_epochs=self._feed.epochs(self.position.next_sample),
            validation=validation,
            loss_scale=done.loss_scale if self.config.fp16.enabled else None,
            checkpoint_stall_seconds=stall,
        )
        if self.writer:
            self.writer.write(metrics)
        if self.progress:
            self.progress.show(metrics)
