"""Choose a run for the time at hand: `parallel3d quick --minutes 20`, without a config."""

import json
import math
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch

from parallel3d.base.atomic import replace_text
from parallel3d.base.errors import ConfigError
from parallel3d.base.say import Say
from parallel3d.config import CompleteConfig, RunConfig
from parallel3d.config.hardware import Hardware
from parallel3d.data.prepare import prepare
from parallel3d.extras.calibrate.describe import calibrate
from parallel3d.extras.calibrate.measure_device import Effort
from parallel3d.extras.calibrate.steps import time_steps
from parallel3d.extras.scaling.ladder.ladder_file import LAWS
from parallel3d.extras.scaling.ladder.sizes import SHAPE
from parallel3d.extras.scaling.runs import PartCounts, count
from parallel3d.mesh.device import pick_device
from parallel3d.mesh.launch import Launch
from parallel3d.plan.report.plan_rows import choose, devices_of
from parallel3d.plan.report.plan_table import count as in_short
from parallel3d.plan.search.plans import Plan
from parallel3d.plan.vocabulary import with_vocabulary
from parallel3d.train.known_hardware import described_hardware
from parallel3d.train.progress import in_words
from parallel3d.verify.local_ranks import run_locally

TOKENS_PER_PARAMETER = 20
"""Training tokens for each parameter in a compute-optimal run (arXiv:2203.15556, table A9)."""
_RATE_FACTOR = 0.4
"""The best rate over that of OLMo's law, at a thousandth of its size (configs/ladders/cpu.json)."""
_HEAD = 32  # width of an attention head
_LAYER = 32  # width of the model for each of its layers
_FEWEST_STEPS = 50
_EVALUATIONS = 5
_QUICK = Effort(0.01, 0.02, 1024, 1_000_000, 2**24, 2, 8)  # below 20 s on two idle cores


@dataclass(frozen=True)
class Wishes:
    """The wishes of the user: at least one of them, and at most two."""

    minutes: float | None = None
    params: float | None = None
    tokens: float | None = None


@dataclass(frozen=True)
class Candidate:
    """A model with its training: what the rules say for its size."""

    config: CompleteConfig
    plan: Plan
    counts: PartCounts
    tokens: float


