"""Make our checkpoint of another program's: opened, compared with the config, written, read back.

One process holds a parameter at a time. The folder gets its name, step-N, when everything is on the
disk and was compared with the source.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from math import isclose, prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from xxhash import xxh3_128_hexdigest

from parallel3d import models
from parallel3d.base.errors import CheckpointError, ConfigError, TrainingError
from parallel3d.checkpoint import disk, free_space
from parallel3d.checkpoint.chunks import Box, Chunk, ChunkFile, empty, header, memory_of
from parallel3d.checkpoint.manifest import FORMAT, TOKENIZER, TOKENIZER_FILES, state_bytes
from parallel3d.checkpoint.state import Position, RunState
from parallel3d.config import CompleteConfig, RunConfig
from parallel3d.config.learning_rate import rate
from parallel3d.config.pretrained import derive_model_block, model_of, read_config
from parallel3d.data.batches import check_length, tokens_of_epoch
from parallel3d.data.corpus import Corpus
from parallel3d.data.prepare import pack, prepare
from parallel3d.data.sources import Progress, no_progress
from parallel3d.extras.foreign.checkpoints import dcp, deepspeed_folder, trainer_folder
from parallel3d.extras.foreign.checkpoints.names import Names
from parallel3d.extras.foreign.checkpoints.parameters import Parameters
from parallel3d.extras.foreign.checkpoints.source import Source
from parallel3d.extras.foreign.checkpoints.tensors import FROM_WEIGHTS, KINDS
from parallel3d.model import optimizers
from parallel3d.model.parametrization import parametrization_of
from parallel3d.models.pretrained import free_settings

_SHARD = "shard-00000-of-00001.safetensors"
_DERIVED = ("head_dim", "intermediate_size", "num_key_value_heads")


@dataclass(frozen=True)
class Asked:
    """The facts that the user states beside the source and the config."""

    step: int | None = None
    samples: int | None = None
    accept_changes: bool = False
    """Go on with the config's settings where the source was trained with others."""


@dataclass(frozen=True)
class Result:
    """A checkpoint that was made."""

    folder: Path
    program: str
    position: Position
    num_parameters: int
    num_bytes: int
    taken: list[str]
    """Lines about what the source says."""
    differs: list[str]
    """Lines about settings in which the config differs, if that was accepted."""


def open_source(path: Path, names: Names) -> Source:
    """Return the run at a path; raises CheckpointError if no program's checkpoint is there."""
    if not path.exists():
        raise CheckpointError(f"{path}: does not exist; name the folder of a checkpoint")
    try:
        return _opened(path, names)
    # A file of another layout lacks keys, or has other types.
    except (KeyError, IndexError, AttributeError, TypeError, AssertionError) as error:
        raise CheckpointError(
            f"{path}: has files of an unknown layout ({type(error).__name__}: {error}); save it "
            f"with a current version of its program, or {FROM_WEIGHTS}"
        ) from None


def _opened(path: Path, names: Names) -> Source:
    folder = deepspeed_folder.find_folder(path)
    if folder is not None:
        return deepspeed_folder.open_deepspeed(folder)
    # The Trainer with FSDP has its weights and moments in a distributed checkpoint.
    folders = dcp.find_folders(path)
    if folders:
        return dcp.open_dcp(folders, names.order)
    if (path / trainer_folder.STATE).is_file():
        return trainer_folder.open_trainer(path, names.order)
    raise CheckpointError(
        f"{path}: has no checkpoint of DeepSpeed (latest, or mp_rank_*_model_states.pt), of torch "
        "(.metadata) or of transformers' Trainer (trainer_state.json); name the folder that has one"
    )


def convert(
    path: Path, to: Path, config: RunConfig, asked: Asked, progress: Progress = no_progress
) -> Result:
    """Make a checkpoint in a new run's folder of the checkpoint at a path.

    - `to`: the run's folder, such as runs/NAME.
    - `config`: the config with which the run goes on.

    Raises CheckpointError or ConfigError if something is missing or contradicts, and leaves nothing
    at `to`; TrainingError if the disk is full or does not return what was written.
    """
    _check_new(to)
    _check_optimizer(config)
    _check_architecture(path, config)
    names = Names(config.model)
    source = open_source(path, names)
    corpus = pack(prepare(config.data, progress), config.data, progress)
    whole = _complete(config, source, corpus)
    position = _position(source, whole, asked)
    layers = models.layers(whole.model)
    state = Parameters(source, whole, names, layers)
    changes = [*_changes(source, whole, position, state)]
    if changes and not asked.accept_changes:
        raise ConfigError(
            f"{source.folder} was trained with other settings: {'; '.join(changes)}. Write those "
            "of the source, or add --accept-changes to go on with the config's"
        )
    state.check_tied()
    folder = to / "checkpoints" / f"step-{position.step}"
    num_bytes = 4 * len(KINDS) * sum(prod(spec.shape) for spec in state.specs.values())
    missing = free_space.missing_disk_bytes(to, num_bytes)
    if missing:
        raise TrainingError(f"{to}: the disk lacks {missing:,} bytes; free some space")
    run_state = RunState(whole, corpus).at(position) | {
        "format": FORMAT,
        "parameters": {name: {"shape": list(s.shape)} for name, s in state.specs.items()},
        "optimizer_steps": _optimizer_steps(source, position),
        "loss_scale": source.loss_scale if whole.precision == "fp16" else None,
    }
    _write(folder, run_state, state, corpus, progress)
    return Result(
        folder=folder,
        program=source.program,
        position=position,
        num_parameters=len(state.specs),
        num_bytes=num_bytes,
        taken=_taken(source, position),
        differs=changes,
    )


