"""Describe how a parameter is cut over a tensor-parallel group, and its role on a rank."""

from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import nn

from parallel3d.model.spec import ParamSpec


def even_split(length: int, parts: int, index: int) -> tuple[int, int]:
    """Return the bounds [start, stop) of part `index`; parts differ by at most one element."""
    return length * index // parts, length * (index + 1) // parts


@dataclass(frozen=True)
class Cut:
    """A tp rank's part of a global parameter: [start, stop) of `dim`, or all if it is None."""

    global_shape: tuple[int, ...]
    dim: int | None
    start: int
    stop: int
    group_rank: int

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's part."""
        if self.dim is None:
            return self.global_shape
        head, tail = self.global_shape[: self.dim], self.global_shape[self.dim + 1 :]
        return (*head, self.stop - self.start, *tail)

    @property
    def counts(self) -> bool:
        """True if this rank counts the part where each element counts once (the gradient norm)."""
        return self.dim is not None or self.group_rank == 0


def cut_parameter(
    shape: tuple[int, ...], dim: int | None, group: dist.ProcessGroup
) -> nn.Parameter:
    """Create an empty parameter for this rank's part of global `shape`, with its `cut` attached."""
    rank, size = group.rank(), group.size()
    start, stop = (0, 0) if dim is None else even_split(shape[dim], size, rank)
    cut = Cut(tuple(shape), dim, start, stop, rank)
    parameter = nn.Parameter(torch.empty(cut.local_shape))
    parameter.cut = cut  # type: ignore[attr-defined]
    return parameter


def cut_of(parameter: nn.Parameter) -> Cut:
    """Return the cut that a layer attached to its parameter."""
    return parameter.cut  # type: ignore[attr-defined]


@dataclass(frozen=True)
class HeldParameter:
    """A parameter of this rank's stages, under its global name.

    - `tied_across`: the weight's other copy is on another pipeline coordinate.
    - `copy`: it is the second of two tied copies, which is not counted, saved or reported.
    - `partial`: each tp rank's gradient is a partial sum; the engine sums it over tp.
    """

    name: str
    parameter: nn.Parameter
    spec: ParamSpec
    tied_across: bool = False
    copy: bool = False
    partial: bool = False

    @property
    def cut(self) -> Cut:
        """The part of the parameter on this tp rank."""
        return cut_of(self.parameter)

    @property
    def elements(self) -> int:
        """The number of elements of this tp rank's part."""
        return prod(self.cut.local_shape)

    @property
    def counts(self) -> bool:
        """True if this rank counts its elements where each of the model's counts once."""
        return self.cut.counts and not self.copy
