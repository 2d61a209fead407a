"""Describe how a parameter is cut over groups of ranks, and its role on a rank."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel3d.mesh.mesh import ROLES, Mesh, Peers
from parallel3d.model.spec import ParamSpec


def even_split(length: int, parts: int, index: int) -> tuple[int, int]:
    """Return the bounds [start, stop) of part `index`; parts differ by at most one element."""
    return length * index // parts, length * (index + 1) // parts


class CutPart(NamedTuple):
    """A dim that is cut over the ranks of a role of the mesh: this rank has [start, stop) of it."""

    dim: int
    role: str
    start: int
    stop: int


@dataclass(frozen=True)
class Cut:
    """A rank's part of a global parameter; a dim that is not in `parts` is not cut."""

    global_shape: tuple[int, ...]
    parts: tuple[CutPart, ...] = ()

    @property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """The bounds [start, stop) of this rank's part, dim by dim."""
        cut = {part.dim: (part.start, part.stop) for part in self.parts}
        return tuple(cut.get(dim, (0, size)) for dim, size in enumerate(self.global_shape))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's part."""
        return tuple(stop - start for start, stop in self.bounds)

    def part_of(self, whole: Tensor) -> Tensor:
        """Return the view of this rank's part in a tensor of the global shape."""
        return whole[tuple(slice(*bounds) for bounds in self.bounds)]


def cut_parameter(
    shape: tuple[int, ...], **cuts: tuple[int, dist.ProcessGroup] | None
) -> nn.Parameter:
    """Create an empty parameter for this rank's part of global `shape`, with its `cut` attached.

    `cuts` has by role of the mesh the dim that is cut, and the group that cuts it.
    """
    parts = []
    for role, over in cuts.items():
        if over is not None:
            dim, group = over
            start, stop = even_split(shape[dim], group.size(), group.rank())
            parts.append(CutPart(dim, role, start, stop))
    cut = Cut(tuple(shape), tuple(sorted(parts)))
    parameter = nn.Parameter(torch.empty(cut.local_shape))
    parameter.cut = cut  # type: ignore[attr-defined]
    return parameter


def cut_of(parameter: nn.Parameter) -> Cut:
    """Return the cut that a layer attached to its parameter."""
    return parameter.cut  # type: ignore[attr-defined]


class CutModule(nn.Module):
    """A layer whose parameters are cut over groups; it prints this rank's part of each."""

    def extra_repr(self) -> str:
        cuts = {name: cut_of(own) for name, own in self.named_parameters(recurse=False)}
        parts = (f"{name} {cut.local_shape} of {cut.global_shape}" for name, cut in cuts.items())
        return ", ".join(parts)


def is_of_experts(parameter: nn.Parameter) -> bool:
    """True if ranks hold different experts of a parameter."""
    cut: Cut = getattr(parameter, "cut", Cut(()))
    return any(
        part.role == "experts" and part.stop - part.start < cut.global_shape[part.dim]
        for part in cut.parts
    )


@dataclass(frozen=True)
class HeldParameter:
    """A parameter of this rank's stages, under its global name.

    - `replicas`: the ranks whose gradients of it are averaged.
    - `first`: of the tensor-parallel ranks with equal copies, this rank is the first.
    - `tied_across`: the weight's other copy is on another pipeline coordinate.
    - `copy`: it is the second of two tied copies, which is not counted, saved or reported.
    - `partial`: each tp rank's gradient is a partial sum; the engine sums it over tp.
    """

    name: str
    parameter: nn.Parameter
    spec: ParamSpec
    replicas: Peers
    first: bool = True
    tied_across: bool = False
    copy: bool = False
    partial: bool = False

    @property
    def cut(self) -> Cut:
        """This rank's part of the parameter, which ZeRO may shard over `replicas`."""
        return cut_of(self.parameter)

    @property
    def elements(self) -> int:
        """The number of elements of this rank's part."""
        return prod(self.cut.local_shape)

    @property
    def counts(self) -> bool:
        """True if this rank counts its elements where each of the model's counts once."""
        return self.first and not self.copy


def held_parameters(
    module: nn.Module,
    specs: Iterable[ParamSpec],
    mesh: Mesh,
    *,
    prefix: str = "",
    sequence_parallel: bool = False,
) -> Iterator[HeldParameter]:
    """Yield the parameters of a module, which must be exactly those that `specs` declare.

    `prefix` comes before their names.
    """
    declared = {p.name: p for p in specs}
    built = dict(module.named_parameters())
    assert declared.keys() == built.keys(), declared.keys() ^ built.keys()
    sizes = {role: mesh.peers(role).size for role in ROLES}
    for name, spec in declared.items():
        cut = cut_of(built[name])
        cuts = {part.dim: part.role for part in cut.parts}
        assert (cut.global_shape, cuts) == (spec.shape, spec.cuts(sizes)), prefix + name
        replicas, *others = map(mesh.peers, spec.replicated_over(sizes))
        yield HeldParameter(
            prefix + name,
            built[name],
            spec,
            replicas,
            first=all(peers.coord == 0 for peers in others),
            partial=spec.is_partial(sizes, sequence_parallel),
        )
