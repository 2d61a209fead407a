"""Assemble whole matrices from their pieces on the ranks of a stage, for optimizers that need them.

ZeRO cuts flat tensors anywhere, and tensor parallelism cuts rows or columns. Each matrix therefore
has one home among the ranks of its stage (dp x tp). One exchange sends all pieces to the homes, and
one sends the results back, so each element travels twice, whatever the number of microbatches.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.base.errors import ConfigError
from parallel3d.engine.optimizer_states import Place
from parallel3d.mesh.mesh import ROLES, Mesh, Peers
from parallel3d.model.matrices import deal, matrix_view, newton_schulz_cost
from parallel3d.model.optimizers import MATRIX
from parallel3d.tensor.cut import HeldParameter

Bounds = tuple[tuple[int, int], ...]
_FIXED = 6  # columns of a row in `find_matrices` before the bounds of the rank's part


class _Piece(NamedTuple):
    """Elements of a matrix on a rank: they begin at `offset` of the rank's flat tensor.

    `rows` and `columns` bound the rank's part of the matrix before ZeRO cuts it, and `start` is the
    piece's first element in that part, flattened.
    """

    rank: int
    offset: int
    start: int
    numel: int
    rows: tuple[int, int]
    columns: tuple[int, int]


class Matrix(NamedTuple):
    """A matrix, the optimizer group that holds it, its home, and all pieces of it in the stage.

    `sources` are the pieces that are sent to the home: together each element once. Copies on other
    ranks only receive the result.
    """

    group: int
    home: int
    shape: tuple[int, int]
    pieces: tuple[_Piece, ...]
    sources: tuple[_Piece, ...]


class WholeMatrices:
    """The matrices of one flat tensor (an optimizer group), and their exchange in the stage."""

    def __init__(self, matrices: Iterable[Matrix], stage: Peers, device: torch.device) -> None:
        self._matrices = list(matrices)
        self._stage = stage
        self._device = device
        self._own = [m for m in self._matrices if m.home == stage.coord]
        ranks = range(stage.size)
        # Ranges of the own flat tensor by home, and all pieces of the own matrices by rank.
        self._to = [
            [p for m in self._matrices if m.home == r for p in m.sources if p.rank == stage.coord]
            for r in ranks
        ]
        self._back = [
            [p for m in self._matrices if m.home == r for p in m.pieces if p.rank == stage.coord]
            for r in ranks
        ]
        self._from = [[p for m in self._own for p in m.sources if p.rank == r] for r in ranks]
        self._results = [
            [(i, p) for i, m in enumerate(self._own) for p in m.pieces if p.rank == r]
            for r in ranks
        ]

    def map(self, flat: Tensor, function: Callable[[Sequence[Tensor]], Sequence[Tensor]]) -> Tensor:
        """Return `function` of all matrices in a flat tensor; collective over the stage.

        `function` gets the matrices whose home is this rank, [rows, columns] each, on the mesh's
        device, and returns as many of the same shapes. Elements outside matrices become 0.
        """
        result = torch.zeros_like(flat)
        if not self._matrices:
            return result
        sent = [flat.narrow(0, p.offset, p.numel) for pieces in self._to for p in pieces]
        received = self._exchange(_joined(sent, flat), self._to, self._from)
        changed = function(self._assembled(received))
        parts = [_part(changed[i], p) for row in self._results for i, p in row]
        returned = [[p for _, p in row] for row in self._results]
        received = self._exchange(_joined(parts, flat), returned, self._back).to(flat.device)
        pieces = [p for row in self._back for p in row]
        values = received.split([p.numel for p in pieces])
        for piece, value in zip(pieces, values, strict=True):
            result.narrow(0, piece.offset, piece.numel).copy_(value)
        return result

    def _exchange(
        self, flat: Tensor, sent: Sequence[Sequence[_Piece]], received: Sequence[Sequence[_Piece]]
    ) -> Tensor:
        """Send consecutive parts of a flat tensor to the ranks of the stage; return theirs."""
        flat = flat.to(self._device)
        if self._stage.size == 1:
            return flat
        into, out_of = ([sum(p.numel for p in row) for row in rows] for rows in (received, sent))
        result = flat.new_empty(sum(into))
        dist.all_to_all_single(result, flat, into, out_of, group=self._stage.group)
        return result

    def _assembled(self, received: Tensor) -> list[Tensor]:
        """Return the matrices whose home is this rank from what their sources sent."""
        pieces = [p for row in self._from for p in row]
        values = received.split([p.numel for p in pieces])
        by_piece = {id(p): value for p, value in zip(pieces, values, strict=True)}
        matrices = []
        for matrix in self._own:
            parts = defaultdict[Bounds, list[_Piece]](list)
            for piece in matrix.sources:
                parts[piece.rows, piece.columns].append(piece)
            whole = received.new_empty(matrix.shape)
            for (rows, columns), cut in parts.items():
                in_order = [by_piece[id(p)] for p in sorted(cut, key=lambda p: p.start)]
                part = whole[slice(*rows), slice(*columns)]
                part.copy_(torch.cat(in_order).view(part.shape))
            matrices.append(whole)
        return matrices


def _joined(tensors: list[Tensor], like: Tensor) -> Tensor:
    return torch.cat(tensors) if tensors else like.new_empty(0)


def _part(matrix: Tensor, piece: _Piece) -> Tensor:
    part = matrix[slice(*piece.rows), slice(*piece.columns)].reshape(-1)
    return part.narrow(0, piece.start, piece.numel)


def find_matrices(
    held: Sequence[HeldParameter],
    places: Iterable[Place],
    *,
    mesh: Mesh,
    stage: Peers,
    sharded: bool,
    per_head: bool,
) -> list[Matrix]:
    """Return the hidden matrices of this rank's stages, with their homes; collective over `stage`.

    - `places`: where the optimizer groups hold this rank's pieces
    - `sharded`: ZeRO cuts the groups; otherwise replicas hold copies
    - `per_head`: a matrix of each attention head, where the parameter's rows consist of heads

    Raises ConfigError on all ranks if their optimizer groups hold different parameters.
    """
    hidden = [h for h in held if h.spec.role == MATRIX]
    index = {h.name: number for number, h in enumerate(hidden)}
    width = _FIXED + 2 * max((len(h.spec.shape) for h in hidden), default=0)
    own: list[list[int]] = []
    for place in places:
        h = place.piece.held
        start = place.piece.start
        numel = place.piece.numel
        if h.name in index:
            row = [stage.coord, index[h.name], place.group, place.offset, start, numel]
            row += [end for bounds in h.cut.bounds for end in bounds]
            own.append(row + [0] * (width - len(row)))
    own_rows = torch.tensor(own, dtype=torch.int64, device=mesh.device).view(-1, width)
    table = mesh.messages.all_gather(own_rows, stage.group, 0).cpu().numpy()
    views = [matrix_view(h.spec, per_head) for h in hidden]
    counts = [prod(view[:-2]) for view in views]
    costs = [
        newton_schulz_cost(*view[-2:])
        for view, count in zip(views, counts, strict=True)
        for _ in range(count)
    ]
    homes = iter(deal(costs, stage.size))
    matrices = list[Matrix]()
    tp = mesh.tensor.size  # ranks of the stage are in the order dp, tp
    sizes = {role: mesh.peers(role).size for role in ROLES}
    for number, (h, view, count) in enumerate(zip(hidden, views, counts, strict=True)):
        everyone = table[table[:, 1] == number].tolist()
        group, *others = {row[2] for row in everyone}
        if others:
            raise ConfigError(
                "zero_optimization.sub_group_size: splits the ranks of a stage differently, so "
                f"{h.name} is in {1 + len(others)} optimizer groups; use a larger value"
            )
        pieces: list[list[_Piece]] = [[] for _ in range(count)]
        for row in everyone:
            for matrix, piece in _pieces_in(row, h, view):
                pieces[matrix].append(piece)
        on_tp_alone = "tensor" in h.spec.replicated_over(sizes)  # the ranks of one tp coordinate
        for of_matrix in pieces:
            home = next(homes)
            holders = sorted({p.rank // tp for p in of_matrix})  # with ep not the home, perhaps
            near = home // tp if home // tp in holders else holders[home // tp % len(holders)]
            sources = [
                p
                for p in of_matrix
                if (sharded or p.rank // tp == near)
                and (not on_tp_alone or p.rank % tp == home % tp)
            ]
            shape = (view[-2], view[-1])
            assert sum(p.numel for p in sources) == prod(shape), h.name
            matrices.append(Matrix(group, home, shape, tuple(of_matrix), tuple(sources)))
    return matrices


def _pieces_in(
    row: Sequence[int], held: HeldParameter, view: tuple[int, ...]
) -> Iterator[tuple[int, _Piece]]:
    """Yield the pieces of matrices in a row of `find_matrices`, each with its matrix's index."""
    rank, _, _, offset, start, numel, *ends = row
    bounds = list(zip(ends[::2], ends[1::2], strict=True))[: len(held.spec.shape)]
    if len(view) > len(bounds):  # rows are split into heads
        first, stop = bounds[-2]
        size = view[-2]
        assert first % size == stop % size == 0, held.name
        bounds[-2:] = [(first // size, stop // size), (0, size), bounds[-1]]
    *stack, rows, columns = bounds
    local = [stop - first for first, stop in stack]
    each = (rows[1] - rows[0]) * (columns[1] - columns[0])
    for number in range(start // each, -(-(start + numel) // each)):
        place = np.unravel_index(number, local) if local else ()
        matrix = 0
        for (first, _), at, length in zip(stack, place, view, strict=False):
            matrix = matrix * length + first + int(at)
        first = max(start, number * each)
        stop = min(start + numel, (number + 1) * each)
        yield (
            matrix,
            _Piece(
                rank, offset + first - start, first - number * each, stop - first, rows, columns
            ),
        )
