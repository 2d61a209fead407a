"""A published model's weights by our names: any box of a parameter, from the bytes that hold it."""

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallel3d import models
from parallel3d.base.errors import CheckpointError, ConfigError
from parallel3d.checkpoint.arrays import ArrayFile, empty
from parallel3d.checkpoint.box import Box, boxes_of
from parallel3d.checkpoint.chunks import read_header
from parallel3d.checkpoint.safe_files import is_count
from parallel3d.config.pretrained import weight_files
from parallel3d.model.spec import named_params, tied_names
from parallel3d.models.pretrained import Part

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_COMPARED = 2**20  # elements of a tied weight's two copies that are compared at once


class StoredTensor(NamedTuple):
    """A tensor in a file."""

    name: str
    path: Path
    at: int  # the first byte
    shape: tuple[int, ...]
    type: str  # safetensors' name of it

    def read(self, shape: tuple[int, ...], offsets: tuple[int, ...], out: Tensor) -> None:
        """Fill `out` with the box at `offsets` of the tensor, seen as an array of this shape."""
        with ArrayFile(self.path) as file:
            file.read_box(self.at, shape, offsets, out, DTYPES[self.type])


def stored_tensors(path: Path) -> list[StoredTensor]:
    """Read the tensors of a safetensors file; raises CheckpointError for another file."""
    found = []
    with ArrayFile(path) as file:
        try:
            entries, begin = read_header(file)
            for name, entry in entries.items():
                shape, (first, end) = entry["shape"], entry["data_offsets"]
                counts = all(map(is_count, [first, end, *shape]))
                if not counts or not first <= end <= file.size - begin:
                    raise ValueError(f"{name[:80]!r} is not within its {file.size:,} bytes")
                dtype = DTYPES.get(entry["dtype"])
                if dtype and end - first != dtype.itemsize * prod(shape):
                    raise ValueError(f"{name[:80]!r} has {end - first:,} bytes for {shape}")
                kind = str(entry["dtype"])
                found.append(StoredTensor(name, path, begin + first, tuple(shape), kind))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path}: is no sound file of safetensors ({error}); download it again"
            ) from None
    return found


