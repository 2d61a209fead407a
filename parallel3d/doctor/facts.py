"""The state of each rank's process and host: versions, clock, folders, limits, free space."""

import os
import platform
import resource
import shutil
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median_low
from tempfile import NamedTemporaryFile

import torch

import parallel3d
from parallel3d.calibrate.measure_device import describe
from parallel3d.checkpoint.free_space import free_memory
from parallel3d.config import RunConfig
from parallel3d.data.cache import cache_root
from parallel3d.mesh.agree import gather_json, on_first
from parallel3d.mesh.mesh import Mesh
from parallel3d.mesh.nodes import wait_until

UNLIMITED = 2**63
_SHM = Path("/dev/shm")
_ROUNDS = 5  # readings of all clocks; the smallest difference has the least delay


@dataclass(frozen=True)
class Facts:
    """The state of one rank; sizes in bytes."""

    versions: dict[str, str]
    """The version of each part of the software, by its name."""
    device: str
    """Name of the accelerator; "CPU" without one."""
    device_used: float
    """Fraction of the accelerator's memory that is in use; 0 on a CPU."""
    seconds_ahead: float
    """How far the clock is ahead of the median of all ranks' clocks."""
    sees_runs: bool
    """True if a file that rank 0 writes to the run directory is there on this rank."""
    sees_cache: bool
    """The same for the data cache."""
    open_files: int
    """The most open files of the process; UNLIMITED without a limit, as in `locked_memory`."""
    locked_memory: int
    shared_memory: int
    """Size of /dev/shm; 0 if there is none."""
    free_memory: int
    """Free host memory for each rank of the host, within the container's limit."""
    free_disk: int
    """Free space on the disk of the run directory."""


def gather_facts(config: RunConfig, mesh: Mesh) -> list[Facts]:
    """Return the facts of every rank, by rank. Collective."""
    runs, cache = folders_of(config)
    shm = shutil.disk_usage(_SHM).total if _SHM.exists() else 0
    device, used = "CPU", 0.0
    if mesh.device.type != "cpu":
        device, _ = describe(mesh)
        if ask := getattr(torch.get_device_module(mesh.device), "mem_get_info", None):
            free, total = ask(mesh.device)
            used = 1 - free / total
    own = Facts(
        versions_here(), device, used, seconds_ahead(mesh), sees(runs, mesh), sees(cache, mesh),
        _limit(resource.RLIMIT_NOFILE), _limit(resource.RLIMIT_MEMLOCK), shm,
        free_memory(mesh.local_size), shutil.disk_usage(_existing(runs)).free,
    )  # fmt: skip
    return [Facts(**row) for row in gather_json(mesh, asdict(own), aside=True)]


def folders_of(config: RunConfig) -> tuple[Path, Path]:
    """Return the directory of runs and the data cache."""
    return Path(config.run.directory), cache_root(config.data.cache)


def versions_here() -> dict[str, str]:
    """Return the versions that must be the same on every rank, by name."""
    versions = {
        "Python": platform.python_version(),
        "torch": str(torch.__version__),
        "DeepSpeed": version("deepspeed"),
        "parallel3d": parallel3d.__version__,
        "CUDA": torch.version.cuda or "none",
    }
    if torch.cuda.is_available():
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return versions


def seconds_ahead(mesh: Mesh) -> float:
    """Return how far this rank's clock is ahead of the median of all ranks' clocks. Collective."""
    differences = []
    for _ in range(_ROUNDS):
        mesh.barrier()
        now = time.time()
        differences.append(now - median_low(row[0] for row in mesh.gather_floats([now])))
    return min(differences, key=abs)


def sees(folder: Path, mesh: Mesh) -> bool:
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


def _limit(kind: int) -> int:
    """Return the hard limit, which the library raises its soft limits to."""
    _, hard = resource.getrlimit(kind)
    return UNLIMITED if hard == resource.RLIM_INFINITY else hard
