"""Make our checkpoint of another program's: opened, compared with the config, written, read back.

One process holds a parameter at a time. The folder gets its name, step-N, when everything is on the
disk and was compared with the source.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from math import isclose, prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_128_hexdigest

from parallel3d import models
from parallel3d.base.errors import CheckpointError, ConfigError, TrainingError
from parallel3d.checkpoint import disk, free_space
from parallel3d.checkpoint.chunks import Box, Chunk, ChunkFile, empty, header, memory_of
from parallel3d.checkpoint.manifest import FORMAT, TOKENIZER, TOKENIZER_FILES, state_bytes
from parallel3d.checkpoint.state import Position, RunState
from parallel3d.config import CompleteConfig, RunConfig
from parallel3d.config.deepspeed import file_of
from parallel3d.config.learning_rate import rate
from parallel3d.config.pretrained import derive_model_block, read_config
from parallel3d.data.batches import check_length, tokens_of_epoch
from parallel3d.data.corpus import Corpus
from parallel3d.data.prepare import pack, prepare
from parallel3d.data.sources import Progress, no_progress
from parallel3d.extras.foreign.checkpoints import dcp, deepspeed_folder, trainer_folder
from parallel3d.extras.foreign.checkpoints.names import Derived, Names
from parallel3d.extras.foreign.checkpoints.source import Source
from parallel3d.extras.foreign.checkpoints.tensors import KINDS
from parallel3d.model.parametrization import parametrization_of
from parallel3d.model.spec import LayerSpec, ParamSpec, named_params, tied_names
from parallel3d.models.pretrained import Part, free_settings

_SHARD = "shard-00000-of-00001.safetensors"
_DERIVED = ("head_dim", "intermediate_size", "num_key_value_heads")
_WORDS = {"master": "weight", "exp_avg": "first moment", "exp_avg_sq": "second moment"}


@dataclass(frozen=True)
class Asked:
    """The facts that the user states beside the source and the config."""

    step: int | None = None
    samples: int | None = None
    accept_changes: bool = False
    """Go on with the config's settings where the source was trained with others."""


@dataclass
class Result:
    """A checkpoint that was made."""

    folder: Path
    program: str
    position: Position
    num_parameters: int
    num_bytes: int
    taken: list[str] = field(default_factory=list)
    """Lines about what the source says."""
    differs: list[str] = field(default_factory=list)
    """Lines about settings in which the config differs, if that was accepted."""


def open_source(path: Path, names: Names) -> Source:
    """Return the run at a path; raises CheckpointError if no program's checkpoint is there."""
    if not path.exists():
        raise CheckpointError(f"{path}: does not exist; name the folder of a checkpoint")
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
    state = _State(source, whole, names, layers)
    result = Result(Path(), source.program, position, len(state.specs), 0)
    result.taken = _taken(source, position)
    changes = [*_changes(source, whole, position, state)]
    if changes and not asked.accept_changes:
        raise ConfigError(
            f"{source.folder} was trained with other settings: {'; '.join(changes)}. Write those "
            "of the source, or add --accept-changes to go on with the config's"
        )
    result.differs = changes
    state.check_tied()
    result.folder = to / "checkpoints" / f"step-{position.step}"
    result.num_bytes = 4 * len(KINDS) * sum(prod(spec.shape) for spec in state.specs.values())
    missing = free_space.missing_disk_bytes(to, result.num_bytes)
    if missing:
        raise TrainingError(f"{to}: the disk lacks {missing:,} bytes; free some space")
    run_state = RunState(whole, corpus).at(position) | {
        "format": FORMAT,
        "parameters": {name: {"shape": list(s.shape)} for name, s in state.specs.items()},
        "optimizer_steps": _optimizer_steps(source, position),
        "loss_scale": source.loss_scale if whole.precision == "fp16" else None,
    }
    _write(result.folder, run_state, state, corpus, progress)
    return result


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
    if file_of(config.optimizer.type) != "adamw":
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
    theirs = models.config_class(family).model_validate(block).model_dump()
    for name, own in config.model.model_dump().items():
        is_open = name in (*free_settings(family), "from_pretrained", "parametrization")
        # Sizes that are left out follow from others, and shapes show them; so does the tokenizer's.
        said = theirs[name]
        if is_open or own == said or own == "auto" or (own is None and name in _DERIVED):
            continue
        if name == "config" and _agree(json.loads(own), json.loads(said)):
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
    source: Source, config: CompleteConfig, position: Position, state: "_State"
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


