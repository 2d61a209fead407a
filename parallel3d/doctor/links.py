"""Checks of links: the speed of a collective in each group of the mesh, and of messages."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from parallel3d.base.errors import ConfigError
from parallel3d.base.mesh_sizes import AXES
from parallel3d.calibrate.measure_device import Effort, collective, timings
from parallel3d.config.hardware import Hardware
from parallel3d.doctor.hosts import Check
from parallel3d.mesh.agree import gather_json
from parallel3d.mesh.mesh import Mesh
from parallel3d.mesh.nodes import Nodes
from parallel3d.plan.time.network import collective_seconds, send_seconds
from parallel3d.plan.time.operators import curves_for

SLOWER = 3.0
"""A group is slow if others like it, or the planner's figure, are this many times as fast."""
_PROBE, _LONGEST = 2**18, 0.5  # bytes that are sent first; seconds that all bytes may take
NEIGHBOURS = "neighbours"
"""Pairs of ranks in a ring, in which neighbours are on different machines, if there are several."""


@dataclass(frozen=True)
class Timed:
    """The measured speed of one group of ranks."""

    kind: str
    """The group's axis, or NEIGHBOURS."""
    ranks: tuple[int, ...]
    num_machines: int
    rate: float
    """Bytes per second that a rank sends."""
    planned: float | None = None
    """The planner's rate; None if the hardware or its link is not described."""


def measure_links(
    mesh: Mesh, nodes: Nodes, hardware: Hardware | None, effort: Effort
) -> Iterator[Timed]:
    """Yield the speed of each group of each axis, and of neighbours. Collective.

    All groups of an axis work at once, as in training, on `effort.copied_bytes`; on less where
    that would take too long, as on a link that has fallen back to 10 Mbit/s.
    """
    work: list[tuple[str, Sequence[Sequence[int]], Callable[[int], Callable[[], object]]]] = []
    for axis, peers in zip(
        AXES, (mesh.pipeline, mesh.samples, mesh.context, mesh.tensor), strict=True
    ):
        if peers.size > 1:
            groups = {tuple(ranks) for ranks in gather_json(mesh, peers.ranks, aside=True)}
            gather = partial(collective, "all_gather", peers=peers, device=mesh.device)
            work.append((axis, sorted(groups), gather))
    pairings = rounds(nodes) if mesh.world.size > 2 else []
    work += [(NEIGHBOURS, pairs, partial(_message, pairs=pairs, mesh=mesh)) for pairs in pairings]
    for kind, members, run_of in work:
        size = min(_PROBE, effort.copied_bytes)
        rows = timings(run_of(size), mesh, effort)
        if effort.copied_bytes / size * min(map(max, rows)) < _LONGEST:
            size, rows = effort.copied_bytes, timings(run_of(effort.copied_bytes), mesh, effort)
        for ranks in members:
            num_machines = len({nodes.machines[rank] for rank in ranks})
            sent = size if kind == NEIGHBOURS else size * (len(ranks) - 1) / len(ranks)
            seconds = min(max(row[rank] for rank in ranks) for row in rows)
            planned = _planned_seconds(kind, size, len(ranks), num_machines, hardware)
            yield Timed(
                kind, tuple(ranks), num_machines, sent / seconds,
                sent / planned if planned else None,
            )  # fmt: skip