class PublishedWeights:
    """Published weights in a folder of transformers, for the model of its config.json.

    Names may lack the prefix that the model has inside its language model ("wte.weight" for
    "transformer.wte.weight"). No file stays open. Raises ConfigError for tensors that are missing,
    of another shape or type, or none of the model's, CheckpointError for damaged files.

    `shapes`: of our parameters, in the order of the layers, without tied copies. `stored`: the
    tensors in the files, by their full names in transformers.
    """

    def __init__(self, folder: Path, config: Any) -> None:
        self.folder, self._config = folder, config
        family = models.huggingface(config.family)
        assert family is not None, "a family that is imported has its names"
        self._family: ModuleType = family
        layers = models.layers(config)
        self.shapes = {name: spec.shape for name, spec in named_params(layers).items()}
        # Names in transformers of a tied weight, and of the copy that a file may hold besides.
        self._tied = {
            self._parts(original)[0].name: family.parts(config, copy, self.shapes[original])[0].name
            for copy, original in tied_names(layers).items()
        }
        wanted: dict[str, Tensor] = {}
        for name, shape in self.shapes.items():
            wanted |= family.to_huggingface(config, {name: torch.empty(shape, device="meta")})
        self._found = self._headers({*wanted, *self._tied.values()})
        for name, value in wanted.items():
            self._check(name, tuple(value.shape))
        self.stored = {name: self._found[name] for name in wanted}

    @property
    def dtype(self) -> torch.dtype:
        """The type of all tensors; fp32, which holds each exactly, where there are several."""
        types = {stored.type for stored in self.stored.values()}
        return DTYPES[types.pop()] if len(types) == 1 else torch.float32

    def read(self, name: str, box: Box, out: Tensor) -> None:
        """Fill `out` with a box of a parameter, given in the coordinates of the whole.

        out: [*box.shape], of any strides and on any device. Raises CheckpointError.
        """
        shape = self.shapes[name]
        for part in self._parts(name):
            if part.index is None:
                self._read(part, shape, box, out)
                continue
            row = part.index - box.offsets[0]
            if 0 <= row < box.shape[0]:
                self._read(part, shape[1:], Box(box.offsets[1:], box.shape[1:]), out[row])

    def whole(self, name: str) -> Tensor:
        """Read a parameter whole, in fp32 on the host."""
        shape = self.shapes[name]
        out = empty(shape, torch.float32)
        self.read(name, Box((0,) * len(shape), shape), out)
        return out

    def check_tied(self) -> None:
        """Raise ConfigError where a tied weight's copy in the folder is another tensor."""
        for original, copy in self._tied.items():
            if copy not in self._found:
                continue
            both = self._found[original], self._found[copy]
            height, *rest = both[0].shape
            rows = max(1, _COMPARED // prod(rest))
            for first in range(0, height, rows):
                parts = torch.empty(2, min(rows, height - first), *rest)
                for stored, part in zip(both, parts, strict=True):
                    stored.read(stored.shape, (first, *[0] * len(rest)), part)
                if not torch.equal(*parts):
                    raise ConfigError(
                        f"{self.folder}: {both[1].name} is not {original}, although config.json "
                        "says tie_word_embeddings = true; set it to false in a copy of the folder"
                    )

    def _read(self, part: Part, shape: Sequence[int], box: Box, out: Tensor) -> None:
        """Read a box of a part of this shape, which one tensor holds with its dims in an order."""
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
            offsets = [offset for piece, _ in pieces for offset in piece.offsets]
            theirs = tuple(offsets[dim] for dim in inverse)
            self.stored[part.name].read(part.shape, theirs, target.permute(inverse))

    def _parts(self, name: str) -> tuple[Part, ...]:
        found: tuple[Part, ...] = self._family.parts(self._config, name, self.shapes[name])
        return found

    def _headers(self, known: set[str]) -> dict[str, StoredTensor]:
        """The tensors of the files by their full names, all of them `known`."""
        found: dict[str, StoredTensor] = {}
        others, prefix = getattr(self._family, "OTHER_NAMES", {}), self._family.PREFIX
        for path in weight_files(self.folder):
            for stored in stored_tensors(path):
                own = stored.name
                name = others.get(own, own)
                name = name if name in known else f"{prefix}{name}"
                if name not in known:
                    if self._family.BUFFERS.fullmatch(own.removeprefix(prefix)):
                        continue
                    raise ConfigError(
                        f"{self.folder}: holds {own}, which the model of its config.json does not "
                        "have; use another model"
                    )
                if (first := found.get(name)) and first.name != own:
                    what = f"holds {first.name} and {own}, two names of one tensor"
                    raise ConfigError(f"{self.folder}: {what}; leave one out in a copy of it")
                if first:
                    raise ConfigError(f"{path}: {own} is also in {first.path.name}; download both")
                found[name] = stored
        return found

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        """A tensor of the model is there as it should be."""
        stored = self._found.get(name)
        if stored is None:
            raise ConfigError(
                f"{self.folder}: {name} is missing, which the model of its config.json has; "
                "download the folder again, or use a language model with its head"
            )
        if stored.shape != shape:
            raise ConfigError(
                f"{self.folder}: {name} has the shape {list(stored.shape)}, and by config.json "
                f"{list(shape)}; download the folder again"
            )
        if stored.type not in DTYPES:
            raise ConfigError(
                f"{self.folder}: {name} is of type {stored.type}; weights are read in "
                f"{', '.join(DTYPES)}: use a model that is not quantised"
            )


def _grouped(sizes: Sequence[int], shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The sizes in runs whose products are the sizes in `shape`, in order."""
    at = 0
    for size in shape:
        end = at + 1
        while prod(sizes[at:end]) < size:
            end += 1
        yield tuple(sizes[at:end])
        at = end
    assert at == len(sizes), (sizes, shape)
