"""Compare checksums of everything that several ranks hold, and name the rank that is wrong."""

import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import permutations, product
from types import MappingProxyType
from typing import Any
from unittest.mock import patch
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from parallel3d.base.errors import TrainingError
from parallel3d.checkpoint.chunk_runs import bit_sum, global_boxes
from parallel3d.engine import Engine
from parallel3d.mesh.agree import gather_json
from parallel3d.mesh.mesh import Mesh
from parallel3d.pipeline.executor import Executor
from parallel3d.schedule.schedule import Action
from parallel3d.tensor.cut import is_of_experts

_MASK = 2**52 - 1  # checksums travel as floats of 53 bits
_REPLICAS = "data-parallel replicas"
_EXPERTS = "replicas of experts"
_TP = "tensor-parallel copies"
_TIED = "tied weights"
_NORM = "gradient norms"

REMEDY = (
    "Leave out this host, whose memory or device may be faulty, and start again from the last "
    "checkpoint"
)

Messages = Mapping[tuple[str, bool], Tensor]
"""Checksums of messages in a step, by their receiving action and whether this rank sent them."""


Row = tuple[str, int, float]
"""A place, the checksum of its value, and the value's norm."""


def digest(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bits, which a flipped bit changes, and those of its norm.

    They are int64 [2], and stay on the device until `read_digests`.
    """
    flat = tensor.detach().reshape(-1)
    flat = flat if flat.is_floating_point() else flat.float()
    bits = flat.view(torch.int16 if flat.element_size() == 2 else torch.int32)
    norm = torch.linalg.vector_norm(flat, dtype=torch.float64)
    return torch.stack([bits.sum(dtype=torch.int64), norm.view(torch.int64)])


def read_digests(places: Sequence[str], digests: Sequence[Tensor]) -> list[Row]:
    """Return the digests as numbers; the host waits for the device."""
    rows = (torch.stack([*digests]) if digests else torch.zeros(0, 2, dtype=torch.int64)).cpu()
    norms = rows[:, 1].contiguous().view(torch.float64)
    return list(zip(places, rows[:, 0].tolist(), norms.tolist(), strict=True))


class WrongBits(TrainingError):
    """Ranks differ in what must be the same; raised on all of them."""


@contextmanager
def noting_messages(executor: Executor, is_due: bool) -> Iterator[Messages]:
    """If due, note checksums of what this rank sends and receives in the block."""
    messages: dict[tuple[str, bool], Tensor] = {}

    def note(action: Action, tensor: Tensor) -> None:
        receive = action.other_end if action.is_send else action
        messages[str(receive), action.is_send] = bit_sum(tensor, [0] * tensor.dim(), tensor.shape)

    with patch.object(executor, "on_message", note if is_due else executor.on_message):
        yield messages


def check_bits(
    engine: Engine,
    mesh: Mesh,
    norm: float,
    ends: tuple[int, int],
    messages: Messages = MappingProxyType({}),
) -> None:
    """Raise WrongBits on all ranks unless all copies have the same bits. Collective.

    Each rank sends one checksum for each kind of copy, and the gradient norm. Where most copies
    agree the others are wrong; of two copies either may be. ZeRO's shards have no copy over dp.

    Args:
        norm: this rank's gradient norm of the step.
        ends: pipeline coordinates of the first and the last stage, which may share a weight.
        messages: this rank's messages of the step, which must have arrived as they were sent.
    """
    sums = _checksums(engine, mesh.device)
    zero = torch.zeros((), dtype=torch.int64, device=mesh.device)
    balance = zero
    for (receive, is_sent), total in messages.items():
        weight = crc32(receive.encode()) | 1  # so that two that are swapped change the sum
        balance = balance + total * (weight if is_sent else -weight)
    copies = [sum(of.values(), zero) & _MASK for of in sums.values()]
    rows = mesh.messages.gather_floats([*copies, norm, balance & _MASK])
    sizes = [peers.size for peers in (mesh.pipeline, mesh.replicas, mesh.tensor)]
    grid = np.arange(len(rows)).reshape(sizes)
    if sum(int(row[-1]) for row in rows) & _MASK:
        raise WrongBits(_wrong_messages(messages, mesh, grid))
    columns = [*sums, _NORM]
    owner = mesh.context.size, mesh.experts.size  # of rank d of dp x cp: d // cp % ep
    for what, peers in _copies(grid, ends, engine.settings.zero_stage > 0, owner):
        column = columns.index(what)
        values = [
            str(rows[ranks[0]][column])  # equal also if it is not a number
            if what == _NORM
            else sum(int(rows[rank][column]) for rank in ranks) & _MASK
            for ranks in peers
        ]
        (usual, count), *others = Counter(values).most_common()
        if others:
            own = {name: int(total) & _MASK for name, total in sums.get(what, {}).items()}
            details = gather_json(mesh, [socket.gethostname(), own])
            right = peers[values.index(usual)] if 2 * count > len(peers) else None
            wrong = [ranks for ranks, value in zip(peers, values, strict=True) if value != usual]
            raise WrongBits(_message(what, right, wrong if right else peers, details))


def _wrong_messages(messages: Messages, mesh: Mesh, grid: np.ndarray) -> str:
    """Return a text that names the messages that did not arrive as they were sent. Collective."""
    own = [
        {name: int(total) for (name, is_sent), total in messages.items() if is_sent == is_sender}
        for is_sender in (True, False)
    ]
    rows = gather_json(mesh, [f"rank {mesh.rank} on {socket.gethostname()}", *own])
    texts = []
    for pipeline in grid.reshape(len(grid), -1).T:
        pairs = permutations([rows[rank] for rank in pipeline], 2)
        for (sender, sent, _), (receiver, _, received) in pairs:
            names = {total: name for name, total in sent.items()}
            texts += [
                f"{receiver} received other bits in {name} than {sender} sent"
                + (f": those of {names[total]}" if total in names else "")
                for name, total in received.items()
                if sent.get(name, total) != total
            ]
    return (
        f"{'; '.join(texts[:4])}. Check the network and its drivers between these hosts, and start "
        "again from the last checkpoint"
    )


def _checksums(engine: Engine, device: torch.device) -> dict[str, dict[str, Tensor]]:
    """Return the checksums of parameters that other ranks hold too, by kind of copy and name."""
    sums: dict[str, dict[str, Tensor]] = {what: {} for what in (_REPLICAS, _EXPERTS, _TP, _TIED)}
    stage = engine.settings.zero_stage

    def add(what: str, name: str, total: Tensor) -> None:
        sums[what][name] = sums[what].get(name, 0) + total.to(device)

    for h in engine.held if stage < 3 else ():
        shape = h.parameter.shape
        what = _EXPERTS if is_of_experts(h.parameter) else _REPLICAS
        add(what, h.name, bit_sum(h.parameter.detach(), [0] * len(shape), shape))
    for number, block in enumerate(engine.states.blocks):
        kinds_of_copy = [
            [
                what
                for what, is_held in (
                    (_REPLICAS, stage == 0 and not is_of_experts(piece.held.parameter)),
                    (_EXPERTS, stage == 0 and is_of_experts(piece.held.parameter)),
                    (_TP, not piece.held.cut.parts),
                    (_TIED, piece.held.tied_across),
                )
                if is_held
            ]
            for piece in block
        ]
        if any(kinds_of_copy):  # states on NVMe are read
            with engine.states.opened(number) as tensors:
                for piece, kinds, copies in zip(block, tensors, kinds_of_copy, strict=True):
                    boxes = global_boxes(piece.held, piece.start, piece.start + piece.numel)
                    for flat, (box, at) in product(kinds.values(), boxes if copies else ()):
                        part = flat[at : at + box.numel].view(box.shape)
                        total = bit_sum(part, box.offsets, piece.held.cut.global_shape)
                        for what in copies:
                            add(what, piece.held.name, total)
    return sums


def _copies(
    grid: np.ndarray, ends: tuple[int, int], is_sharded: bool, owner: tuple[int, int]
) -> Iterator[tuple[str, list[list[int]]]]:
    """Yield each kind of copy with its peers, the ranks whose checksums add up to one copy's.

    `grid` [pp, dp, tp] has the global ranks. If the state is sharded over dp, those of a copy are
    all ranks of its dp group, because unlike stages have unlike shards.
    """
    (pp, dp, tp) = grid.shape
    (cp, ep) = owner
    shards = [range(dp)] if is_sharded else [range(d, d + 1) for d in range(dp)]
    for p, t in product(range(pp), range(tp)):
        yield _REPLICAS, [[int(rank)] for rank in grid[p, :, t]]
        for e in range(ep if ep > 1 else 0):
            yield _EXPERTS, [[int(grid[p, d, t])] for d in range(dp) if d // cp % ep == e]
    for p, own in product(range(pp), shards):
        yield _TP, [grid[p, own, t].tolist() for t in range(tp)]
    for t, own in product(range(tp), shards):
        yield _TIED, [grid[p, own, t].tolist() for p in ends]
    yield _NORM, [[rank] for rank in grid.flatten().tolist()]


def _message(
    what: str, right: Sequence[int] | None, wrong: Sequence[Sequence[int]], details: list[Any]
) -> str:
    """Return a text that names the ranks, their hosts and the first parameter that differs.

    `wrong` are the copies that differ from `right` or, without a majority, all copies. `details`
    has the host and the checksums of each rank; only shards that differ are named.
    """
    reference = right or wrong[0]
    pairs = [
        (place, name)
        for place, like in enumerate(reference)
        for copy in wrong
        for (name, total), other in zip(
            details[like][1].items(), details[copy[place]][1].values(), strict=False
        )
        if total != other
    ] or [(0, what)]
    places = dict.fromkeys(place for place, _ in pairs)
    ranks = [f"rank {c[place]} on {details[c[place]][0]}" for c in wrong for place in places]
    named = ", ".join(ranks) if right else f"one of {' and '.join(ranks)}"
    return f"{what} differ in {pairs[0][1]}: {named} has wrong bits. {REMEDY}"
