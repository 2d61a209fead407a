"""A parameter, or one of its moments, in the files of another program: pieces, read when needed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from parallel3d.base.errors import CheckpointError
from parallel3d.checkpoint.chunks import Box, empty, tile
from parallel3d.extras.foreign.checkpoints.pickles import Stored

FROM_WEIGHTS = (
    "start from the weights alone: export them to a transformers folder, and name it in "
    "parallel3d.model.from_pretrained"
)
"""The remedy where weights and moments cannot be read together."""
KINDS = ("master", "exp_avg", "exp_avg_sq")
"""The names of a weight in fp32 and its two moments, here and in our checkpoints."""


class Piece(Protocol):
    """A part of a tensor in a file."""

    @property
    def numel(self) -> int:
        """Number of elements."""

    def fill(self, out: Tensor) -> None:
        """Copy the piece into its place in the whole tensor `out`, fp32 and contiguous."""


@dataclass(frozen=True)
class FlatPiece:
    """Elements [first, first + numel) of a stored tensor, at `at` in the flattened whole."""

    stored: Stored
    first: int
    numel: int
    at: int = 0

    def fill(self, out: Tensor) -> None:
        """Copy the piece into its place."""
        self.stored.fill(out.view(-1)[self.at : self.at + self.numel], self.first)


@dataclass(frozen=True)
class BoxPiece:
    """A box of the whole, which `read` returns."""

    box: Box
    read: Callable[[], Tensor]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.box.numel

    def fill(self, out: Tensor) -> None:
        """Copy the piece into its place."""
        for dim, (first, size) in enumerate(zip(*self.box, strict=True)):
            out = out.narrow(dim, first, size)
        out.copy_(self.read().view(self.box.shape))


@dataclass(frozen=True)
class ForeignTensor:
    """A tensor of another program."""

    place: str
    """Its file or folder, for messages."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: Sequence[Piece]
    copies: "list[ForeignTensor]" = field(default_factory=list)
    """The same tensor, stored again: a tied weight on another stage."""

    def read(self) -> Tensor:
        """Return the whole tensor in fp32; raises CheckpointError."""
        out = empty(self.shape, torch.float32)
        for piece in self.pieces:
            piece.fill(out)
        return out

    def problem(self) -> str:
        """Return why it cannot be used; "" if it can."""
        boxes = [piece.box for piece in self.pieces if isinstance(piece, BoxPiece)]
        numel = sum(piece.numel for piece in self.pieces)
        if numel != prod(self.shape) or (boxes and not tile(boxes, self.shape)):
            return f"has {numel:,} of {prod(self.shape):,} elements"
        return ""


def whole(stored: Stored, shape: Sequence[int] | None = None) -> ForeignTensor:
    """Return the tensor that a stored one holds completely."""
    numel = prod(stored.shape)
    shape = stored.shape if shape is None else tuple(shape)
    return ForeignTensor(str(stored.path), shape, stored.dtype, (FlatPiece(stored, 0, numel),))


def number(value: object) -> float:
    """Return a counter that is a number, or a tensor of one element."""
    if isinstance(value, Stored):
        value = value.read()
    if isinstance(value, Tensor):
        value = value.reshape(-1)[0].item()
    if not isinstance(value, int | float):
        raise CheckpointError(f"{value!r} must be a number")
    return value
