"""Check the machines of a launch before a run, and name the rank or host that differs.

Compares each rank's process and host (versions, clock, folders, limits, free space), and the speed
of a collective in each group of the mesh and of messages between neighbours.
"""

import os
import platform
import resource
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from operator import eq
from pathlib import Path
from statistics import median, median_low
from tempfile import NamedTemporaryFile
from typing import Any

import torch
import torch.distributed as dist

import parallel3d
from parallel3d.base.errors import ConfigError
from parallel3d.base.mesh_sizes import AXES
from parallel3d.checkpoint.free_space import free_memory
from parallel3d.config import RunConfig
from parallel3d.config.hardware import Hardware
from parallel3d.data.cache import cache_root
from parallel3d.extras.calibrate.measure_device import Effort, collective, describe, timings
from parallel3d.mesh.agree import gather_json, on_first
from parallel3d.mesh.mesh import Mesh
from parallel3d.mesh.nodes import Nodes, find_nodes, wait_until
from parallel3d.mesh.pulse import rank as pulse
from parallel3d.plan.time.network import collective_seconds, send_seconds
from parallel3d.plan.time.operators import curves_for
from parallel3d.train.known_hardware import described_hardware

ALIKE = ("Python", "torch", "DeepSpeed", "parallel3d", "CUDA", "NCCL", "device")
_GIB = 2**30
_SHM = Path("/dev/shm")
SLOWER = 3.0
"""A group is slow if others like it, or the planner's figure, are this many times as fast."""
NEIGHBOURS = "neighbours"
"""Pairs of ranks in a ring, in which neighbours are on different machines, if there are several."""


@dataclass(frozen=True)
class Check:
    """One row of the table."""

    name: str
    value: str
    """The measured values as text; the outliers with their hosts."""
    outliers: tuple[int, ...] = ()
    """The ranks on which the check fails; empty if it passes."""
    remedy: str = ""
    """The remedy; empty if the check passes."""


def check(config: RunConfig, mesh: Mesh, effort: Effort | None = None) -> list[Check]:
    """Return the checks of all ranks, the same on each. Collective.

    `effort` has the seconds and the bytes of each measurement of a link.
    """
    num_bytes = 2**24 if mesh.device.type == "cpu" else 2**26
    nodes = find_nodes(mesh)
    hardware = described_hardware(config, mesh.device)
    pulse.doing("comparing hosts")
    rows = gather_json(mesh, measure_host(config, mesh), aside=True)
    pulse.doing("measuring links")
    effort = effort or Effort(seconds=0.5, copied_bytes=num_bytes)
    groups = list(measure_links(mesh, nodes, hardware, effort))
    name = hardware.name if hardware else ""
    return [*check_hosts(config, rows, nodes), *check_links(groups, nodes, name)]


def measure_host(config: RunConfig, mesh: Mesh) -> dict[str, object]:
    """Return the values of this rank by the names of the checks; sizes in bytes. Collective.

    The limits are the hard ones, which the library raises its soft limits to. The free memory is
    one rank's share, within the container's limit.
    """
    runs = Path(config.run.directory)
    has_gpu = torch.cuda.is_available()
    return {
        "Python": platform.python_version(),
        "torch": str(torch.__version__),
        "DeepSpeed": version("deepspeed"),
        "parallel3d": parallel3d.__version__,
        "CUDA": torch.version.cuda or "none",
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if has_gpu else "none",
        "device": describe(mesh)[0] or "CPU",
        "clock": _seconds_ahead(mesh),
        "run directory": _sees(runs, mesh),
        "data cache": _sees(cache_root(config.data.cache), mesh),
        "open files": resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        "locked memory": resource.getrlimit(resource.RLIMIT_MEMLOCK)[1],
        "shared memory": shutil.disk_usage(_SHM).total if _SHM.exists() else 0,
        "free memory per rank": free_memory(mesh.local_size),
        "free disk for runs": shutil.disk_usage(_existing(runs)).free,
    }