def _check_new(to: Path) -> None:
    """Raise ConfigError if a run's folder has anything but what a killed conversion leaves."""
    if not to.exists():
        return
    left = [path for path in to.iterdir() if path.name != "checkpoints"] if to.is_dir() else [to]
    checkpoints = to / "checkpoints"
    if checkpoints.is_dir():
        left += [path for path in checkpoints.iterdir() if path.suffix != ".tmp"]
    if left:
        raise ConfigError(f"--to = {to}: exists ({left[0].name}); remove it, or name another run")


def _check_optimizer(config: RunConfig) -> None:
    if config.optimizer.type not in optimizers.ADAMW:
        raise ConfigError(
            f'optimizer.type = "{config.optimizer.type}": a checkpoint of another program has '
            'AdamW\'s moments; use "AdamW"'
        )
    kind = parametrization_of(config.model).type
    if kind != "standard":
        raise ConfigError(
            f'parallel3d.model.parametrization.type = "{kind}": the weights of another program '
            'have none; use "standard"'
        )


def _check_architecture(path: Path, config: RunConfig) -> None:
    """Raise ConfigError if a config.json beside the checkpoint has another model than the config.

    Weights do not show how a model computes: the eps of its norms, its rotations, its windows.
    """
    if not (path / "config.json").is_file():
        return
    family = config.model.family
    block = derive_model_block(path, read_config(path), family)
    theirs = model_of(path, block).model_dump()
    for name, own in config.model.model_dump().items():
        is_open = name in (*free_settings(family), "from_pretrained", "parametrization")
        # Sizes that are left out follow from others, and shapes show them; so does the tokenizer's.
        said = theirs[name]
        if is_open or own == said or own == "auto" or (own is None and name in _DERIVED):
            continue
        if name == "config" and _agree(json.loads(str(own)), json.loads(str(said))):
            continue
        raise ConfigError(
            f"parallel3d.model.{name} = {own!r}: {path / 'config.json'} says {said!r}; set it to "
            "that"
        )


def _agree(own: Mapping[str, Any], said: Mapping[str, Any]) -> bool:
    """Return True if two configs of transformers have the same values where both have one."""
    return all(own[name] == said[name] for name in own.keys() & said.keys())


def _complete(config: RunConfig, source: Source, corpus: Corpus) -> CompleteConfig:
    """Return the config with its corpus, for the batch of the source if it sets none itself."""
    if config.is_planned:
        raise ConfigError(
            'parallel3d.mesh = "plan": is chosen when training starts; set it for the conversion: '
            '--parallel3d.mesh \'{"pp": 1, "dp": 1, "tp": 1}\' (the checkpoint has no mesh)'
        )
    batch = None
    if config.train_batch_size is None and config.mesh.dp == "auto":
        batch = source.batch
        if batch is None:
            raise ConfigError(
                "train_batch_size: the source does not say it, and the config leaves it to the "
                "number of ranks; set it"
            )
    resolved = config.resolve(config.mesh.sizes.ranks, batch)
    check_length(corpus, config.data.sequence_length, resolved.largest_batch)
    num_tokens = tokens_of_epoch(corpus.train, config.data.sequence_length)
    return resolved.with_corpus(corpus.vocab_size, num_tokens)


def _position(source: Source, config: CompleteConfig, asked: Asked) -> Position:
    """Return the position of the source; raises ConfigError unless it is known exactly once."""
    step = source.step
    if step is None:
        step = source.optimizer_steps
    known = {"--step": (step, asked.step), "--samples-seen": (source.samples, asked.samples)}
    problems = []
    for option, (said, stated) in known.items():
        if said is None and stated is None:
            problems.append(f"{source.folder}: does not say it; add {option} N")
        elif said is not None and stated not in (None, said):
            problems.append(f"{option} = {stated}: {source.folder} says {said}; leave it out")
        elif stated is not None and stated < 0:
            problems.append(f"{option} = {stated}: must be 0 or more")
    if problems:
        meanings = "--step: steps done; --samples-seen: samples trained on, over all ranks"
        raise ConfigError(f"{'; '.join(problems)} ({meanings})")
    step = asked.step if step is None else step
    samples = asked.samples if source.samples is None else source.samples
    assert step is not None and samples is not None, known
    return Position(step, samples * config.data.sequence_length, samples)


def _optimizer_steps(source: Source, position: Position) -> int:
    return position.step if source.optimizer_steps is None else source.optimizer_steps