class Chooser:
    """Chooses a run by a base config, wishes and machine."""

    def __init__(self, base: RunConfig, wishes: Wishes, machine: Hardware) -> None:
        self.base = base
        self.wishes = wishes
        self.machine = machine
        self.devices = torch.accelerator.device_count()
        if machine.cores is not None:
            self.devices = devices_of(base, machine)
        self.candidate = cache(self._plan)

    def _plan(self, heads: int) -> Candidate:
        """Return the run of a model with this number of heads. Raises ConfigError if none fits."""
        raw = self.base.to_dict()
        block = raw["parallel3d"]
        seq = self.base.data.sequence_length
        model = {name: value for name, value in block["model"].items() if name not in SHAPE}
        width = heads * _HEAD
        layers = max(2, round(width / _LAYER))
        block["model"] = model | dict(zip(SHAPE, (layers, width, heads), strict=False))
        counts = count(with_vocabulary(RunConfig.from_dict(raw)).model)
        tokens = self.wishes.tokens or TOKENS_PER_PARAMETER * counts.with_head
        samples = LAWS["step-law"].batch_tokens(counts.transformer, tokens) / seq
        batch = max(1, round(samples / self.devices)) * self.devices
        rate = _RATE_FACTOR * LAWS["olmo"].learning_rate(counts.with_head, tokens)
        steps = max(1, round(tokens / batch / seq))
        if self.base.precision == "fp32" and self.machine.cores is None:
            raw["bf16"]["enabled"] = "bf16" in self.machine.peak_flops
        raw |= {
            "train_batch_size": batch,
            "train_micro_batch_size_per_gpu": None,
            "gradient_accumulation_steps": None,
        }
        raw["optimizer"]["params"]["lr"] = float(f"{rate:.3g}")
        block |= {"mesh": "plan", "plan": {}}
        block["train"] |= {"steps": steps, "max_tokens": None, "epochs": None}
        config, plan = choose(RunConfig.from_dict(raw), self.devices, self.machine)
        complete = with_vocabulary(config).resolve(self.devices).completed()
        return Candidate(complete, plan, counts, tokens)

    def choose(self, slowness: float = 1.0) -> Candidate:
        """Return the largest candidate for the wished time, or up to the wished size.

        - `slowness`: measured over planned seconds of a step.
        """
        minutes = self.wishes.minutes
        params = self.wishes.params
        tokens = self.wishes.tokens
        if params is None and minutes is not None:
            return self._largest(
                lambda one: slowness * one.tokens > 60 * minutes * one.plan.tokens_per_second
            )
        largest = params or (tokens or 0) / TOKENS_PER_PARAMETER
        return self._largest(lambda one: one.counts.with_head > largest)

    def _largest(self, is_above: Callable[[Candidate], bool]) -> Candidate:
        """Return the largest candidate that is not above; the smallest if all are."""
        high = 1
        while high < 256 and not is_above(self.candidate(high)):
            high *= 2
        between = range(high // 2 + 1, high)
        below = bisect_left(between, True, key=lambda heads: is_above(self.candidate(heads)))
        return self.candidate(max(1, high // 2 + below))


def dial(base: RunConfig, wishes: Wishes, say: Say) -> tuple[Path, int]:
    """Choose a run, write its config, and return the config's path and the number of ranks.

    - `base`: data, optimizer and folders, which stay. `say` prints the choice and its reasons.

    Raises ConfigError if the data cannot be used, or the wishes cannot be met.
    """
    corpus = prepare(base.data)
    chooser = Chooser(base, wishes, machine_of(base, say))
    chosen = chooser.choose()
    step_seconds, start_seconds = pace(chosen.config)
    if wishes.minutes is not None and wishes.params is None:
        nearer = chooser.choose(step_seconds / chosen.plan.time.seconds)
        if nearer.counts != chosen.counts:
            chosen = nearer
            step_seconds, start_seconds = pace(chosen.config)
    steps = chosen.config.num_steps
    if wishes.minutes is not None:
        possible = steps_in(
            60 * wishes.minutes - age() - start_seconds, chosen.config, step_seconds
        )
        if possible < _FEWEST_STEPS:
            least = math.ceil(wishes.minutes + (_FEWEST_STEPS - possible) * step_seconds / 60)
            raise ConfigError(
                f"--minutes = {wishes.minutes:g}: leaves time for {max(0, possible)} steps of "
                f"{step_seconds:.2g} s on this machine, and learning takes {_FEWEST_STEPS}; "
                f"use --minutes {least}{', or a smaller --params' if wishes.params else ''}"
            )
        steps = min(possible, steps) if wishes.tokens else possible
    path, config = write(chosen.config, wishes, steps, chosen.counts.with_head)
    model = config.model
    tokens = steps * config.tokens_per_step
    params = chosen.counts.with_head
    repeats = tokens / len(corpus.train)
    more = ""
    if repeats > 4:
        more = "; use more text, after 4 it tells little new (arXiv:2305.16264)"
    lines = {
        "machine": f"{chooser.devices} x {chooser.machine.name}",
        "model": f"{model.family} with {model.num_hidden_layers} layers of {model.hidden_size}: "
        f"{in_short(params)} parameters in its blocks and head",
        "tokens": f"{in_short(tokens)}, {tokens / params:.3g} for each parameter "
        f"({TOKENS_PER_PARAMETER} are compute-optimal, arXiv:2203.15556)",
        "data": f"{in_short(len(corpus.train))} tokens, seen {repeats:.2g} times{more}",
        "batch": f"{config.global_batch_size} x {config.data.sequence_length} tokens, by the "
        f"{LAWS['step-law'].source}",
        "rate": f"{config.optimizer.params.lr:g}, {_RATE_FACTOR} x {LAWS['olmo'].source}; then a "
        "cosine",
        "mesh": f"{config.mesh.sizes.label}, ZeRO-{config.zero_optimization.stage}, "
        f"{config.precision}, by the planner",
        "pace": f"{step_seconds:.3g} s a step, measured ({chosen.plan.time.seconds:.3g} planned); "
        f"{steps:,} steps take {in_words(steps * step_seconds)}",
        "config": str(path),
    }
    for name, text in lines.items():
        say(f"{name:<9}{text}")
    return path, config.mesh.sizes.ranks


def steps_in(seconds: float, config: CompleteConfig, step_seconds: float) -> int:
    """Return the training steps that fit into the seconds, beside evaluations."""
    samples = config.train.evaluate_samples * _EVALUATIONS
    evaluations = step_seconds * samples / config.global_batch_size / 3  # forwards alone
    return int((seconds - evaluations) / step_seconds)


def age() -> float:
    """Return the seconds since this process was started."""
    return time.time() - float(psutil.Process().create_time())


def machine_of(config: RunConfig, say: Say) -> Hardware:
    """Return this machine as hardware: described, or calibrated before, or measured now."""
    if known := described_hardware(config, pick_device(Launch.from_environment())):
        return known
    say("measuring this machine, for some 20 s (`parallel3d plan --calibrate`: better, and kept)")
    with TemporaryDirectory() as folder:
        return calibrate(lambda _: None, Path(folder) / "machine.json", _QUICK)


def pace(config: CompleteConfig) -> tuple[float, float]:
    """Return the seconds of a training step of a config, and those of the ranks' start."""
    began = time.time()
    timed = run_locally(time_steps, config.mesh.sizes.ranks, [config.to_dict()], 4, timeout=600)
    seconds = [step.seconds for step in timed[0][0]]
    return median(seconds), time.time() - began - sum(seconds)


def write(
    config: CompleteConfig, wishes: Wishes, steps: int, params: int
) -> tuple[Path, CompleteConfig]:
    """Write the config of a new run beside the run's folder; return its path, and the config."""
    raw: dict[str, Any] = config.to_public_dict()
    block = raw["parallel3d"]
    directory = Path(config.run.directory)
    name = config.run.name
    if name == "auto":
        name = f"{wishes.minutes:g}-minutes" if wishes.minutes else f"{in_short(params)}-parameters"
    names = (name, *(f"{name}-{number}" for number in range(2, 10_000)))
    taken = {path.name.removesuffix(".json") for path in directory.glob("*")}
    own = next(unused for unused in names if unused not in taken)
    warmup = max(1, round(params / config.tokens_per_step))
    every = max(1, steps // _EVALUATIONS)
    block["run"]["name"] = own
    block["train"] |= {
        "steps": steps,
        "evaluate_every": every,
        "lr_schedule": {"type": "cosine", "warmup_steps": min(warmup, steps // 4 or 1)},
    }
    block["checkpoint"]["every"] = every
    path = directory / f"{own}.json"
    directory.mkdir(parents=True, exist_ok=True)
    replace_text(path, f"{json.dumps(raw, indent=1)}\n")
    return path, RunConfig.from_json(str(path)).completed()
