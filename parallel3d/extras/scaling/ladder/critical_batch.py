"""The critical batch size of a run: forks of a checkpoint with several batches, compared.

As in arXiv:2505.23971: each fork trains on the same samples, with the learning rate adapted to its
batch. The critical batch is the largest one whose loss is within a tolerance of a small batch's.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil, gcd, inf, lcm, nan
from pathlib import Path

import numpy as np
from rich.console import Console

from parallel3d.base import terminal
from parallel3d.base.atomic import replace_text
from parallel3d.base.errors import ConfigError
from parallel3d.base.step_lines import METRICS, finite, read_lines
from parallel3d.base.terminal import Column
from parallel3d.config import RunConfig, arithmetic
from parallel3d.config.learning_rate import rate
from parallel3d.extras.report.page import png, style
from parallel3d.extras.scaling.flags import DRAWS
from parallel3d.extras.scaling.ladder.expand import LadderRun
from parallel3d.extras.scaling.ladder.plan import Rung, Runs, checkpoints, state_of, with_costs
from parallel3d.extras.scaling.ladder.runner import execute
from parallel3d.extras.scaling.points import Array
from parallel3d.extras.scaling.runs import ALL, config_of, count
from parallel3d.models.common import divisor_below

FILE = "critical-batch.json"
PICTURE = "critical-batch.png"
_LEAST_SIZES = 4  # the curve has three parameters


@dataclass(frozen=True)
class CriticalBatch:
    """The losses of forks, and the curve floor + gain B / (B + half) through them; B in tokens."""

    batch_tokens: tuple[int, ...]
    losses: tuple[float, ...]
    tolerance: float
    floor: float
    gain: float
    half: float
    critical_batch_tokens: float
    """inf if no batch exceeds the tolerance."""
    interval: tuple[float, float]
    """95 % of the draws of the critical batch."""
    noise_scale_tokens: float | None = None
    """The gradient noise scale of the run before the checkpoint, if it was measured."""

    def loss(self, tokens: Array) -> Array:
        """Return the fitted losses of batches."""
        return self.floor + self.gain * tokens / (tokens + self.half)

    def __str__(self) -> str:
        low, high = (f"{x:,.0f}" if x < inf else "no bound" for x in self.interval)
        critical = f"{self.critical_batch_tokens:,.0f}"
        most = self.batch_tokens[-1]
        if self.critical_batch_tokens > most:
            critical = f"above the largest batch, {most:,}"
        text = f"critical batch, tokens: {critical} (95 %: {low} to {high})"
        if self.noise_scale_tokens is not None:
            text += f"; gradient noise scale {self.noise_scale_tokens:,.0f} tokens"
        return text


def measure(args: argparse.Namespace, out: Console) -> tuple[int, CriticalBatch | None]:
    """Train the forks, fit, print and draw; return the exit code, and the result if it is 0."""
    code, forks = execute(lambda: forks_of(args), args.parallel, out)
    if code:
        return code, None
    runs = [rung.run for rung in forks.rungs]
    losses = [rung.state.loss or nan for rung in forks.rungs]
    result = fit([_batch_tokens(run) for run in runs], losses, args.tolerance)
    result = replace(result, noise_scale_tokens=_noise_scale(args.run, runs[0]))
    replace_text(forks.directory / FILE, json.dumps(finite(asdict(result))))
    (forks.directory / PICTURE).write_bytes(draw(result))
    fitted_losses = result.loss(np.array(result.batch_tokens))
    rows = []
    for run, loss, fitted_loss in zip(runs, losses, fitted_losses, strict=True):
        first_rate = rate(run.config.completed(), run.steps_done, _last_batch(run)[0])
        rows.append(
            (
                f"{_batch_tokens(run):,}",
                f"{run.steps - run.steps_done:,}",
                f"{first_rate:.3g}",
                f"{loss:.4f}",
                f"{fitted_loss:.4f}",
            )
        )
    terminal.show(out, [Column(c) for c in ("tokens/step", "steps", "lr", "loss", "fitted")], rows)
    terminal.say(out, f"{result}; wrote {forks.directory / FILE} and {PICTURE}")
    return code, result


def forks_of(args: argparse.Namespace) -> Runs:
    """Return a fork of the run's checkpoint for each batch, with its state.

    Raises ConfigError if the run cannot be forked with these batches.
    """
    config = config_of(args.run)
    saved = checkpoints(args.run)
    step = args.step or max(saved, default=0)
    if step not in saved:
        raise ConfigError(f"--step {step}: is no checkpoint of {args.run}; it has {saved}")
    start = args.run / "checkpoints" / f"step-{step}"
    state = json.loads((start / "state.json").read_text(encoding="utf-8"))
    batch = config.global_batch_size
    done = int(state["next_sample"])
    dp = config.mesh.sizes.dp
    if config.train.batch_schedule or done != step * batch:
        raise ConfigError(
            f"--run {args.run}: its batch changes, or it left out samples before step {step}; "
            "name a run of one batch, and a step before that"
        )
    sizes = sorted(set(args.batches or (batch * 2**power for power in range(6))))
    if len(sizes) < _LEAST_SIZES or any(size % dp for size in sizes):
        raise ConfigError(f"--batches {sizes}: name {_LEAST_SIZES} or more multiples of dp={dp}")
    length = config.data.sequence_length
    unit = lcm(*sizes)
    wanted = args.tokens / length if args.tokens else max(done / 10, 8 * sizes[-1])
    end = done + ceil(wanted / unit) * unit
    directory = args.run / "critical-batch" / f"step-{step}"
    fraction = rate(config, step - 1, done - batch) / config.optimizer.params.lr
    runs = []
    for size in sizes:
        raw = config.to_dict()
        share = gcd(batch, size) // dp
        params = raw["optimizer"]["params"]
        block = raw["parallel3d"]
        params |= {
            name: params[name] * fraction
            for name in ("lr", "muon_lr", "adam_lr")
            if params.get(name)
        }
        raw |= {
            "gradient_accumulation_steps": None,
            "scheduler": None,
            "train_micro_batch_size_per_gpu": divisor_below(
                share, min(share, config.micro_batch_size) + 1
            ),
        }
        block["train"] |= {
            "steps": step + (end - done) // size,
            "lr_schedule": {"type": "constant"},
            "batch_schedule": [[0, batch], [done, size]],
            "batch_lr": args.batch_lr,
            "evaluate_every": 0,
            "evaluate_samples": ALL,
            "stop_after": None,
        }
        block["checkpoint"] |= {"resume": str(start.resolve()), "at": []}
        name = f"{args.batch_lr}-to-{end * length}-batch-{size}"
        ranks = config.mesh.sizes.ranks
        block["run"] |= {"directory": str(directory), "name": name, "save_weights": False}
        fork = RunConfig.from_dict(raw, f"the fork {name}").resolve(ranks).completed()
        runs.append(
            LadderRun(
                name=name,
                config=fork,
                counts=count(fork.model),
                tokens=end * length,
                exact_flops=end * length,
                devices=ranks,
                steps=fork.num_steps,
                steps_done=step,
            )
        )
    rungs = (Rung(run, cost, state_of(run), None) for run, cost in with_costs(runs))
    return Runs(args.run, directory, tuple(rungs))


def _batch_tokens(fork: LadderRun) -> int:
    return _last_batch(fork)[1] * fork.config.data.sequence_length


def _last_batch(fork: LadderRun) -> tuple[int, int]:
    """Return the first sample and the samples per step of a fork's own batch."""
    return arithmetic.batch_phases(fork.config.train, fork.config.data)[-1]


