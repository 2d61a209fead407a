"""The step loop: batch -> executor -> engine -> metrics; nothing else (floor 5)."""

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import FrameType

import torch

from parallel3d.assembly import Assembly
from parallel3d.config import RunConfig
from parallel3d.data.batches import (
    Batches,
    documents_of,
    first_sample,
    num_evaluation_batches,
)
from parallel3d.data.corpus import Corpus
from parallel3d.errors import TrainingError
from parallel3d.learning_rate import rate
from parallel3d.mesh import Mesh
from parallel3d.metrics import MetricsWriter, Progress, StepMetrics, peak_memory_bytes
from parallel3d.pipeline.executor import Microbatch
from parallel3d.profile import Profiler

_ONE_CTRL_C = 2.0  # seconds within which SIGINTs are one


@dataclass
class StopRequest:
    """Whether somebody asked this rank to stop; the ranks agree on it at a step's end."""

    asked: bool = False

    @contextmanager
    def listening(self) -> Iterator["StopRequest"]:
        """Take SIGINT and SIGTERM for a request; a second Ctrl-C interrupts at once.

        A request is one until the process ends: launchers repeat it while the weights are saved.
        """
        since = 0.0

        def ask(number: int, frame: FrameType | None) -> None:
            nonlocal since
            now = time.monotonic()
            # torchrun hands a Ctrl-C on to ranks that have had it from the terminal.
            if self.asked and number == signal.SIGINT and now - since > _ONE_CTRL_C:
                raise TrainingError("interrupted a second time; the weights are not saved")
            if not self.asked:
                self.asked, since = True, now

        signals = (signal.SIGINT, signal.SIGTERM)
        previous = [signal.signal(s, ask) for s in signals]
        try:
            yield self
        finally:
            if not self.asked:
                for s, handler in zip(signals, previous, strict=True):
                    signal.signal(s, handler)


@dataclass
class Result:
    """What a run came to."""

    steps: int = 0
    loss: float = math.nan
    held_out_loss: float | None = None
    tokens_per_second: float = 0.0
    tflops_per_device: float = 0.0
    mfu: float | None = None
    peak_memory_bytes: list[int] = field(default_factory=list)
    stopped: bool = False


