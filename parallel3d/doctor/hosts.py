"""Checks of each rank's process and host: versions, clock, folders, limits, free space."""

import os
import platform
import resource
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
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

import parallel3d
from parallel3d.calibrate.measure_device import describe
from parallel3d.checkpoint.free_space import free_memory
from parallel3d.config import RunConfig
from parallel3d.data.cache import cache_root
from parallel3d.mesh.agree import on_first
from parallel3d.mesh.mesh import Mesh
from parallel3d.mesh.nodes import Nodes, wait_until

ALIKE = ("Python", "torch", "DeepSpeed", "parallel3d", "CUDA", "NCCL", "device")
_MOST_AHEAD = 1.0  # seconds between a clock and the median
_GIB = 2**30
_SHM = Path("/dev/shm")


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


def measure_host(config: RunConfig, mesh: Mesh) -> dict[str, object]:
    """Return the values of this rank by the names of the checks; sizes in bytes. Collective.

    The limits are the hard ones, which the library raises its soft limits to. The free memory is
    one rank's share, within the container's limit.
    """
    runs, has_gpu = Path(config.run.directory), torch.cuda.is_available()
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
    on_gpu, files = rows[0]["device"] != "CPU", 1024 + 8 * len(rows)
    zero, cache = config.zero_optimization, cache_root(config.data.cache)
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
            lambda ahead: abs(ahead) <= _MOST_AHEAD,
            lambda ahead: f"{abs(ahead):.2f} s {'ahead' if ahead >= 0 else 'behind'}",
            "synchronise the host's clock (chronyc makestep; timedatectl set-ntp true)",
        ),
        "run directory": (
            bool, lambda sees: "shared" if sees else "is not the folder that rank 0 writes to",
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
            partial(_at_least, files), _count,
            f"raise the limit to {files:,} or more (ulimit -n; Docker: --ulimit nofile={files})",
        ),
        "locked memory": (
            partial(_at_least, locked), _size,
            "raise the limit, for NVMe offload and InfiniBand (ulimit -l unlimited; Docker: "
            "--ulimit memlock=-1; Slurm: PropagateResourceLimitsExcept=MEMLOCK)",
        ),
        "shared memory": (
            partial(_at_least, _GIB if on_gpu and len(rows) > 1 else 0), _size,
            "enlarge /dev/shm, through which NCCL connects a host's ranks (Docker: --shm-size 1g)",
        ),
        "free memory per rank": (
            partial(_at_least, memory), _size,
            "end the other processes on the host, or leave it out",
        ),
        "free disk for runs": (
            partial(_at_least, _GIB), _size,
            "free some space, or set parallel3d.run.directory to another disk",
        ),
    }  # fmt: skip
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
        differences.append(now - median_low(row[0] for row in mesh.gather_floats([now])))
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
        mesh.gather_texts("", aside=True)  # the file stays until every rank has looked
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