class _State:
    """The source's tensors under our names."""

    def __init__(
        self, source: Source, config: CompleteConfig, names: Names, layers: Sequence[LayerSpec]
    ) -> None:
        self._source = source
        self._config = config.model
        self._family: Any = models.huggingface(config.model.family)
        self._tied = tied_names(layers)
        self.specs: dict[str, ParamSpec] = dict(named_params(layers))
        self._found = {
            kind: names.resolve(tensors, source.folder) if tensors else {}
            for kind, tensors in source.tensors.items()
        }
        self._check()

    def _parts(self, kind: str, name: str, shape: tuple[int, ...]) -> Sequence[Any]:
        """Return the parts of a parameter among the source's tensors; [] if one is missing."""
        found = self._found[kind]
        family = self._family
        forms = [family.parts(self._config, name, shape)]
        if hasattr(family, "packed"):
            forms.append((family.packed(self._config, name, shape),))
        else:
            forms.append(_stacked(name, shape, forms[0]))
        for parts in forms:
            if all(part.name in found for part in parts):
                return list(parts)
        return []

    def _check(self) -> None:
        """Raise CheckpointError unless each parameter has its weight and moments, in fp32."""
        folder = self._source.folder
        used: dict[str, set[str]] = {kind: set() for kind in KINDS}
        for name, spec in self.specs.items():
            for kind in KINDS:
                parts = self._parts(kind, name, spec.shape)
                if not parts:
                    first = self._family.parts(self._config, name, spec.shape)[0].name
                    hint = ""
                    if name.startswith("head.output"):
                        hint = ", or set parallel3d.model.tie_word_embeddings = true if it is tied"
                    raise CheckpointError(
                        f"{folder}: has no {_WORDS[kind]} of {first}; use a checkpoint of the "
                        f"whole model with its optimizer{hint}"
                    )
                for part in parts:
                    derived = self._found[kind][part.name]
                    used[kind].add(part.name)
                    self._check_tensor(kind, part, derived)
        for copy, original in self._tied.items():
            for part in self._family.parts(self._config, copy, self.specs[original].shape):
                used["exp_avg"].add(part.name)
        rest = [name for name in self._found["exp_avg"] if name not in used["exp_avg"]]
        if rest:
            raise CheckpointError(
                f"{folder}: has moments of {rest[0]}, which the model of the config does not have; "
                "set parallel3d.model to that of the run"
            )

    def _check_tensor(self, kind: str, part: Any, derived: Derived) -> None:
        tensor = derived.tensor
        place = f"{tensor.place}: the {_WORDS[kind]} of {part.name}"
        if tensor.dtype != torch.float32:
            raise CheckpointError(
                f"{place} is stored in {str(tensor.dtype).removeprefix('torch.')}, which has lost "
                "bits that AdamW needs; keep it in fp32 (the weights' masters, too), or start from "
                "the weights alone: parallel3d.model.from_pretrained"
            )
        problem = tensor.problem()
        if problem:
            raise CheckpointError(f"{place} {problem}; copy the whole folder")
        if prod(derived.shape) != prod(part.shape):
            raise CheckpointError(
                f"{place} has the shape {list(derived.shape)}, and {list(part.shape)} in "
                "parallel3d.model; set the sizes of the run"
            )

    def read(self, kind: str, name: str) -> Tensor:
        """Return a parameter's weight or moment in fp32."""
        shape = self.specs[name].shape
        out = empty(shape, torch.float32)
        for part in self._parts(kind, name, shape):
            value = self._found[kind][part.name].read()
            target = out[part.index] if part.index else out
            sizes = value.reshape(part.shape).permute(part.order)
            target.copy_(sizes.reshape(target.shape))
        return out

    def other_decays(self, weight_decay: float) -> Iterator[tuple[str, float, float]]:
        """Yield parameters with another weight decay: name, the source's, the config's."""
        names = {id(tensor): own for own, tensor in self._source.tensors["exp_avg"].items()}
        for name, spec in self.specs.items():
            own = weight_decay if spec.weight_decay else 0.0
            for part in self._parts("exp_avg", name, spec.shape)[:1]:
                foreign = names[id(self._found["exp_avg"][part.name].tensor)]
                said = self._source.decays.get(foreign)
                if said is not None and not isclose(said, own, rel_tol=1e-9):
                    yield foreign, said, own

    def check_tied(self) -> None:
        """Raise CheckpointError if a weight is stored twice with different values."""
        masters = self._found["master"]
        for copy, original in self._tied.items():
            shape = self.specs[original].shape
            (first,) = self._family.parts(self._config, original, shape)
            (second,) = self._family.parts(self._config, copy, shape)
            if second.name in masters and second.name != first.name:
                both = masters[first.name].read(), masters[second.name].read()
                self._refuse_different(first.name, second.name, *both)
        for name, derived in masters.items():
            for other in derived.tensor.copies:
                here = f"{name} in {derived.tensor.place}"
                self._refuse_different(here, other.place, derived.tensor.read(), other.read())

    def _refuse_different(self, first: str, second: str, one: Tensor, other: Tensor) -> None:
        if not torch.equal(one, other):
            raise CheckpointError(
                f"{self._source.folder}: {first} and {second} are one tied weight, but differ by "
                f"up to {float((one - other).abs().max()):.2g}; set "
                "parallel3d.model.tie_word_embeddings = false if the run had two"
            )


def _stacked(name: str, shape: tuple[int, ...], parts: Sequence[Part]) -> Sequence[Part]:
    """Return the tensor of transformers' modules, which stack the matrices that files divide.

    - `parts`: the tensors in files.
    """
    own = parts[0].name.replace("block_sparse_moe.", "mlp.")
    if ".experts." not in own:
        return [replace(part, name=own) for part in parts[:1]] if len(parts) == 1 else parts
    matrix = "gate_up_proj" if "gate_up" in name else "down_proj"
    own = f"{own.partition('.experts.')[0]}.experts.{matrix}"
    return [Part(own, shape, tuple(range(len(shape))))]


def _write(
    folder: Path, run_state: Mapping[str, Any], state: _State, corpus: Corpus, progress: Progress
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
    state: _State,
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