def check_hosts(
    config: RunConfig, rows: Sequence[Mapping[str, Any]], nodes: Nodes
) -> Iterator[Check]:
    """Yield the checks of all ranks' values, `rows` by rank."""
    on_gpu = rows[0]["device"] != "CPU"
    files = 1024 + 8 * len(rows)
    zero = config.zero_optimization
    cache = cache_root(config.data.cache)
    on_nvme = "nvme" in (zero.offload_optimizer.device, zero.offload_param.device)
    locked = _GIB if on_nvme or (on_gpu and len(set(nodes.machines)) > 1) else 0
    memory = max(_GIB / 4, median(row["free memory per rank"] for row in rows) / 2)
    usual = {name: Counter(row[name] for row in rows).most_common(1)[0][0] for name in ALIKE}
    rules: dict[str, tuple[Callable[[Any], bool], Callable[[Any], str], str]] = {
        **{
            name: (partial(eq, usual[name]), str, f"use the same {name} on every host")
            for name in ALIKE
        },
        "clock": (
            lambda ahead: abs(ahead) <= 1.0,  # seconds from the median
            lambda ahead: f"{abs(ahead):.2f} s {'ahead' if ahead >= 0 else 'behind'}",
            "synchronise the host's clock (chronyc makestep; timedatectl set-ntp true)",
        ),
        "run directory": (
            bool,
            lambda sees: "shared" if sees else "is not the folder that rank 0 writes to",
            "set parallel3d.run.directory to a folder that rank 0 can write to and all hosts "
            f"share, or mount {Path(config.run.directory).absolute()} there",
        ),
        "data cache": (
            # Without a shared cache each host prepares its own corpus.
            lambda sees: sees or rows[0]["data cache"],
            lambda sees: "shared" if sees else "not shared: each host prepares its own corpus",
            f"set parallel3d.data.cache to a folder that can be written, unlike {cache}",
        ),
        "open files": (
            partial(_at_least, files),
            _count,
            f"raise the limit to {files:,} or more (ulimit -n; Docker: --ulimit nofile={files})",
        ),
        "locked memory": (
            partial(_at_least, locked),
            _size,
            "raise the limit, for NVMe offload and InfiniBand (ulimit -l unlimited; Docker: "
            "--ulimit memlock=-1; Slurm: PropagateResourceLimitsExcept=MEMLOCK)",
        ),
        "shared memory": (
            partial(_at_least, _GIB if on_gpu and len(rows) > 1 else 0),
            _size,
            "enlarge /dev/shm, through which NCCL connects a host's ranks (Docker: --shm-size 1g)",
        ),
        "free memory per rank": (
            partial(_at_least, memory),
            _size,
            "end the other processes on the host, or leave it out",
        ),
        "free disk for runs": (
            partial(_at_least, _GIB),
            _size,
            "free some space, or set parallel3d.run.directory to another disk",
        ),
    }
    ranks_of_host = Counter(nodes.hosts).items()
    yield Check("hosts", ", ".join(f"{host} (ranks: {count})" for host, count in ranks_of_host))
    for name, (is_right, show, remedy) in rules.items():
        values = [row[name] for row in rows]
        right = [show(value) for value in sorted(values) if is_right(value)]
        text = " to ".join(dict.fromkeys(right[:1] + right[-1:]))
        if outliers := tuple(rank for rank, value in enumerate(values) if not is_right(value)):
            wrong = ", ".join(dict.fromkeys(show(values[rank]) for rank in outliers))
            others = f"; the others: {text}" if text else ""
            yield Check(name, f"{nodes.in_words(outliers)}: {wrong}{others}", outliers, remedy)
        else:
            yield Check(name, text)


def _seconds_ahead(mesh: Mesh) -> float:
    """Return how far this rank's clock is ahead of the median of all ranks' clocks. Collective."""
    differences = []
    for _ in range(5):  # the smallest difference is the one with the least delay
        mesh.barrier()
        now = time.time()
        differences.append(now - median_low(row[0] for row in mesh.messages.gather_floats([now])))
    return min(differences, key=abs)


def _sees(folder: Path, mesh: Mesh) -> bool:
    """Return True if a file that rank 0 writes to `folder` is there on this rank. Collective.

    The file is removed again. A folder that does not exist is created by a run, so its nearest
    parent that exists is used.
    """
    with ExitStack() as stack:

        def write() -> str:
            with suppress(OSError):
                file = NamedTemporaryFile(prefix=".doctor-", dir=_existing(folder))  # noqa: SIM115
                return Path(stack.enter_context(file).name).name
            return ""

        name = on_first(mesh, write)
        seen = bool(name) and wait_until(lambda: os.path.exists(_existing(folder) / name), 2.0)
        mesh.messages.gather_texts("", aside=True)  # the file stays until every rank has looked
    return seen


def _existing(folder: Path) -> Path:
    # Path.exists would raise for a folder that may not be entered.
    return next(path for path in (folder, *folder.parents) if os.path.exists(path))


def _at_least(least: float, limit: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= least


def _count(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}"


def _size(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit / 2**20:,.0f} MiB"


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
        size = min(2**18, effort.copied_bytes)
        rows = timings(run_of(size), mesh, effort)
        if effort.copied_bytes / size * min(map(max, rows)) < 0.5:
            size = effort.copied_bytes
            rows = timings(run_of(effort.copied_bytes), mesh, effort)
        for ranks in members:
            num_machines = len({nodes.machines[rank] for rank in ranks})
            sent = size if kind == NEIGHBOURS else size * (len(ranks) - 1) / len(ranks)
            seconds = min(max(row[rank] for rank in ranks) for row in rows)
            planned = _planned_seconds(kind, size, len(ranks), num_machines, hardware)
            yield Timed(
                kind,
                tuple(ranks),
                num_machines,
                sent / seconds,
                sent / planned if planned else None,
            )


def slow_network(config: RunConfig, mesh: Mesh, nodes: Nodes) -> str:
    """Return a warning if a group over several machines is slower than described, else "".

    Collective; about two seconds. NCCL falls back to TCP in silence where a fabric is missing or
    broken, and a run is then 20 times slower.
    """
    hardware = described_hardware(config, mesh.device)
    pulse.doing("measuring the links between hosts")
    groups = measure_links(mesh, nodes, hardware, Effort(seconds=0.1, copied_bytes=2**24))
    slow = [
        group
        for group in groups
        if group.num_machines > 1 and group.planned and SLOWER * group.rate < group.planned
    ]
    if not slow or hardware is None:
        return ""
    rows = check_links(slow, nodes, hardware.name)
    words = [f"{row.name} {row.value}; {row.remedy}" for row in rows if row.name != "slow links"]
    return f"WARNING: below a third of what is described: {'; '.join(words)}"


def _message(size: int, pairs: Sequence[tuple[int, int]], mesh: Mesh) -> Callable[[], object]:
    """Return this rank's part of the messages from the first to the second rank of each pair."""
    tensor = torch.ones(size // 4, device=mesh.device)
    group = mesh.world.group
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
                "all_gather",
                size,
                num_ranks,
                -(-num_ranks // num_machines),
                hardware,
                curves_for(hardware),
            )
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
        late: set[int] = set()
        for group in alike:
            if group.planned and SLOWER * group.rate < group.planned:
                late.update(group.ranks)
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