def _taken(source: Source, position: Position) -> list[str]:
    """Return lines about what the source says, and what the user has said."""
    says = source.step is not None or source.optimizer_steps is not None
    lines = [f"step {position.step:,}, {'as it says' if says else 'as --step says'}"]
    by = "as it says" if source.samples is not None else "as --samples-seen says"
    lines.append(f"{position.next_sample:,} samples, {by}")
    lines.append(f"{_optimizer_steps(source, position):,} updates of the optimizer")
    for group in source.groups[:1]:
        if "lr" in group:
            lines.append(f"the next learning rate, {float(group['lr']):g}")
    return lines


def _rates(config: CompleteConfig, position: Position) -> list[float]:
    """Return the config's next learning rate, and those a step before and after it.

    Programs count a schedule's steps from 0 or from 1.
    """
    steps = (position.step, position.step - 1, position.step + 1)
    return [rate(config, max(0, step), position.next_sample) for step in steps]


def _changes(
    source: Source, config: CompleteConfig, position: Position, state: Parameters
) -> Iterator[str]:
    """Yield the settings of the optimizer in which the config differs from the source."""
    params: Any = config.optimizer.params
    for group in source.groups[:1]:
        said = group.get("lr")
        rates = _rates(config, position)
        if said is not None and not any(isclose(said, own, rel_tol=1e-6) for own in rates):
            yield (
                f"its next learning rate is {float(said):g}, the config's {rates[0]:g} at step "
                f"{position.step} of {config.num_steps} (optimizer.params.lr, "
                "parallel3d.train.lr_schedule, scheduler)"
            )
        betas = tuple(group.get("betas", params.betas))
        if not np.allclose(betas, params.betas, rtol=1e-9):
            yield f"optimizer.params.betas {list(betas)}, the config's {list(params.betas)}"
        eps = group.get("eps", params.eps)
        if not isclose(eps, params.eps, rel_tol=1e-9):
            yield f"optimizer.params.eps {eps:g}, the config's {params.eps:g}"
        decay = any(source.decays.values())
        if decay and group.get("decoupled_weight_decay") is False:
            yield "weight decay in the gradient (Adam), here decoupled (AdamW)"
    for name, said, own in state.other_decays(params.weight_decay):
        yield f"weight decay {said:g} of {name}, here {own:g} (optimizer.params.weight_decay)"
        return


def _write(
    folder: Path,
    run_state: Mapping[str, Any],
    state: Parameters,
    corpus: Corpus,
    progress: Progress,
) -> None:
    """Write a checkpoint, compare it with the source, and give it its name."""
    partial = folder.with_name(f"{folder.name}.tmp")
    chunks = []
    for name, spec in state.specs.items():
        box = Box((0,) * len(spec.shape), tuple(spec.shape))
        chunks += [Chunk(name, kind, box) for kind in KINDS]
    stamps: dict[Chunk, str] = {}
    problems: list[CheckpointError] = []

    def arrays() -> Iterator[np.ndarray]:
        for done, chunk in enumerate(chunks):
            progress("converting (tensors)", done, len(chunks))
            try:
                value = state.read(chunk.kind, chunk.name).contiguous()
            except CheckpointError as error:
                problems.append(error)
                raise
            stamps[chunk] = xxh3_128_hexdigest(memory_of(value))
            yield value.numpy()

    contents = dict(run_state)
    try:
        with disk.reporting(partial):
            disk.make_folder(partial)
            entry = disk.write_file(partial / _SHARD, chain([header(chunks)], arrays()))
        _read_back(partial / _SHARD, state, chunks, stamps, progress)
        with disk.reporting(partial):
            tokenizer = corpus.tokenizer_directory
            if tokenizer.is_dir() and any(tokenizer.iterdir()):
                copied = disk.copy_folder(tokenizer, partial / TOKENIZER)
                contents[TOKENIZER_FILES] = {name: e._asdict() for name, e in copied.items()}
            step = int(contents["step"])
            disk.publish(partial, folder, step, state_bytes(contents), {_SHARD: entry})
    except BaseException:
        with suppress(OSError):
            disk.remove_folder(partial)
            folder.parent.rmdir()
            folder.parent.parent.rmdir()
        # Reading the source failed, not writing to the disk.
        if problems:
            raise problems[0] from None
        raise


def _read_back(
    path: Path,
    state: Parameters,
    chunks: Sequence[Chunk],
    stamps: Mapping[Chunk, str],
    progress: Progress,
) -> None:
    """Raise TrainingError unless a file has what the source has, which is read again."""
    with ChunkFile(path) as file:
        for done, chunk in enumerate(chunks):
            progress("reading back (tensors)", done, len(chunks))
            stored = empty(chunk.box.shape, torch.float32)
            file.read(chunk, chunk.box, stored)
            again = state.read(chunk.kind, chunk.name).contiguous()
            read = xxh3_128_hexdigest(memory_of(stored))
            if not stamps[chunk] == read == xxh3_128_hexdigest(memory_of(again)):
                raise TrainingError(
                    f"{path}: {chunk.key} is not what the source has; check the disk, and that "
                    "nothing writes to the source"
                )
