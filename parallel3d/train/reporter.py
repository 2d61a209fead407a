"""The observers that report: metrics, progress, and the result of a launch."""

import math
import time
from collections import deque
from collections.abc import Mapping
from itertools import islice
from statistics import fmean, stdev
from typing import Any

import psutil
import torch

from parallel3d.base.journal import record
from parallel3d.base.say import Say
from parallel3d.base.step_lines import closing_window
from parallel3d.checkpoint.state import Position
from parallel3d.config import CompleteConfig
from parallel3d.mesh.mesh import Mesh
from parallel3d.models.common import role_lrs
from parallel3d.tensor import compiled
from parallel3d.train.assembly import Assembly
from parallel3d.train.feed import Feed
from parallel3d.train.metrics import MetricsWriter, Result, StepMetrics, mfu_of
from parallel3d.train.observer import Observer, Step
from parallel3d.train.progress import Progress
from parallel3d.train.rank_step import mean_of_ranks
from parallel3d.train.saving import Saving


class FirstStep(Observer):
    """Notes how long a launch took to its first step, and what was compiled for it.

    A limit of graphs that is reached later is reported when it is.
    """

    def __init__(self, config: CompleteConfig, mesh: Mesh, say: Say) -> None:
        self._compiles = compiled.mode_on(mesh.device, config.train.compile)
        is_auto = config.train.compile == "auto"
        self._lacks_triton = is_auto and mesh.device.type == "cuda" and self._compiles == "none"
        self._limits = 0  # reported so far
        self._records = mesh.rank == 0
        self._say = say
        self._is_done = False

    def after(self, step: Step) -> None:
        """Report after the first step, and each limit that is reached."""
        if self._is_done:
            self._report_limits()
            return
        self._is_done = True
        if self._records:
            seconds = time.time() - psutil.Process().create_time()
            record("first_step", step=step.number + 1, seconds=round(seconds, 3))
        graphs = compiled.describe(self._compiles)
        if graphs:
            self._say(graphs)
        if self._lacks_triton:
            self._say(compiled.WITHOUT_TRITON)
        if self._compiles != "none":
            self._limits = compiled.counts().limits

    def _report_limits(self) -> None:
        if self._compiles != "none" and (limits := compiled.counts().limits) > self._limits:
            self._limits = limits
            self._say(compiled.describe_limits(limits))


class Reporter(Observer):
    """Writes and shows each step's metrics, and sums a launch up.

    Only the rank that reports has a `writer` and a `progress`. Without `peak_flops`, the device's,
    MFU is not reported.
    """

    collectives = "all_reduce of the experts' loads, after every step of a model with experts"

    def __init__(
        self,
        config: CompleteConfig,
        mesh: Mesh,
        parts: Assembly,
        feed: Feed,
        *,
        position: Position,
        peak_flops: float | None,
        writer: MetricsWriter | None,
        progress: Progress | None,
        saving: Saving | None,
    ) -> None:
        self.config = config
        self._mesh = mesh
        self._executor = parts.executor
        self._feed = feed
        self._flops_per_token = parts.flops_per_token
        self._peak_flops = peak_flops
        self._writer = writer
        self._progress = progress
        self._saving = saving
        self._first = position.step
        self._role_lrs = role_lrs(config.model, config.optimizer.params)
        self._side_losses = parts.side_losses
        self._sparse = [layer for layer in parts.layers if layer.num_experts]
        self._last: Step | None = None
        # The speed is measured without the first step, which also warms up, if there are more.
        self._seconds = 0.0
        self._tokens = 0
        # The closing loss is the mean of a tenth of the steps, within limits.
        self._losses: deque[float] = deque(maxlen=closing_window(config.num_steps))

    def after(self, step: Step) -> None:
        """Write and show the metrics of a step."""
        self._last = step
        if step.number > self._first:
            self._seconds += step.seconds
            self._tokens += step.end.tokens - step.start.tokens
        if step.is_trained:
            self._losses.append(step.mean_loss)
        metrics = self.metrics_of(step)
        if self._writer:
            self._writer.write(metrics)
        if self._progress:
            self._progress.show(metrics)

    def rewound(self, position: Position, state: Mapping[str, Any]) -> None:
        """Remove the lines of steps that will be repeated."""
        if self._writer:
            self._writer.rewind(position.step)

    def at_end(self, result: Result) -> None:
        """Set the losses and the speed of the launch."""
        step = self._last
        if step is None:
            if self._writer:
                self._writer.complete(result.validation)
            return
        result.loss = step.mean_loss
        result.peak_memory_bytes = [int(row.peak_memory_bytes) for row in step.rows]
        if not self._tokens:
            self._tokens = step.end.tokens - step.start.tokens
            self._seconds = step.seconds
        speed = self._speed(self._tokens, self._seconds)
        result.tokens_per_second, result.tflops_per_device, result.mfu = speed
        losses = self._losses
        result.mean_loss = fmean(losses) if losses else math.nan
        result.mean_loss_of = len(losses)
        result.loss_deviation = stdev(losses) if len(losses) > 1 else math.nan

    def metrics_of(self, step: Step) -> StepMetrics:
        """Return the line of metrics of a step; collective if the model has experts."""
        tokens = step.end.tokens - step.start.tokens
        tokens_per_second, tflops, mfu = self._speed(tokens, step.seconds)
        return StepMetrics(
            step=step.end.step,
            loss=step.mean_loss,
            grad_norm=step.done.grad_norm,
            lr=step.lr,
            tokens=step.end.tokens,
            tokens_per_second=tokens_per_second,
            tflops_per_device=tflops,
            mfu=mfu,
            peak_memory_bytes=int(max(row.peak_memory_bytes for row in step.rows)),
            step_seconds=step.seconds,
            role_lr={role: step.lr * factor for role, factor in self._role_lrs.items()},
            side_losses=self.means_of_side_losses(step),
            experts=self._loads(),
            gradient_noise=dict(step.gradient_noise),
            part_epochs=self._feed.epochs(step.end.next_sample),
            validation=step.validation,
            scores=step.scores,
            loss_scale=step.done.loss_scale if self.config.fp16.enabled else None,
            checkpoint_stall_seconds=self._saving.take_stall() if self._saving else None,
        )

    def _speed(self, num_tokens: int, seconds: float) -> tuple[float, float, float | None]:
        """Return tokens per second of the mesh, model TFLOP/s per device, and MFU."""
        tokens = num_tokens / seconds
        flops = tokens * self._flops_per_token / self._mesh.world.size
        return tokens, flops / 1e12, mfu_of(flops, self._peak_flops)

    def means_of_side_losses(self, step: Step) -> dict[str, float]:
        """Return the mean of each side loss over the layers that have it and over the batch."""
        means = {}
        columns = zip(*(row.side_losses for row in step.rows), strict=True)
        for (name, num_layers), column in zip(self._side_losses.items(), columns, strict=True):
            means[name] = mean_of_ranks(self._mesh, column) / num_layers
        return means

    def _loads(self) -> dict[str, list[float]]:
        """Return the loads of each layer's experts over the batch (`LayerSpec`); collective."""
        if not self._sparse:
            return {}
        own = []
        for layer in self._sparse:
            of_another_rank = torch.zeros(layer.num_experts + 1, device=self._mesh.device)
            own.append(self._executor.side_losses.get(layer.loads, of_another_rank))
        copies = self._mesh.replicas.size * self._mesh.tensor.size
        means = iter(self._mesh.messages.sum_floats(torch.cat(own) / copies))
        return {layer.name: [*islice(means, layer.num_experts + 1)] for layer in self._sparse}
