"""Initialise parameters with the same bits on every mesh.

A parameter is drawn in tiles, each from a generator seeded by the run's seed, the parameter's
global name and the tile's place. A rank draws the tiles that overlap its part, one band at a time.
"""

from math import prod

import torch
from torch import Tensor

from parallel3d.model.spec import Init, ParamSpec
from parallel3d.tensor.cut import Cut
from parallel3d.tensor.random_key import seed_of


def _tile(extent: int) -> int:
    """Return the length of a tile along a dim: a sixteenth of `extent`, and at most 256."""
    return min(256, -(-extent // 16))


def fill(out: Tensor, start: int, spec: ParamSpec, name: str, cut: Cut, seed: int) -> None:
    """Write elements [start, start + len(out)) of this rank's flattened part of a parameter.

    `out` is flat, of any float dtype and device. Values are drawn in fp32 on the CPU, so they do
    not depend on the device. Elements beyond the part's end (ZeRO's padding) are not written.
    """
    bounds = cut.bounds
    stop = min(start + out.numel(), prod(end - begin for begin, end in bounds))
    if stop <= start:
        return
    init = spec.init
    if init.std == 0 and init.bounds is None and not init.values:
        out[: stop - start].fill_(init.value)
        return
    *outer, rows, columns = (1, 1, *spec.shape)
    *outer_bounds, (r0, r1), (c0, c1) = ((0, 1), (0, 1), *bounds)
    slabs = torch.arange(prod(outer)).view(outer)
    numbers = slabs[tuple(slice(*own) for own in outer_bounds)]
    width = c1 - c0
    slab_numel = (r1 - r0) * width
    for slab, number in enumerate(numbers.flatten().tolist()):
        # The rows of this slab, counted from r0, that overlap the flat range.
        first = max(0, start - slab * slab_numel) // width
        last = -(-min(slab_numel, stop - slab * slab_numel) // width)
        row = r0 + first
        while row < r0 + last:
            end = min(r0 + last, (row // _tile(rows) + 1) * _tile(rows))
            if init.values:
                begin = number * rows * columns
                values = _listed(init.values, begin, (row, end), (c0, c1), columns)
            else:
                place = f"{seed}/{name}/{number}"
                values = _band(place, (row, end), (c0, c1), (rows, columns), init)
            if init.zero_row is not None and row <= init.zero_row < end:
                values[init.zero_row - row] = 0
            offset = slab * slab_numel + (row - r0) * width - start
            lo = max(0, offset)
            hi = min(stop - start, offset + values.numel())
            out[lo:hi].copy_(values.flatten()[lo - offset : hi - offset])
            row = end


def _band(
    place: str,
    own_rows: tuple[int, int],
    own_columns: tuple[int, int],
    shape: tuple[int, int],
    init: Init,
) -> Tensor:
    """Return rows [r0, r1) and columns [c0, c1) of one band of tiles: [r1 - r0, c1 - c0].

    - `place`: seed, name and number of the matrix, whose whole `shape` the tiles divide.
    """
    r0, r1 = own_rows
    c0, c1 = own_columns
    rows, columns = shape
    tall = _tile(rows)
    wide = _tile(columns)
    i = r0 // tall
    top = i * tall
    bottom = min(rows, (i + 1) * tall)
    left = c0 // wide * wide
    right = min(columns, -(-c1 // wide) * wide)
    band = torch.empty(bottom - top, right - left)  # whole tiles: slicing each would take longer
    generator = torch.Generator()
    tile = torch.empty(bottom - top, wide)  # contiguous, as draws of other layouts differ
    for j, place_of_tile in enumerate(band.split(wide, dim=1), c0 // wide):
        generator.manual_seed(seed_of(f"{place}/{i}/{j}"))
        if place_of_tile.shape != tile.shape:
            tile = torch.empty(place_of_tile.shape)
        _draw(tile, init, generator)
        place_of_tile.copy_(tile)
    return band[r0 - top : r1 - top, c0 - left : c1 - left]


def _draw(tile: Tensor, init: Init, generator: torch.Generator) -> None:
    """Fill a tile with random numbers of the distribution that `init` names."""
    if init.bounds is None:
        tile.normal_(init.value, init.std, generator=generator)
    elif init.std == 0:
        tile.uniform_(*init.bounds, generator=generator)
    else:
        low, high = init.bounds
        torch.nn.init.trunc_normal_(tile, init.value, init.std, low, high, generator=generator)


def _listed(
    values: tuple[float, ...],
    begin: int,
    own_rows: tuple[int, int],
    own_columns: tuple[int, int],
    columns: int,
) -> Tensor:
    """Return rows and columns of a matrix whose elements are `values` in turn.

    - `begin`: the number of elements of the parameter before this matrix, which has `columns`.
    """
    row_numbers = torch.arange(*own_rows).unsqueeze(1)  # [rows here, 1]
    places = begin + row_numbers * columns + torch.arange(*own_columns)  # [rows here, columns here]
    return torch.tensor(values)[places % len(values)]
