"""How a parameter is cut over a tensor-parallel group, and what else is known of it on a rank."""

from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import nn

from parallel3d.model.spec import ParamSpec


def even_split(length: int, parts: int, index: int) -> tuple[int, int]:
    """Bounds [start, stop) of part `index` when `length` is cut into parts that differ by one."""
    return length * index // parts, length * (index + 1) // parts


@dataclass(frozen=True)
class Cut:
    """The part of a global parameter that this tp rank holds; it is whole if `dim` is None."""

    global_shape: tuple[int, ...]
    dim: int | None
    start: int
    stop: int
    group_rank: int

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the part that this rank holds."""
        if self.dim is None:
            return self.global_shape
        head, tail = self.global_shape[: self.dim], self.global_shape[self.dim + 1 :]
        return (*head, self.stop - self.start, *tail)

    @property
    def counts(self) -> bool:
        """Whether this rank counts the part where each element counts once (the gradient norm)."""
        return self.dim is not None or self.group_rank == 0


def cut_parameter(
    shape: tuple[int, ...], dim: int | None, group: dist.ProcessGroup
) -> nn.Parameter:
    """Make an empty parameter for this rank's part of global `shape`, its `cut` attached."""
    rank, size = group.rank(), group.size()
    start, stop = (0, 0) if dim is None else even_split(shape[dim], size, rank)
    cut = Cut(tuple(shape), dim, start, stop, rank)
    parameter = nn.Parameter(torch.empty(cut.local_shape))
    parameter.cut = cut  # type: ignore[attr-defined]
    return parameter


def cut_of(parameter: nn.Parameter) -> Cut:
    """The cut that a layer attached to its parameter."""
    return parameter.cut  # type: ignore[attr-defined]


@dataclass(frozen=True)
class HeldParameter:
    """A parameter of this rank's stages, under its global name.

    `tied_across` marks a weight whose other copy lives on another pipeline coordinate; `copy` marks
    the second of the two, which is counted, saved and reported nowhere. `partial` marks a parameter
    whose gradient on each tp rank is a part of the whole: the engine sums it over tp.
    """

    name: str
    parameter: nn.Parameter
    spec: ParamSpec
    tied_across: bool = False
    copy: bool = False
    partial: bool = False

    @property
    def cut(self) -> Cut:
        """How tensor parallelism cut the parameter."""
        return cut_of(self.parameter)

    @property
    def elements(self) -> int:
        """Elements of this tensor-parallel rank's part."""
        return prod(self.cut.local_shape)

    @property
    def counts(self) -> bool:
        """Whether this rank's elements count where each of the model counts once."""
        return self.cut.counts and not self.copy
