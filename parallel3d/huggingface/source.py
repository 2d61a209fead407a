"""Read weights: of a checkpoint one by one, without a GPU, and any box of published ones.

No other bytes are read, and no file stays open.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain, product
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallel3d import models
from parallel3d.base.errors import CheckpointError, ConfigError
from parallel3d.base.reader import value_at
from parallel3d.checkpoint.chunks import (
    ArrayFile,
    Box,
    Chunk,
    boxes_of,
    empty,
    read_header,
    tile,
)
from parallel3d.checkpoint.describe import find_checkpoints
from parallel3d.checkpoint.manifest import (
    STATE,
    TOKENIZER,
    has_ema,
    read_sound_state,
    shapes_of,
)
from parallel3d.checkpoint.safe_files import is_count, tokenizer_digest
from parallel3d.config import RunConfig
from parallel3d.config.pretrained import pointer, weight_files
from parallel3d.data.sources import Progress, no_progress
from parallel3d.data.tokenizer import load_tokenizer
from parallel3d.huggingface.beside import beside_of, published_tokenizer
from parallel3d.huggingface.hashed import HashedChunks
from parallel3d.huggingface.weight_files import About, line_after, tokenizer_files
from parallel3d.model import optimizers
from parallel3d.model.config import ModelConfig
from parallel3d.model.spec import named_params, tied_names
from parallel3d.models.earlier import stored_in
from parallel3d.models.pretrained import Part

# Names of tensors that torch's wrappers of a model have.
_WRAPPER = re.compile(r"(?:module|_orig_mod|_fsdp_wrapped_module)\.")


class CheckpointSource:
    """The fp32 master weights in a checkpoint of any mesh, with its config and state.

    - `path`: a checkpoint, or a run's folder, whose newest checkpoint is taken (see
      `find_checkpoints`).
    - `is_ema`: read the averages of the weights in their place (`train.ema`).

    Files are hashed as they are read. After reading, call `check` to verify the hashes. Raises
    CheckpointError if the checkpoint is missing, damaged or incomplete.
    """

    def __init__(self, path: Path, is_ema: bool = False) -> None:
        folder = find_checkpoints(path)[0]
        self.folder = folder
        files, self.state = read_sound_state(folder)
        if is_ema and not has_ema(self.state):
            raise CheckpointError(
                f"{folder}: has no average of the weights; train with parallel3d.train.ema, or "
                "leave out --ema"
            )
        self._kind = optimizers.EMA if is_ema else optimizers.MASTER
        self.config = RunConfig.from_dict(self.state["config"], str(folder / STATE))
        specs = named_params(models.layers(self.config.model))
        self._shapes = {name: spec.shape for name, spec in specs.items()}
        model = value_at(self.state, "config.parallel3d.model")
        self._stored = stored_in(model, self._shapes)
        in_files = {tensor.name: tensor.shape for tensor in self._stored.values()}
        if in_files != shapes_of(self.state):
            raise CheckpointError(
                f"{folder / STATE}: the parameters do not match the config; use another checkpoint"
            )
        self._files = [
            HashedChunks(folder / name, entry) for name, entry in files.items() if name != STATE
        ]
        self._chunks: dict[str, list[tuple[HashedChunks, Chunk]]] = defaultdict(list)
        for file in self._files:
            for chunk in file.chunks:
                if chunk.kind == self._kind:
                    self._chunks[chunk.name].append((file, chunk))
        for name, shape in in_files.items():
            if not tile((chunk.box for _, chunk in self._chunks[name]), shape):
                raise CheckpointError(
                    f"{folder}: does not have each element of {name} once; use another checkpoint"
                )

    def read(self, name: str) -> Tensor:
        """Return a full parameter in fp32, by its name in parallel3d."""
        tensor = self._stored[name]
        value = empty(tensor.shape, torch.float32)
        for file, chunk in self._chunks[tensor.name]:
            file.read(chunk, chunk.box.part_of(value))
        shape = self._shapes[name]
        if shape == tensor.shape:
            return value
        own = empty(shape, torch.float32)
        for rows, *place in tensor.boxes((0,) * len(shape), shape):
            own[rows] = Box(*place).part_of(value).reshape(own[rows].shape)
        return own

    def check(self, progress: Progress = no_progress) -> None:
        """Verify the hash of each file; raise CheckpointError if one is damaged.

        Bytes that `read` has read in order are not read again.
        """
        for done, file in enumerate(self._files):
            progress("comparing hashes (files)", done, len(self._files))
            reason = file.check()
            if reason:
                raise CheckpointError(f"{file.path}: {reason}; use another checkpoint")

    def about(self, tokenizer: Path | None = None, architecture: str | None = None) -> About:
        """Return the facts that an export writes next to the weights.

        - `tokenizer`: folder of the tokenizer; None to search for it.
        - `architecture`: transformers class to use; None for that of `About`.

        Raises CheckpointError if the tokenizer is not found, or is not the checkpoint's.
        """
        data = self.config.data
        if data.tokenizer != "none":
            tokenizer = self._tokenizer(tokenizer)
        end = data.end_of_text_id
        if end is None and tokenizer is not None:
            end = load_tokenizer(tokenizer).eos_token_id
        beside = beside_of(self.config, tokenizer, end)
        line = line_after(self.folder.absolute().parent.parent, self.state["step"])
        averaged = ""
        ema = self.config.train.ema
        if ema is not None and self._kind == optimizers.EMA:
            line["held_out_loss"] = line.get("held_out_loss_ema")
            averaged = f"exponential moving average (decay {ema.decay:g}, every {ema.every:,})"
        return About(
            self.config,
            step=self.state["step"],
            tokens=self.state["tokens"],
            end_of_text=end,
            tokenizer=tokenizer or published_tokenizer(self.config),
            beside=beside,
            line=line,
            architecture=architecture,
            averaged=averaged,
        )

    def _tokenizer(self, named: Path | None) -> Path:
        """Return the folder of the checkpoint's tokenizer; `named` is the user's, if any."""
        folder = named or self.folder / TOKENIZER
        if not tokenizer_files(folder) or tokenizer_digest(folder) != self.state["tokenizer"]:
            raise CheckpointError(
                f"{self.folder}: needs the tokenizer that it was trained with, which is not in "
                f"{folder}; name its folder with --tokenizer"
            )
        return folder


DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class StoredTensor(NamedTuple):
    """A tensor in a safetensors file."""

    name: str
    path: Path
    at: int
    """Offset of the first byte in the file."""
    shape: tuple[int, ...]
    type: str
    """The type's name in safetensors: "F32", "BF16", ..."""

    def read(self, shape: tuple[int, ...], offsets: tuple[int, ...], out: Tensor) -> None:
        """Fill `out` with the box at `offsets`, with the tensor viewed as an array of `shape`."""
        with ArrayFile(self.path) as file:
            file.read_box(self.at, shape, offsets, out, DTYPES[self.type])

    def read_whole(self) -> Tensor:
        """Return the tensor in fp32."""
        out = empty(self.shape, torch.float32)
        self.read(self.shape, (0,) * len(self.shape), out)
        return out


