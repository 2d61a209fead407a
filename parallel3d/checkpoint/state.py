"""The contents of state.json, and whether a run can go on from those of another."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from parallel3d.base.errors import CheckpointError
from parallel3d.base.masking import mask
from parallel3d.checkpoint.safe_files import tokenizer_digest
from parallel3d.config import RunConfig
from parallel3d.config.learning_rate import rate
from parallel3d.data.corpus import Corpus
from parallel3d.data.split import SPLIT_FORMAT

_LENGTH = "parallel3d.data.sequence_length"


@dataclass(frozen=True)
class Position:
    """The progress of a run: steps done, tokens trained on, and the next sample's global index.

    The order of samples is a pure function of that index, so it is all that a loader's state is.
    """

    step: int = 0
    tokens: int = 0
    next_sample: int = 0

    def after(self, config: RunConfig) -> "Position":
        """The position one step later."""
        return Position(
            self.step + 1,
            self.tokens + config.tokens_per_step,
            self.next_sample + config.global_batch_size,
        )


class RunState:
    """A describer of one run's state; `at(position)` gives what `Saver.save` takes."""

    def __init__(self, config: RunConfig, corpus: Corpus) -> None:
        self._config = config
        self._fixed: dict[str, Any] = {
            "config": config.to_public_dict(),
            "corpus": corpus.key,
            "split": SPLIT_FORMAT,
            "tokenizer": tokenizer_digest(corpus.tokenizer_directory),
            "versions": {name: version(name) for name in ("parallel3d", "torch", "deepspeed")},
            "mesh": _mesh(config),
        }

    def at(self, position: Position) -> dict[str, Any]:
        """The state of the run at a position."""
        done = position.step >= self._config.num_steps
        next_lr = None if done else rate(self._config, position.step)
        return {
            **self._fixed,
            "step": position.step,
            "tokens": position.tokens,
            "next_sample": position.next_sample,
            "learning_rate": {"next": next_lr, "of_steps": self._config.num_steps},
            # Weights, dropout and the order of samples are pure functions of the seed and of
            # places in the run; no generator's state is carried from step to step.
            "random": {"seed": self._config.train.seed, "next_step": position.step},
        }

    def position_in(
        self, state: Mapping[str, Any], path: Path, say: Callable[[str], None]
    ) -> Position:
        """The position at which this run goes on from another run's checkpoint.

        Says what differs and may; raises CheckpointError if samples would be lost or seen twice, or
        tokens would mean other text.
        """
        theirs, ours = state["config"]["parallel3d"], self._config
        for what, there, here in (
            ("parallel3d.train.seed", theirs["train"]["seed"], ours.train.seed),
            (_LENGTH, theirs["data"]["sequence_length"], ours.data.sequence_length),
        ):
            if there != here:
                raise CheckpointError(
                    f"{path}: {what} was {there} and is {here}: the run would lose its place in "
                    f"the data; set it back to {there}, or start a new run with another run.name"
                )
        was, now = (
            (config["parallel3d"]["model"].get("parametrization") or {"type": "standard"})
            for config in (state["config"], self._fixed["config"])
        )
        if was != now and {was["type"], now["type"]} != {"standard"}:
            raise CheckpointError(
                f"{path}: parallel3d.model.parametrization was {json.dumps(was)} and is "
                f"{json.dumps(now)}: its weights would be another model; set it back, or start a "
                "new run with another run.name"
            )
        # First: a tokenizer trained on another training part differs for that reason. A corpus has
        # its name from what is held out of it, too: under the same name both rules agree.
        same_corpus = state["corpus"] == self._fixed["corpus"]
        if state.get("split", 1) != SPLIT_FORMAT and not same_corpus:
            raise CheckpointError(
                f"{path} is of a parallel3d that held out other documents (split "
                f"{state.get('split', 1)}, now {SPLIT_FORMAT}): it was trained on text that would "
                "be held out now; go on with the version that saved it, "
                f"{state['versions']['parallel3d']}, or start a new run with another run.name"
            )
        if state["tokenizer"] != self._fixed["tokenizer"]:
            raise CheckpointError(
                f"{path} was trained on another tokenizer: its tokens have other meanings; set "
                "data.tokenizer back, or start a new run with another run.name"
            )
        if not same_corpus:
            say(
                "the corpus has changed since the checkpoint: sample "
                f"{state['next_sample']:,} is not where it was, some text may come twice or not, "
                "and some that was trained on may be held out now"
            )
        if changes := list(_changes(state["config"], self._fixed["config"])):
            say("changed since the checkpoint: " + ", ".join(changes))
        return Position(*(int(state[k]) for k in ("step", "tokens", "next_sample")))


# Where a run is written and its text lies, how far it goes this time, and where it comes from.
_NOT_SAID = {
    *("parallel3d.run", "parallel3d.checkpoint.resume", "parallel3d.train.stop_after"),
    *("parallel3d.data.paths", "parallel3d.data.cache"),
}


def _changes(was: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Each setting that differs, as "path old -> new"; what only one of the two knows is new."""
    for name in (name for name in now if name in was):
        path = f"{prefix}{name}"
        there, here = was[name], now[name]
        if path in _NOT_SAID or name == "nvme_path" or there == here:
            continue
        if isinstance(there, Mapping) and isinstance(here, Mapping):
            yield from _changes(there, here, f"{path}.")
        else:
            shown = path.removeprefix("parallel3d.")
            yield mask(f"{shown} {json.dumps(there)} -> {json.dumps(here)}")


def _mesh(config: RunConfig) -> dict[str, Any]:
    zero = config.zero_optimization
    return {
        "pp": config.mesh.pp,
        "dp": config.mesh.dp,
        "tp": config.mesh.tp,
        "schedule": config.pipeline.schedule,
        "stages_per_rank": config.pipeline.stages_per_rank,
        "zero_stage": zero.stage,
        "offload_optimizer": zero.offload_optimizer.device,
        "offload_param": zero.offload_param.device,
    }
