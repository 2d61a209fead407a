"""Links between ranks: the time of a collective in each group of the mesh, and of a message."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from parallel3d.base.errors import ConfigError
from parallel3d.base.mesh_sizes import AXES
from parallel3d.calibrate.measure_device import Effort, collective, timings
from parallel3d.config.hardware import Hardware
from parallel3d.mesh.agree import gather_json
from parallel3d.mesh.mesh import Mesh
from parallel3d.mesh.nodes import Nodes
from parallel3d.plan.time.network import collective_seconds, send_seconds
from parallel3d.plan.time.operators import curves_for

SLOWER = 3.0
"""A group is slow if it takes this many times the seconds of others like it, or of the planner."""
NEIGHBOURS = "neighbours"
"""Pairs of ranks in a ring, in which neighbours are on different machines, if there are several."""


@dataclass(frozen=True)
class Timed:
    """The measured time of one group of ranks."""

    kind: str
    """The group's axis, or NEIGHBOURS."""
    ranks: tuple[int, ...]
    machines: tuple[str, ...]
    """The machines of the ranks, each once."""
    num_bytes: int
    """Bytes of the gathered tensor, or of the message."""
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes per second that a rank sends in a ring, or in a message."""
        share = 1 if self.kind == NEIGHBOURS else (len(self.ranks) - 1) / len(self.ranks)
        return share * self.num_bytes / self.seconds

    def expected(self, hardware: Hardware | None) -> float | None:
        """Return the planner's seconds; None if the hardware or its link is not described."""
        if hardware is None:
            return None
        curves, num_machines = curves_for(hardware), len(self.machines)
        try:
            if self.kind == NEIGHBOURS:
                return send_seconds(self.num_bytes, num_machines > 1, hardware, curves)
            size = len(self.ranks)
            per_node = -(-size // num_machines)
            return collective_seconds(
                "all_gather", self.num_bytes, size, per_node, hardware, curves
            )
        except ConfigError:
            return None


def measure(mesh: Mesh, nodes: Nodes, effort: Effort) -> Iterator[Timed]:
    """Yield the time of each group of each axis, and of neighbours. Collective.

    All groups of an axis work at once, as in training, on `effort.copied_bytes`.
    """
    size = effort.copied_bytes

    def timed(
        kind: str, groups: Sequence[Sequence[int]], run: Callable[[], object]
    ) -> Iterator[Timed]:
        rows = timings(run, mesh, effort)
        for ranks in groups:
            machines = tuple(dict.fromkeys(nodes.machines[rank] for rank in ranks))
            seconds = min(max(row[rank] for rank in ranks) for row in rows)
            yield Timed(kind, tuple(ranks), machines, size, seconds)

    for axis, peers in zip(AXES, (mesh.pipeline, mesh.samples, mesh.tensor), strict=True):
        if peers.size > 1:
            groups = {tuple(ranks) for ranks in gather_json(mesh, peers.ranks, aside=True)}
            run = collective("all_gather", size, peers, mesh.device)
            yield from timed(axis, sorted(groups), run)
    message = torch.ones(size // 4, device=mesh.device)
    for pairs in rounds(nodes) if mesh.world.size > 2 else ():
        yield from timed(NEIGHBOURS, pairs, _message(message, pairs, mesh))


def _message(
    tensor: torch.Tensor, pairs: Sequence[tuple[int, int]], mesh: Mesh
) -> Callable[[], object]:
    """Return this rank's part of the messages from the first to the second rank of each pair."""
    for here, there in pairs:
        if mesh.rank == here:
            return partial(dist.send, tensor, group=mesh.world.group, group_dst=there)
        if mesh.rank == there:
            return partial(dist.recv, tensor, group=mesh.world.group, group_src=here)
    return lambda: None


def rounds(nodes: Nodes) -> list[list[tuple[int, int]]]:
    """Return the pairs of a ring of all ranks, in rounds in which a rank is in one pair at most."""
    machines = nodes.machines
    place = {rank: machines[:rank].count(machine) for rank, machine in enumerate(machines)}
    ring = sorted(place, key=lambda rank: (place[rank], rank))
    pairs = [*zip(ring, ring[1:] + ring[:1], strict=True)]
    last = pairs[len(pairs) // 2 * 2 :]  # where their number is odd
    return [part for part in (pairs[: len(pairs) - len(last) : 2], pairs[1::2], last) if part]


def slow_groups(groups: Sequence[Timed]) -> list[Timed]:
    """Return the groups that are slower than others of their kind on as many machines.

    The reference is the group that a third are as fast as: one slow rank is in half of the pairs
    of four ranks.
    """

    def reference(group: Timed) -> float:
        like = [
            other.seconds
            for other in groups
            if (other.kind, len(other.machines)) == (group.kind, len(group.machines))
        ]
        return sorted(like)[(len(like) - 1) // 3]

    return [group for group in groups if group.seconds > SLOWER * reference(group)]


def common_ranks(groups: Sequence[Timed], nodes: Nodes) -> list[int]:
    """Return the ranks that all `groups` share, else those on machines that all share, else all."""
    ranks = set.intersection(*(set(group.ranks) for group in groups))
    machines = set.intersection(*(set(group.machines) for group in groups))
    every = {rank for group in groups for rank in group.ranks}
    return sorted(ranks or {r for r in every if nodes.machines[r] in machines} or every)
