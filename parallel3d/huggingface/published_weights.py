"""A published model's weights by our names: any box of a parameter, from the bytes that hold it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import product
from math import prod
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import torch
from torch import Tensor

from parallel3d import models
from parallel3d.base.errors import CheckpointError, ConfigError
from parallel3d.checkpoint.arrays import ArrayFile, empty
from parallel3d.checkpoint.box import Box, boxes_of
from parallel3d.config.pretrained import weight_files
from parallel3d.huggingface.header import DTYPES, StoredTensor, read_header
from parallel3d.model.spec import named_params, tied_names
from parallel3d.models.pretrained import Part

_COMPARED = 2**20  # elements of a tied weight's two copies that are compared at once


class PublishedWeights:
    """Published weights in a folder of transformers, for the model of its config.json.

    Opening reads the headers of its files. Names may lack the prefix that the model has inside its
    language model ("transformer.wte.weight", "wte.weight"). Raises ConfigError for tensors that
    are missing, of another shape or type, or none of the model's, CheckpointError for files that
    are damaged.
    """

    def __init__(self, folder: Path, config: Any) -> None:
        self.folder = folder
        family = models.huggingface(config.family)
        assert family is not None, "a family that is imported has its names"
        self._family: ModuleType = family
        self._config = config
        self._open = ExitStack()
        layers = models.layers(config)
        self._shapes = {name: spec.shape for name, spec in named_params(layers).items()}
        self._tied = tied_names(layers)
        try:
            self._stored = self._headers()
            self._check()
        except BaseException:
            self.close()
            raise

    @property
    def names(self) -> list[str]:
        """Names of our parameters, in the order of the layers; tied copies are left out."""
        return list(self._shapes)

    @property
    def dtype(self) -> torch.dtype:
        """The type of all tensors; fp32, which holds each exactly, where there are several."""
        types = {self._at(part.name).type for name in self._shapes for part in self._parts(name)}
        return DTYPES[types.pop()] if len(types) == 1 else torch.float32

    @property
    def stored(self) -> dict[str, StoredTensor]:
        """The model's tensors in the files, by their full names in transformers."""
        parts = (part for name in self._shapes for part in self._parts(name))
        return {part.name: self._at(part.name) for part in parts}

    def read(self, name: str, box: Box, out: Tensor) -> None:
        """Fill `out` with a box of a parameter, given in the coordinates of the whole.

        out: [*box.shape], of any strides and on any device. Raises CheckpointError.
        """
        shape = self._shapes[name]
        for part in self._parts(name):
            if part.index is None:
                self._read(part, shape, box, out)
                continue
            row = part.index - box.offsets[0]
            if 0 <= row < box.shape[0]:
                self._read(part, shape[1:], Box(box.offsets[1:], box.shape[1:]), out[row])

    def whole(self, name: str) -> Tensor:
        """Read a parameter whole, in fp32 on the host."""
        shape = self._shapes[name]
        out = empty(shape, torch.float32)
        self.read(name, Box((0,) * len(shape), shape), out)
        return out

    def check_tied(self) -> None:
        """Raise ConfigError where a tied weight's copy in the folder is another tensor."""
        for copy, original in self._tied.items():
            shape = self._shapes[original]
            ours, theirs = (self._one_part(name, shape) for name in (original, copy))
            found = self._find(theirs.name)
            if found is None:
                continue
            rows = max(1, _COMPARED // prod(shape[1:]))
            for first in range(0, shape[0], rows):
                size = (min(rows, shape[0] - first), *shape[1:])
                both = []
                for at in (self._at(ours.name), found):
                    out = torch.empty(size)
                    offsets = (first, *(0 for _ in shape[1:]))
                    at.file.read(at.at, at.shape, offsets, out, DTYPES[at.type])
                    both.append(out)
                if not torch.equal(*both):
                    raise ConfigError(
                        f"{self.folder}: {found.name} is not {ours.name}, although config.json "
                        "says tie_word_embeddings = true; set it to false in a copy of the folder"
                    )

    def _read(self, part: Part, shape: Sequence[int], box: Box, out: Tensor) -> None:
        """Read a box of a part of this shape, which one tensor holds with its dims in an order."""
        at = self._at(part.name)
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
            at.file.read(at.at, part.shape, theirs, target.permute(inverse), DTYPES[at.type])

    def _parts(self, name: str) -> tuple[Part, ...]:
        found: tuple[Part, ...] = self._family.parts(self._config, name, self._shapes[name])
        return found

    def _one_part(self, name: str, shape: tuple[int, ...]) -> Part:
        found: Part = self._family.parts(self._config, name, shape)[0]
        return found

    def _find(self, name: str) -> StoredTensor | None:
        """A tensor by its full name in transformers, or without the prefix; None: not there."""
        return self._stored.get(name) or self._stored.get(name.removeprefix(self._family.PREFIX))

    def _at(self, name: str) -> StoredTensor:
        found = self._find(name)
        assert found is not None, "it was looked for at the beginning"
        return found

    def _headers(self) -> dict[str, StoredTensor]:
        found: dict[str, StoredTensor] = {}
        others: Mapping[str, str] = getattr(self._family, "OTHER_NAMES", {})
        for path in weight_files(self.folder):
            try:
                file = ArrayFile(path)
            except OSError as error:
                raise CheckpointError(f"{path}: cannot be opened: {error}") from None
            self._open.callback(file.close)
            for own, stored in read_header(file).items():
                name = others.get(own, own)
                if (first := found.get(name)) and first.name != own:
                    what = f"holds {first.name} and {own}, two names of one tensor"
                    raise ConfigError(f"{self.folder}: {what}; leave one out in a copy of it")
                if first:
                    raise ConfigError(
                        f"{path}: {own} is also in {first.file.path.name}; download both"
                    )
                found[name] = stored
        return found

    def _check(self) -> None:
        """Every tensor of the model is there as it should be, and no other one."""
        wanted = {}
        for name, shape in self._shapes.items():
            whole = torch.empty(shape, device="meta")
            wanted.update(self._family.to_huggingface(self._config, {name: whole}))
        for name, value in wanted.items():
            found = self._find(name)
            if found is None:
                raise ConfigError(
                    f"{self.folder}: {name} is missing, which the model of its config.json has; "
                    "download the folder again, or use a language model with its head"
                )
            if found.shape != tuple(value.shape):
                raise ConfigError(
                    f"{self.folder}: {name} has the shape {list(found.shape)}, and by config.json "
                    f"{list(value.shape)}; download the folder again"
                )
            if found.type not in DTYPES:
                raise ConfigError(
                    f"{self.folder}: {name} is of type {found.type}; weights are read in "
                    f"{', '.join(DTYPES)}: use a model that is not quantised"
                )
        names = {*wanted, *(self._one_part(n, self._shapes[o]).name for n, o in self._tied.items())}
        prefix = self._family.PREFIX
        known = names | {name.removeprefix(prefix) for name in names}
        for name in self._stored.keys() - known:
            if not self._family.BUFFERS.fullmatch(name.removeprefix(prefix)):
                raise ConfigError(
                    f"{self.folder}: holds {name}, which the model of its config.json does not "
                    "have; use another model"
                )

    def close(self) -> None:
        """Close the files of the weights."""
        self._open.close()

    def __enter__(self) -> "PublishedWeights":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


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