def stored_tensors(path: Path) -> list[StoredTensor]:
    """Return the tensors in a safetensors file; raise CheckpointError for any other file."""
    tensors = []
    with ArrayFile(path) as file:
        try:
            entries, begin = read_header(file)
            for name, entry in entries.items():
                shape = entry["shape"]
                (first, end) = entry["data_offsets"]
                dtype = DTYPES.get(entry["dtype"])
                size = end - first
                counts = all(map(is_count, [first, size, *shape]))
                fits = dtype is None or size == dtype.itemsize * prod(shape)
                if not counts or not fits or end > file.size - begin:
                    raise ValueError(f"{name[:80]!r} of shape {shape} has bytes {first} to {end}")
                tensors.append(
                    StoredTensor(name, path, begin + first, tuple(shape), entry["dtype"])
                )
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path}: its header is not that of a safetensors file ({pointer(path) or error}); "
                "download or write it again"
            ) from None
    return tensors


class PublishedWeights:
    """The weights in a transformers folder, under parallel3d's parameter names.

    Tensor names in the files may lack the prefix of the base model ("wte.weight" for
    "transformer.wte.weight"). No file stays open.

    - `shapes`: parameter -> shape, in the order of the layers, without tied copies.
    - `stored`: full name in transformers -> tensor in the files.

    Raises ConfigError if a tensor is missing, unexpected, or of another shape or type, and
    CheckpointError if a file is damaged.
    """

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        self.folder = folder
        self._config = config
        family = models.huggingface(config.family)
        assert family is not None, "a family that can be imported has a huggingface.py"
        self._family: ModuleType = family
        layers = models.layers(config)
        self.shapes = {name: spec.shape for name, spec in named_params(layers).items()}
        self._packed: set[str] = set()  # parameters that files have as the modules do
        # Name of a tied weight in transformers -> name of its copy, which a file may contain too.
        self._tied = {}
        for copy, original in tied_names(layers).items():
            copy_parts = family.parts(config, copy, self.shapes[original])
            self._tied[self._parts(original)[0].name] = copy_parts[0].name
        in_files: dict[str, dict[str, Tensor]] = {}
        in_modules: dict[str, dict[str, Tensor]] = {}  # files may have these, too
        for name, shape in self.shapes.items():
            parameter = {name: torch.empty(shape, device="meta")}
            in_files[name] = models.to_files(config, parameter)
            in_modules[name] = family.to_huggingface(config, parameter)
        forms = (*in_files.values(), *in_modules.values())
        self._tensors = self._headers({*chain.from_iterable(forms), *self._tied.values()})
        expected: dict[str, Tensor] = {}
        for name, tensors in in_files.items():
            others = sorted(tensors.keys() - in_modules[name].keys())
            if tensors.keys() != in_modules[name].keys() <= self._tensors.keys():
                self._packed.add(name)
                self._refuse_twice(next(iter(in_modules[name])), *others)
            expected |= in_modules[name] if name in self._packed else tensors
        for name, value in expected.items():
            self._check(name, tuple(value.shape))
        self.stored = {name: self._tensors[name] for name in expected}

    @property
    def dtype(self) -> torch.dtype:
        """The type of all tensors; fp32 if they differ, since it represents each type exactly."""
        types = {stored.type for stored in self.stored.values()}
        return DTYPES[types.pop()] if len(types) == 1 else torch.float32

    def read(self, name: str, box: Box, out: Tensor) -> None:
        """Fill `out` with a box of a parameter. Raises CheckpointError.

        - `box`: in the coordinates of the full parameter.
        - `out`: [*box.shape], of any strides and on any device.
        """
        shape = self.shapes[name]
        for part in self._parts(name):
            depth = len(part.index)
            row = tuple(i - first for i, first in zip(part.index, box.offsets, strict=False))
            if all(0 <= i < size for i, size in zip(row, box.shape, strict=False)):
                inner = Box(box.offsets[depth:], box.shape[depth:])
                for stored, target in _blocks_of(part, shape[depth:], inner, out[row]):
                    self._read(part, shape[depth:], stored, target)

    def read_whole(self, name: str) -> Tensor:
        """Return a full parameter in fp32 on the host."""
        shape = self.shapes[name]
        out = empty(shape, torch.float32)
        self.read(name, Box((0,) * len(shape), shape), out)
        return out

    def check_tied(self) -> None:
        """Raise ConfigError if the copy of a tied weight differs from the original."""
        for original, copy in self._tied.items():
            if copy not in self._tensors:
                continue
            both = [self._tensors[name].read_whole() for name in (original, copy)]
            if not torch.equal(*both):
                raise ConfigError(
                    f"{self.folder}: {self._tensors[copy].name} differs from {original}, although "
                    "config.json says tie_word_embeddings = true; set it to false in a copy of the "
                    "folder"
                )

    def _read(self, part: Part, shape: Sequence[int], box: Box, out: Tensor) -> None:
        """Read a box of a part from its tensor in the file.

        - `shape`: that of the part in parallel3d; in the file its dims may be split and in another
          order.
        """
        sizes = [part.shape[dim] for dim in part.order]
        groups = list(_grouped(sizes, shape))
        spans = [
            boxes_of(group, first, first + size)
            for group, first, size in zip(groups, box.offsets, box.shape, strict=True)
        ]
        inverse = [part.order.index(dim) for dim in range(len(part.order))]
        for pieces in product(*spans):
            target = out
            for dim, (piece, start) in reversed(list(enumerate(pieces))):
                target = target.narrow(dim, start, piece.numel).unflatten(dim, piece.shape)
            offsets = list(chain.from_iterable(piece.offsets for piece, _ in pieces))
            stored_offsets = tuple(offsets[dim] for dim in inverse)
            values = target.permute(inverse)
            stored = self.stored[part.name]
            stored.read(part.shape, stored_offsets, values)
            _check_finite(stored, part.shape, stored_offsets, values)

    def _parts(self, name: str) -> tuple[Part, ...]:
        family: Any = self._family
        shape = self.shapes[name]
        if name in self._packed:
            return (family.packed(self._config, name, shape),)
        parts: tuple[Part, ...] = family.parts(self._config, name, shape)
        return parts

    def _headers(self, known: set[str]) -> dict[str, StoredTensor]:
        """Return full name -> tensor for all files; raise ConfigError for names not in `known`."""
        stored_by_name: dict[str, StoredTensor] = {}
        others = getattr(self._family, "OTHER_NAMES", {})
        prefix = self._family.PREFIX
        by_path = {path: stored_tensors(path) for path in weight_files(self.folder)}
        # A layer behind the last one that predicts further tokens: transformers leaves it out, too.
        further = f"{prefix}layers.{self._config.num_hidden_layers}."
        names = {stored.name for stored in chain.from_iterable(by_path.values())}
        predicts = f"{further}eh_proj.weight" in names
        for path, tensors in by_path.items():
            for stored in tensors:
                own = stored.name
                name = own if own in known else others.get(own, own)
                name = name if name in known else f"{prefix}{name}"
                if name not in known:
                    if self._family.BUFFERS.fullmatch(own.removeprefix(prefix)):
                        continue
                    if predicts and own.startswith(further):
                        continue
                    wrapper = _WRAPPER.match(own)
                    remedy = "use another model"
                    if wrapper:
                        remedy = f"save the model inside the wrapper that writes {wrapper[0]!r}"
                    raise ConfigError(
                        f"{self.folder}: has the tensor {own}, which the model of config.json does "
                        f"not have; {remedy}"
                    )
                first = stored_by_name.get(name)
                if first:
                    raise ConfigError(
                        f"{path}: {own} is also in {first.path.name}, as {first.name}; remove one "
                        "in a copy of the folder"
                    )
                stored_by_name[name] = stored
        return stored_by_name

    def _refuse_twice(self, first: str, *others: str) -> None:
        """Raise ConfigError if files have a parameter in both of its forms."""
        for name in others:
            if name in self._tensors:
                stored = self._tensors[name]
                raise ConfigError(
                    f"{stored.path}: {name} is also in {self._tensors[first].path.name}, as "
                    f"{first}; remove one in a copy of the folder"
                )

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise ConfigError if a tensor is missing or has another shape or an unknown type."""
        stored = self._tensors.get(name)
        if stored is None:
            raise ConfigError(
                f"{self.folder}: the tensor {name} is missing; download the folder again, or use a "
                "causal language model with its head"
            )
        if stored.shape != shape:
            raise ConfigError(
                f"{self.folder}: {name} has the shape {list(stored.shape)}, but config.json says "
                f"{list(shape)}; download the folder again"
            )
        if stored.type not in DTYPES:
            raise ConfigError(
                f"{self.folder}: {name} has the type {stored.type}; supported types are "
                f"{', '.join(DTYPES)}; use a model that is not quantised"
            )


def _check_finite(
    stored: StoredTensor, shape: Sequence[int], offsets: Sequence[int], values: Tensor
) -> None:
    """Raise CheckpointError if a part of a stored tensor has a value that is not finite.

    - `shape`: the tensor's, whose dims may be split.
    - `offsets`: first index of the part in each dim of `shape`.
    - `values`: the part.
    """
    wrong = values.isfinite().logical_not_()
    if not wrong.any():
        return
    first = wrong.nonzero()[0].tolist()
    number = 0
    for size, start, i in zip(shape, offsets, first, strict=True):
        number = number * size + start + i
    index = [int(i) for i in torch.unravel_index(torch.tensor(number), stored.shape)]
    raise CheckpointError(
        f"{stored.path}: the tensor {stored.name} has values that are not finite: "
        f"{values[tuple(first)].item()} at {index}, {int(wrong.sum()):,} of {wrong.numel():,} read "
        "here; use a copy of the model without them"
    )


def _blocks_of(
    part: Part, shape: Sequence[int], box: Box, out: Tensor
) -> Iterator[tuple[Box, Tensor]]:
    """Yield the boxes of a part's tensor that have our rows, and where in `out` they go."""
    if not part.blocks:
        yield box, out
        return
    rows = shape[0] // len(part.blocks)
    first = box.offsets[0]
    end = first + box.shape[0]
    while first < end:
        block, inside = divmod(first, rows)
        count = min(rows - inside, end - first)
        offsets = (part.blocks[block] * rows + inside, *box.offsets[1:])
        target = out.narrow(0, first - box.offsets[0], count)
        yield Box(offsets, (count, *box.shape[1:])), target
        first += count


def _grouped(sizes: Sequence[int], shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Split `sizes` into consecutive groups whose products are the sizes in `shape`."""
    at = 0
    for size in shape:
        end = at + 1
        while prod(sizes[at:end]) < size:
            end += 1
        yield tuple(sizes[at:end])
        at = end
    assert at == len(sizes), (sizes, shape)
