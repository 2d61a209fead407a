"""Compare checksums of everything that several ranks hold, and name the rank that is wrong."""

import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import permutations, product
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest.mock import patch
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from parallel3d.checkpoint.chunk_runs import bit_sum, global_boxes
from parallel3d.checkpoint.state import Position
from parallel3d.engine import Engine
from parallel3d.mesh.agree import gather_json
from parallel3d.mesh.mesh import Mesh
from parallel3d.mesh.pulse import rank as pulse
from parallel3d.pipeline.executor import Executor
from parallel3d.schedule.schedule import Action
from parallel3d.tensor.cut import HeldParameter, is_of_experts
from parallel3d.train.assembly import Assembly
from parallel3d.train.observer import Observer, Rewind, Step

_MASK = 2**52 - 1  # checksums travel as floats of 53 bits
_REPLICAS = "data-parallel replicas"
_EXPERTS = "replicas of experts"
_SHARDS = "copies of shards"
_TP = "tensor-parallel copies"
_TIED = "tied weights"
_NORM = "gradient norms"

REMEDY = (
    "Leave out this host, whose memory or device may be faulty, and start again from the last "
    "checkpoint"
)

Messages = Mapping[tuple[str, bool], Tensor]
"""Checksums of messages in a step, by their receiving action and whether this rank sent them."""


class Row(NamedTuple):
    """The digest of a value."""

    place: str
    bits: int
    """The sum of the value's bits."""
    norm: float


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
    if not digests:
        return []
    rows = torch.stack([*digests]).cpu()  # [places, 2]
    norms = rows[:, 1].contiguous().view(torch.float64)
    columns = (places, rows[:, 0].tolist(), norms.tolist())
    return [Row(*row) for row in zip(*columns, strict=True)]


class WrongBits(Rewind):
    """Ranks differ in what must be the same; raised on all of them."""


