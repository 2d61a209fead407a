"""The contents of state.json, and whether a run can resume from another's."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from parallel3d.base.errors import CheckpointError
from parallel3d.base.masking import mask
from parallel3d.base.reader import JsonObject, value_at
from parallel3d.base.say import Say
from parallel3d.base.section import ABSENT
from parallel3d.checkpoint.manifest import TOKENIZER
from parallel3d.checkpoint.safe_files import tokenizer_digest
from parallel3d.config import CompleteConfig
from parallel3d.config.learning_rate import rate
from parallel3d.data.corpus import Corpus
from parallel3d.data.split import SPLIT_FORMAT
from parallel3d.model import optimizers

_LOSES_ITS_PLACE = "so the run would lose its place in the data"
# Settings, the meaning of their value (ABSENT in configs of earlier versions), and why a run cannot
# resume with another.
_MUST_NOT_CHANGE: tuple[tuple[str, Callable[[Any], object], str], ...] = (
    ("parallel3d.train.seed", int, _LOSES_ITS_PLACE),
    ("parallel3d.data.sequence_length", int, _LOSES_ITS_PLACE),
    ("parallel3d.data.packing", lambda p: "none" if p is ABSENT else p, _LOSES_ITS_PLACE),
    ("optimizer.type", optimizers.file_of, "which cannot continue from the other's state"),
    (
        "parallel3d.model.parametrization",
        lambda own: own if isinstance(own, dict) and own["type"] != "standard" else "standard",
        "with which the weights are another model",
    ),
)

# Another name alone is no new run where checkpoint.resume names a checkpoint.
ANEW = 'start a new run with another run.name and checkpoint.resume "none"'


@dataclass(frozen=True)
class Position:
    """The progress of a run: steps done, tokens trained on, and the next sample's global index.

    The index is the loader's complete state, because the order of samples is a function of it.
    """

    step: int = 0
    tokens: int = 0
    next_sample: int = 0

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "Position":
        """Return the position in a state.json."""
        return cls(int(state["step"]), int(state["tokens"]), int(state["next_sample"]))

    def after(self, config: CompleteConfig, padding: int = 0) -> "Position":
        """Return the position one step later; `padding` is not counted among its tokens."""
        size = config.batch_size_at(self.next_sample)
        tokens = self.tokens + size * config.data.sequence_length - padding
        return Position(self.step + 1, tokens, self.next_sample + size)


class RunState:
    """The state of one run, for `Saver.save` and for comparison with a checkpoint's."""

    def __init__(self, config: CompleteConfig, corpus: Corpus) -> None:
        self._config = config
        self._fixed: dict[str, Any] = {
            "config": config.to_public_dict(),
            "corpus": corpus.key,
            "split": SPLIT_FORMAT,
            "tokenizer": tokenizer_digest(corpus.tokenizer_directory),
            "versions": {name: version(name) for name in ("parallel3d", "torch", "deepspeed")},
            "mesh": _mesh(config),
        }

    def at(self, position: Position) -> JsonObject:
        """Return the run's state at a position, as `Saver.save` takes it."""
        done = position.step >= self._config.num_steps
        next_lr = None if done else rate(self._config, position.step, position.next_sample)
        return {
            **self._fixed,
            "step": position.step,
            "tokens": position.tokens,
            "next_sample": position.next_sample,
            "learning_rate": {"next": next_lr, "of_steps": self._config.num_steps},
            # Weights, dropout and the order of samples are functions of the seed and the position,
            # so there is no generator state to save.
            "random": {"seed": self._config.train.seed, "next_step": position.step},
        }

    def position_in(self, state: Mapping[str, Any], path: Path, say: Say) -> Position:
        """Return the position at which this run resumes from a checkpoint.

        - `state`: the checkpoint's state.json.
        - `path`: the checkpoint, for messages.
        - `say`: prints settings that have changed.

        Raises CheckpointError if samples would be lost or repeated, or tokens would have another
        meaning.
        """
        was = state["config"]
        now = self._fixed["config"]
        for setting, meaning, why in _MUST_NOT_CHANGE:
            old = meaning(value_at(was, setting))
            new = meaning(value_at(now, setting))
            if old != new:
                raise CheckpointError(
                    f"{path}: {setting} was {json.dumps(old)} and is now {json.dumps(new)}, {why}; "
                    f"set it back, or {ANEW}"
                )
        # Checked before the tokenizer, which differs if it was trained on another part. The name of
        # a corpus depends on what is held out, so under the same name both rules agree.
        same_corpus = state["corpus"] == self._fixed["corpus"]
        if state.get("split", 1) != SPLIT_FORMAT and not same_corpus:
            raise CheckpointError(
                f"{path} was written by a version that held out other documents (split "
                f"{state.get('split', 1)}, now {SPLIT_FORMAT}): text that it was trained on would "
                f"be held out now; use version {state['versions']['parallel3d']}, or {ANEW}"
            )
        is_other = state["tokenizer"] != self._fixed["tokenizer"]
        trains = all(value_at(c, "parallel3d.data.tokenizer") == "train" for c in (was, now))
        if is_other and trains:
            raise CheckpointError(
                f"{path} was trained with another tokenizer: it is trained on the corpus, and the "
                "corpus or data.vocab_size has changed since; add --data.tokenizer "
                f"{path.absolute() / TOKENIZER} to go on with the run's own, or {ANEW}"
            )
        if is_other:
            raise CheckpointError(
                f"{path} was trained with another tokenizer, whose tokens have other meanings; set "
                f"data.tokenizer back, or {ANEW}"
            )
        if not same_corpus:
            say(
                "the corpus has changed since the checkpoint: sample "
                f"{state['next_sample']:,} is now at another place, so some text may be repeated "
                "or skipped, and held-out text may include text that was trained on"
            )
        different = list(changes(was, now))
        if different:
            say("changed since the checkpoint: " + ", ".join(different))
        return Position.of(state)


# Settings of output, location of the text, stopping, resuming and gathering of weights, whose
# changes are not reported.
_NOT_REPORTED = {
    "parallel3d.run",
    "parallel3d.checkpoint.resume",
    "parallel3d.train.stop_after",
    "parallel3d.checkpoint.in_memory_folder",
    "parallel3d.data.paths",
    "parallel3d.data.cache",
    "parallel3d.pipeline.weights",
}


def changes(
    was: Mapping[str, object], now: Mapping[str, object], prefix: str = ""
) -> Iterator[str]:
    """Yield each setting that differs as "path old -> new"; settings in only one are ignored."""
    for name, new in now.items():
        if name not in was:
            continue
        path = f"{prefix}{name}"
        old = was[name]
        if path in _NOT_REPORTED or name == "nvme_path" or old == new:
            continue
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from changes(old, new, f"{path}.")
        else:
            shown = path.removeprefix("parallel3d.")
            yield mask(f"{shown} {json.dumps(old)} -> {json.dumps(new)}")


def _mesh(config: CompleteConfig) -> JsonObject:
    zero = config.zero_optimization
    pipeline = config.parallel3d.pipeline
    shards = config.mesh.dp_shards
    return {
        **config.mesh.sizes._asdict(),
        **({} if shards is None else {"dp_shards": shards}),
        "schedule": pipeline.schedule,
        "stages_per_rank": pipeline.stages_per_rank,
        "zero_stage": zero.stage,
        "offload_optimizer": zero.offload_optimizer.device,
        "offload_param": zero.offload_param.device,
    }
