"""Integer checksums of the training state, which are the same on every mesh that has its bits."""

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from parallel3d.checkpoint.chunk_runs import live_tensors, runs_to_write
from parallel3d.engine import Engine
from parallel3d.mesh.mesh import Mesh

_AT_A_TIME = 2**22  # elements, whose indices and bits take 8 bytes each
_MULTIPLIER = 0x9E3779B97F4A7C15 - 2**64  # 2^64 / golden ratio, as a signed number


def bit_sum(values: Tensor, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Return the checksum of a box of a parameter's elements, an int64 [] on their device.

    It is the sum, modulo 2^64, of each element's 32 (or 16) bits times an odd number that depends
    on its index in the whole parameter. So the checksums of boxes add up to that of the parameter,
    and a flipped bit always changes it.

    Args:
        values: the box's elements.
        offsets: the box's first index in each dim of the parameter.
        shape: the parameter's shape.
    """
    rows = max(1, _AT_A_TIME // max(1, prod(values.shape[1:])))
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for first in range(0, len(values), rows) if values.dim() else ():
        part = values[first : first + rows]
        starts = [offsets[0] + first, *offsets[1:]]
        total += _bit_sum(part, starts, shape)
    return total if values.dim() else _bit_sum(values, offsets, shape)


def _bit_sum(values: Tensor, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
    index = torch.zeros((), dtype=torch.int64, device=values.device)
    for start, size, count in zip(offsets, shape, values.shape, strict=True):
        places = torch.arange(start, start + count, device=values.device)
        index = index.unsqueeze(-1) * size + places
    weights = index * _MULTIPLIER
    weights ^= weights >> 29
    bits = values.detach().view(torch.int16 if values.element_size() == 2 else torch.int32)
    return (bits.to(torch.int64) * (weights | 1)).sum()


def state_checksums(
    engine: Engine, mesh: Mesh, shapes: Mapping[str, Sequence[int]]
) -> dict[str, list[int]]:
    """Return the checksums of each parameter's master and optimizer state. Collective.

    `shapes` are the shapes of all parameters. The host waits for the device once, beside states
    on NVMe, which are read. Call it between steps.
    """
    rows, kinds = {name: row for row, name in enumerate(sorted(shapes))}, engine.states.kinds
    sums = torch.zeros(len(rows), len(kinds), dtype=torch.int64, device=mesh.device)
    runs = runs_to_write(engine)
    for run, tensor in zip(runs, live_tensors(engine, runs), strict=True):
        for chunk in run.chunks:
            box, tensor = tensor[: chunk.box.numel].view(chunk.box.shape), tensor[chunk.box.numel :]
            total = bit_sum(box, chunk.box.offsets, shapes[chunk.name])
            sums[rows[chunk.name], kinds.index(run.kind)] += total.to(mesh.device)
    flat = [int(number) for number in mesh.sum_floats(sums.flatten())]
    return {name: flat[len(kinds) * row :][: len(kinds)] for name, row in rows.items()}