class CopyCheck(Observer):
    """Compares what several ranks hold or have sent, every `train.check_bits.every` steps."""

    collectives = "all_gather of checksums, after every check_bits.every steps"

    def __init__(self, every: int, mesh: Mesh, parts: Assembly, position: Position) -> None:
        stages = parts.schedule.pp_coord_of_stage
        self.every = every
        self._mesh = mesh
        self._parts = parts
        self._ends = stages[0], stages[-1]
        self.vouched = position.step

    @contextmanager
    def around(self, step: Step) -> Iterator[None]:
        """Note what is sent in a step that is checked."""
        with noting_messages(self._parts.executor, self.is_due(step)) as notes:
            self._messages = notes
            yield

    def after(self, step: Step) -> None:
        """Raise WrongBits if ranks differ in what they must all hold."""
        if self.is_due(step):
            done = step.end.step
            pulse.doing(f"comparing the ranks' bits after step {done}")
            norm = step.done.grad_norm
            check_bits(self._parts.engine, self._mesh, norm, self._ends, self._messages)
            self.vouched = done

    def rewound(self, position: Position, state: Mapping[str, Any]) -> None:
        """Vouch for no more than the checkpoint's step."""
        self.vouched = position.step


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
    agree the others are wrong; of two copies either may be. ZeRO's shards have copies over dp only
    with mesh.dp_shards.

    - `norm`: this rank's gradient norm of the step.
    - `ends`: pipeline coordinates of the first and the last stage, which may share a weight.
    - `messages`: this rank's messages of the step, which must have arrived as they were sent.
    """
    sums = _checksums(engine, mesh.device)
    zero = torch.zeros((), dtype=torch.int64, device=mesh.device)
    balance = zero
    for (receive, is_sent), total in messages.items():
        weight = crc32(receive.encode()) | 1  # so that two that are swapped change the sum
        if not is_sent:
            weight = -weight
        balance = balance + total * weight
    copies = [sum(by_name.values(), zero) & _MASK for by_name in sums.values()]
    rows = mesh.messages.gather_floats([*copies, norm, balance & _MASK])
    sizes = [peers.size for peers in (mesh.pipeline, mesh.replicas, mesh.tensor)]
    grid = np.arange(len(rows)).reshape(sizes)
    if sum(int(row[-1]) for row in rows) & _MASK:
        raise WrongBits(_wrong_messages(messages, mesh, grid))
    columns = [*sums, _NORM]
    cp_ep = (mesh.context.size, mesh.experts.size)
    num_shards = mesh.shards.size if engine.settings.zero.stage > 0 else 1
    for what, peers in _copies(grid, ends, num_shards, cp_ep):
        column = columns.index(what)
        values: list[int | str] = []
        for ranks in peers:
            if what == _NORM:
                values.append(str(rows[ranks[0]][column]))  # NaN equals NaN as text
            else:
                values.append(sum(int(rows[rank][column]) for rank in ranks) & _MASK)
        (usual, count), *others = Counter(values).most_common()
        if others:
            own = {name: int(total) & _MASK for name, total in sums.get(what, {}).items()}
            details = gather_json(mesh, [socket.gethostname(), own])
            right = peers[values.index(usual)] if 2 * count > len(peers) else None
            wrong = [ranks for ranks, value in zip(peers, values, strict=True) if value != usual]
            raise WrongBits(_message(what, right, wrong if right else peers, details))


def _wrong_messages(messages: Messages, mesh: Mesh, grid: np.ndarray) -> str:
    """Return a text that names the messages that did not arrive as they were sent. Collective."""
    own: tuple[dict[str, int], dict[str, int]] = ({}, {})
    for (name, is_sent), total in messages.items():
        own[0 if is_sent else 1][name] = int(total)
    rows = gather_json(mesh, [f"rank {mesh.rank} on {socket.gethostname()}", *own])
    texts = []
    for pipeline in grid.reshape(len(grid), -1).T:
        pairs = permutations([rows[rank] for rank in pipeline], 2)
        for (sender, sent, _), (receiver, _, received) in pairs:
            names = {total: name for name, total in sent.items()}
            for name, total in received.items():
                if sent.get(name, total) != total:
                    swapped = f": those of {names[total]}" if total in names else ""
                    text = f"{receiver} received other bits in {name} than {sender} sent"
                    texts.append(f"{text}{swapped}")
    return (
        f"{'; '.join(texts[:4])}. Check the network and its drivers between these hosts, and start "
        "again from the last checkpoint"
    )


def _checksums(engine: Engine, device: torch.device) -> dict[str, dict[str, Tensor]]:
    """Return the checksums of parameters that other ranks hold too, by kind of copy and name."""
    kinds_of_all = (_REPLICAS, _EXPERTS, _SHARDS, _TP, _TIED)
    sums: dict[str, dict[str, Tensor]] = {what: {} for what in kinds_of_all}
    stage = engine.settings.zero.stage
    has_copies = engine.mesh.copies.size > 1

    def add(what: str, name: str, total: Tensor) -> None:
        sums[what][name] = sums[what].get(name, 0) + total.to(device)

    for h in engine.held if stage < 3 else ():
        shape = h.parameter.shape
        what = _EXPERTS if is_of_experts(h.parameter) else _REPLICAS
        add(what, h.name, bit_sum(h.parameter.detach(), [0] * len(shape), shape))
    for number, block in enumerate(engine.states.blocks):
        kinds_of_copy = [_kinds_of_copy(piece.held, stage, has_copies) for piece in block]
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


def _kinds_of_copy(held: HeldParameter, zero_stage: int, has_copies: bool) -> list[str]:
    """Return the kinds of copy of a parameter's state that other ranks hold.

    - `has_copies`: other ranks hold copies of this rank's shards.
    """
    kinds = [_SHARDS] if has_copies else []
    if zero_stage == 0:
        kinds.append(_EXPERTS if is_of_experts(held.parameter) else _REPLICAS)
    if not held.cut.parts:
        kinds.append(_TP)
    if held.tied_across:
        kinds.append(_TIED)
    return kinds


def _copies(
    grid: np.ndarray, ends: tuple[int, int], num_shards: int, cp_ep: tuple[int, int]
) -> Iterator[tuple[str, list[list[int]]]]:
    """Yield each kind of copy with its peers, the ranks whose checksums add up to one copy's.

    `grid` [pp, dp, tp] has the global ranks. If the state is sharded over dp, those of a copy are
    `num_shards` neighbours along dp, because unlike stages have unlike shards. With `cp_ep`, the
    sizes of these axes, rank d of dp x cp owns the experts of d // cp % ep.
    """
    pp, dp, tp = grid.shape
    cp, ep = cp_ep
    shards = [range(d, d + num_shards) for d in range(0, dp, num_shards)]
    for p, t, place in product(range(pp), range(tp), range(num_shards)):
        yield _SHARDS, [[int(rank)] for rank in grid[p, place::num_shards, t]]
    for p, t in product(range(pp), range(tp)):
        yield _REPLICAS, [[int(rank)] for rank in grid[p, :, t]]
        for e in range(ep) if ep > 1 else ():
            owners = [d for d in range(dp) if d // cp % ep == e]
            yield _EXPERTS, [[int(grid[p, d, t])] for d in owners]
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
    names = []
    places = []
    for place, like in enumerate(reference):
        for copy in wrong:
            totals = details[like][1].items()
            others = details[copy[place]][1].values()
            for (name, total), other in zip(totals, others, strict=False):
                if total != other:
                    names.append(name)
                    places.append(place)
    ranks = []
    for copy in wrong:
        for place in dict.fromkeys(places or [0]):
            ranks.append(f"rank {copy[place]} on {details[copy[place]][0]}")
    named = ", ".join(ranks) if right else f"one of {' and '.join(ranks)}"
    first = names[0] if names else what
    return f"{what} differ in {first}: {named} has wrong bits. {REMEDY}"
