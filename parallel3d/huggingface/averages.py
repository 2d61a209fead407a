"""The average of several checkpoints of a run, as a source of an export."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path

import torch
from torch import Tensor

from parallel3d.base.errors import CheckpointError, ConfigError
from parallel3d.checkpoint.describe import find_checkpoints
from parallel3d.data.sources import Progress, no_progress
from parallel3d.huggingface.source import CheckpointSource
from parallel3d.huggingface.weight_files import About


class AveragedCheckpoints(CheckpointSource):
    """The weighted mean of the master weights in checkpoints of one run.

    - `folders`: the checkpoints; the config, step and tokenizer are those of the last one.
    - `weights`: a positive number for each of them; they need not add up to 1.

    Memory holds one parameter in fp64 and in fp32 at a time. Raises CheckpointError if the
    checkpoints are of different models, and the errors of `CheckpointSource`.
    """

    def __init__(self, folders: Sequence[Path], weights: Sequence[float]) -> None:
        super().__init__(folders[-1])
        self._others = [CheckpointSource(folder) for folder in folders[:-1]]
        self._weights = weights
        for other in self._others:
            same_model = other.config.model == self.config.model
            if not same_model or other.state["tokenizer"] != self.state["tokenizer"]:
                raise CheckpointError(
                    f"{other.folder}: has another model or tokenizer than {self.folder}; average "
                    "checkpoints of one model"
                )

    def read(self, name: str) -> Tensor:
        """Return the mean of a full parameter, rounded to fp32 once."""
        *others, last = self._weights
        mean = super().read(name).double().mul_(last)
        for source, weight in zip(self._others, others, strict=True):
            mean.add_(source.read(name), alpha=weight)
        return mean.div_(sum(self._weights)).to(torch.float32)

    def check(self, progress: Progress = no_progress) -> None:
        """Verify the hash of each file of all checkpoints; raise CheckpointError otherwise."""
        super().check(progress)
        for source in self._others:
            source.check(progress)

    def about(self, tokenizer: Path | None = None, architecture: str | None = None) -> About:
        """Return the facts of the last checkpoint, and those of the average.

        Its losses are not known.
        """
        about = super().about(tokenizer, architecture)
        steps = [source.state["step"] for source in (*self._others, self)]
        parts = [f"{s:,} ({w:g})" for s, w in zip(steps, self._weights, strict=True)]
        text = f"mean of the weights after steps (with their shares) {', '.join(parts)}"
        return replace(about, averaged=text, line={})


def choose(run: Path, last: int | None, steps: Sequence[int]) -> list[Path]:
    """Return the checkpoints of a run to average, the oldest first.

    - `last`: the number of newest ones; None takes those of `steps`.

    Raises CheckpointError if one is missing.
    """
    found = {int(path.absolute().name[len("step-") :]): path for path in find_checkpoints(run)}
    there = ", ".join(map(str, sorted(found)))
    if last is not None and last > len(found):
        raise CheckpointError(
            f"--last = {last}: {run} has {len(found)} checkpoints (of steps {there}); use "
            f"--last {len(found)}, and keep more with checkpoint.keep or checkpoint.at"
        )
    missing = [step for step in steps if step not in found]
    if missing:
        raise CheckpointError(
            f"--steps: {run} has no checkpoint of step {missing[0]}; use those of {there}"
        )
    chosen = sorted(found)[-last:] if last is not None else steps
    return [found[step] for step in chosen]


def weights_for(folders: Sequence[Path], given: Sequence[float] | None) -> Sequence[float]:
    """Return the weight of each checkpoint; raise ConfigError if the given ones do not fit."""
    weights = given or [1.0] * len(folders)
    if len(weights) != len(folders) or not all(0 < weight < inf for weight in weights):
        shown = " ".join(f"{weight:g}" for weight in weights)
        raise ConfigError(
            f"--weights = {shown}: must be a number above 0 for each of the {len(folders)} "
            "checkpoints; write as many, the oldest first"
        )
    return weights