def _noise_scale(folder: Path, fork: LadderRun) -> float | None:
    """Return the noise scale of a run in tokens, from the last half before the checkpoint."""
    last = fork.steps_done
    lines = read_lines(folder / METRICS) if (folder / METRICS).exists() else []
    lines = [line for line in lines if last // 2 < int(line["step"]) <= last]
    noise = [line["gradient_noise"] for line in lines if "gradient_noise" in line]
    trace, square = (sum(n[name] or 0 for n in noise) for name in ("trace", "square"))
    return trace / square * fork.config.data.sequence_length if square > 0 else None


def fit(sizes: Sequence[int], losses: Sequence[float], tolerance: float) -> CriticalBatch:
    """Fit the curve by least squares; find the batch `tolerance` above the first fitted one's loss.

    Batches below the best one are left out, because at a constant rate they have a higher floor of
    noise; the last four are always fitted.

    A step gains B / (B + half) of what an infinite batch would (arXiv:1812.06162, section 2.2), and
    the same tokens are 1 / B as many steps, so the loss falls by a constant over B + half. The
    interval is that of new losses around the curve, with a variance that n - 3 residuals leave
    open.
    """
    first = min(int(np.argmin(losses)), len(sizes) - _LEAST_SIZES)
    b = np.array(sizes[first:], dtype=float)
    y = np.array([losses[first:]])
    grid = np.geomspace(b.min() / 10, b.max() * 100, 400)
    x = b[:, None] / (b[:, None] + grid)  # [sizes, grid]
    centred = x - x.mean(0)
    squares = (centred**2).sum(0)

    def best(y: Array) -> list[Array]:
        """Return floor, gain, half, squares and critical batch of y [draws, sizes], [draws]."""
        mean = y.mean(1, keepdims=True)
        products = (y - mean) @ centred  # [draws, grid]
        gain = np.maximum(products / squares, 0)
        rss = ((y - mean) ** 2).sum(1, keepdims=True) - 2 * gain * products + gain**2 * squares
        place = rss.argmin(1)
        at = (np.arange(len(y)), place)
        part = x[0, place] + tolerance / np.maximum(gain[at], 1e-12)
        critical = np.where(part < 1, grid[place] * part / np.maximum(1 - part, 1e-12), inf)
        return [mean[:, 0] - gain[at] * x.mean(0)[place], gain[at], grid[place], rss[at], critical]

    floor, gain, half, rss, critical = (float(value[0]) for value in best(y))
    random = np.random.default_rng(0)
    deviation = np.sqrt(rss / random.chisquare(len(b) - 3, (DRAWS, 1)))
    drawn = floor + gain * b / (b + half) + deviation * random.normal(size=(DRAWS, len(b)))
    low, high = np.quantile(best(drawn)[-1], (0.025, 0.975), method="nearest")
    return CriticalBatch(
        batch_tokens=tuple(sizes),
        losses=tuple(losses),
        tolerance=tolerance,
        floor=floor,
        gain=gain,
        half=half,
        critical_batch_tokens=critical,
        interval=(float(low), float(high)),
    )


def draw(result: CriticalBatch) -> bytes:
    """Return a PNG: losses over batches, the curve, and the critical batch with its interval."""
    with style() as plt:
        figure, axes = plt.subplots(figsize=(4.6, 3.2))
        axes.plot(result.batch_tokens, result.losses, "o", label="forks")
        batches = np.geomspace(result.batch_tokens[0] / 2, result.batch_tokens[-1] * 2, 100)
        axes.plot(batches, result.loss(batches), "-", lw=0.9, label="fit")
        low, high = np.clip(result.interval, batches[0], batches[-1])
        axes.axvspan(low, high, alpha=0.15, label="critical batch, 95 %")
        axes.set(xscale="log", xlabel="tokens per step", ylabel="held-out loss (nats per token)")
        axes.legend()
        return png(plt, figure)