class Trainer:
    """Trains for `train.steps` steps, evaluating on the way.

    `peak_flops` are a device's (None: MFU is not reported). `writer` and `progress` are given on
    the rank that reports, and there alone.
    """

    def __init__(
        self,
        config: RunConfig,
        mesh: Mesh,
        corpus: Corpus,
        parts: Assembly,
        peak_flops: float | None,
        writer: MetricsWriter | None = None,
        progress: Progress | None = None,
        profiler: Profiler | None = None,
    ) -> None:
        self.config, self.mesh, self.engine = config, mesh, parts.engine
        self.executor, self.evaluator = parts.executor, parts.evaluator
        self.flops_per_token, self.peak_flops = parts.flops_per_token, peak_flops
        self._end_of_text = corpus.end_of_text
        self.writer, self.progress, self.profiler = writer, progress, profiler
        length = config.data.sequence_length
        self._training = Batches(corpus.train, length, config.train.seed)
        self._held_out = Batches(corpus.held_out, length, seed=None)

    def run(self) -> Result:
        """Train; raises TrainingError on every rank if a loss or gradient is not finite."""
        result, train = Result(), self.config.train
        seconds = 0.0  # of the steps after the first, which also warms up
        with StopRequest().listening() as stop:
            for step in range(self.config.num_steps):
                with self.profiler.step(step) if self.profiler else nullcontext():
                    start = time.perf_counter()
                    lr = rate(self.config, step)
                    rows = self._step(step, lr, stop)
                    taken = time.perf_counter() - start
                seconds += taken if step else 0.0
                if step == 0:
                    self.mesh.set_timeouts(train.timeout_seconds)
                result.steps = step + 1
                result.loss = self._mean_loss([row[0] for row in rows])
                result.peak_memory_bytes = [int(row[1]) for row in rows]
                result.stopped = any(row[2] for row in rows)
                last = result.steps == self.config.num_steps or result.stopped
                due = train.evaluate_every and result.steps % train.evaluate_every == 0
                held_out = self.evaluate() if due or last else None
                result.held_out_loss = held_out if held_out is not None else result.held_out_loss
                metrics = self._metrics(step, result.loss, lr, taken, rows, held_out)
                self._report(metrics)
                if last:
                    break
        if self.profiler:
            self.profiler.finish()  # of a run that was stopped among the profiled steps
        timed = max(1, result.steps - 1)
        speed = self._speed(seconds / timed if seconds else taken)
        result.tokens_per_second, result.tflops_per_device, result.mfu = speed
        return result

    def evaluate(self) -> float:
        """Mean loss of the held-out samples: the same ones on every mesh, in order."""
        config = self.config
        size = config.global_batch_size
        limit = -(-config.train.evaluate_samples // size)
        rounds = num_evaluation_batches(self._held_out.num_samples, size, limit)
        losses = []
        for i in range(rounds):
            local = self.evaluator.run(self._batch(self._held_out, i))
            losses.append(self._mean_loss([row[0] for row in self.mesh.gather_floats([local])]))
        return sum(losses) / rounds

    def _step(self, step: int, lr: float, stop: StopRequest) -> list[list[float]]:
        """One step; each rank's loss, peak memory and wish to stop."""
        loss = self.executor.run(self._batch(self._training, step), step)
        rows = self.mesh.gather_floats([loss, peak_memory_bytes(self.mesh.device), stop.asked])
        for rank, (local, *_) in enumerate(rows):
            if not math.isfinite(local):
                raise TrainingError(
                    f"the loss on rank {rank} is {local} at step {step + 1}, lr {lr:.3g}; "
                    "all ranks stop. Lower optimizer.params.lr, lengthen the warm-up, or look "
                    "at the data of this step"
                )
        self._done = self.engine.step(lr)
        norm = self._done.grad_norm
        if not self._done.overflow and (not math.isfinite(norm) or norm < 0):
            raise TrainingError(
                f"the gradient norm is not finite at step {step + 1}, lr {lr:.3g}, although the "
                "losses are; all ranks stop. Lower optimizer.params.lr, or try fp32"
            )
        return rows

    def _batch(self, batches: Batches, index: int) -> list[Microbatch]:
        """This data-parallel coordinate's microbatches of the global batch `index`."""
        config, result = self.config, []
        for m in range(config.num_microbatches):
            first = first_sample(
                index,
                m,
                self.mesh.coord("dp"),
                micro_batch=config.micro_batch_size,
                num_microbatches=config.num_microbatches,
                dp=self.mesh.size("dp"),
            )
            tokens, labels = batches.microbatch(first, config.micro_batch_size)
            arrays = [tokens, labels]
            if config.data.isolate_documents:
                arrays.append(documents_of(tokens, self._end_of_text))
            result.append(Microbatch(*(torch.from_numpy(x).to(self.mesh.device) for x in arrays)))
        return result

    def _mean_loss(self, locals_: list[float]) -> float:
        """The loss over the batch; every tp rank of the last stage reports its dp share's."""
        return sum(locals_) / (self.mesh.size("dp") * self.mesh.size("tp"))

    def _speed(self, seconds: float) -> tuple[float, float, float | None]:
        """Tokens a second of the mesh, model TFLOP/s of a device, and its share of the peak."""
        tokens = self.config.tokens_per_step / seconds
        flops = tokens * self.flops_per_token / self.mesh.size("world")
        return tokens, flops / 1e12, flops / self.peak_flops if self.peak_flops else None

    def _metrics(
        self,
        step: int,
        loss: float,
        lr: float,
        seconds: float,
        rows: list[list[float]],
        held_out: float | None,
    ) -> StepMetrics:
        tokens_per_second, tflops, mfu = self._speed(seconds)
        return StepMetrics(
            step=step + 1,
            loss=loss,
            grad_norm=self._done.grad_norm,
            lr=lr,
            tokens=(step + 1) * self.config.tokens_per_step,
            tokens_per_second=tokens_per_second,
            tflops_per_device=tflops,
            mfu=mfu,
            peak_memory_bytes=int(max(row[1] for row in rows)),
            step_seconds=seconds,
            held_out_loss=held_out,
            loss_scale=self._done.loss_scale if self.config.fp16.enabled else None,
        )

    def _report(self, metrics: StepMetrics) -> None:
        if self.writer:
            self.writer.write(metrics)
        if self.progress:
            self.progress.show(metrics)