def _message(size: int, pairs: Sequence[tuple[int, int]], mesh: Mesh) -> Callable[[], object]:
    """Return this rank's part of the messages from the first to the second rank of each pair."""
    tensor, group = torch.ones(size // 4, device=mesh.device), mesh.world.group
    for here, there in pairs:
        if mesh.rank == here:
            return partial(dist.send, tensor, group=group, group_dst=there)
        if mesh.rank == there:
            return partial(dist.recv, tensor, group=group, group_src=here)
    return lambda: None


def _planned_seconds(
    kind: str, size: int, num_ranks: int, num_machines: int, hardware: Hardware | None
) -> float | None:
    with suppress(ConfigError):  # the hardware's link or network is not described
        if hardware and kind == NEIGHBOURS:
            return send_seconds(size, num_machines > 1, hardware, curves_for(hardware))
        if hardware:
            return collective_seconds(
                "all_gather", size, num_ranks, -(-num_ranks // num_machines), hardware,
                curves_for(hardware),
            )  # fmt: skip
    return None


def rounds(nodes: Nodes) -> list[list[tuple[int, int]]]:
    """Return the pairs of a ring of all ranks, in rounds in which a rank is in one pair at most."""
    machines = nodes.machines
    place = {rank: machines[:rank].count(machine) for rank, machine in enumerate(machines)}
    ring = sorted(place, key=lambda rank: (place[rank], rank))
    pairs = [*zip(ring, ring[1:] + ring[:1], strict=True)]
    even = len(pairs) // 2 * 2  # the last pair of an odd ring has a round of its own
    return [part for part in (pairs[:even:2], pairs[1:even:2], pairs[even:]) if part]


def slow_groups(groups: Sequence[Timed]) -> list[Timed]:
    """Return the groups that are slower than others of their kind on as many machines.

    The reference is the rate that a third of them reach: one slow rank is in half of the pairs of
    four ranks.
    """
    rates: dict[tuple[str, int], list[float]] = {}
    for group in sorted(groups, key=lambda group: -group.rate):
        rates.setdefault((group.kind, group.num_machines), []).append(group.rate)
    usual = {key: alike[(len(alike) - 1) // 3] for key, alike in rates.items()}
    return [g for g in groups if SLOWER * g.rate < usual[g.kind, g.num_machines]]


def common_ranks(groups: Sequence[Timed], nodes: Nodes) -> tuple[int, ...]:
    """Return the ranks that all `groups` share, else those on machines that all share, else all."""
    members = [set(group.ranks) for group in groups]
    machines = set.intersection(*({nodes.machines[rank] for rank in ranks} for ranks in members))
    every = set.union(*members)
    on_these = {rank for rank in every if nodes.machines[rank] in machines}
    return tuple(sorted(set.intersection(*members) or on_these or every))


def check_links(groups: Sequence[Timed], nodes: Nodes, hardware_name: str) -> Iterator[Check]:
    """Yield a check of each kind of link beside the hardware file, and one of slow links."""
    for kind in dict.fromkeys(group.kind for group in groups):
        alike = [group for group in groups if group.kind == kind]
        late = {r for g in alike if g.planned and SLOWER * g.rate < g.planned for r in g.ranks}
        value = f"{_span(group.rate for group in alike)} GB/s"
        if planned := [group.planned for group in alike if group.planned]:
            value += f"; {hardware_name}: {_span(planned)}"
        remedy = (
            f"{nodes.in_words(sorted(late))}: check cables, drivers and the interface that NCCL "
            "and gloo use (NCCL_DEBUG=INFO, NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME)"
        )
        yield Check(f"links: {kind}", value, tuple(sorted(late)), remedy if late else "")
    slow = slow_groups(groups)
    if slow:
        outliers = common_ranks(slow, nodes)
        kinds = ", ".join(dict.fromkeys(group.kind for group in slow))
        value = f"{nodes.in_words(outliers)}: common to {len(slow)} slow groups ({kinds})"
        remedy = (
            f"others are over {SLOWER:g} times as fast; check network and load, or leave it out"
        )
        yield Check("slow links", value, outliers, remedy)
    elif groups:
        yield Check("slow links", "none")


def _span(rates: Iterable[float]) -> str:
    """Return the smallest and the largest rate as text, in GB/s."""
    texts = [f"{1e-9 * rate:.3g}" for rate in sorted(rates)]
    return " to ".join(dict.fromkeys((texts[0], texts[-1])))
