"""The optimizer that DeepSpeed shards, and the compiled operators that offload may need.

DeepSpeed's CPU Adam and its asynchronous input and output are compiled on their first use (half a
minute of g++, and some minutes), and anew where another torch or DeepSpeed had built them. A build
that was killed leaves a file named `lock`, on which every later run would wait for ever; so it is
looked after.
"""

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from deepspeed.git_version_info import installed_ops
from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder, PinMemoryBuilder
from torch.utils import cpp_extension
from torch.utils.file_baton import FileBaton

from parallel3d.base.errors import ConfigError
from parallel3d.engine.quirks import core
from parallel3d.mesh.mesh import Mesh
from parallel3d.pulse import rank as pulse

_log = logging.getLogger(__name__)
_ABOUT = {
    "cpu_adam": "about 30 s",
    "pin_memory": "about 30 s",
    "async_io": "some minutes",
}
_WHY = re.compile(r"\berror: |: cannot find |undefined reference")
_LONGEST = 300  # characters of a reason: before its own words torch puts the whole command
_LOOK_SECONDS = 1.0  # between looks for a compiler; ninja that finds nothing to do is gone sooner
_STARTUP_SECONDS = 30.0  # between taking the lock and starting the compiler
_UNSEEN_SECONDS = 600.0  # a whole build, where its processes may be another machine's
_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "9p", "fuse.sshfs"}


def remove_stale_lock(directory: Path, startup_seconds: float | None = None) -> bool:
    """Remove a build lock whose build is dead; gives whether there was one.

    A build is alive while some process holds the lock open (torch does) or has the build directory
    as its working directory (ninja and the compilers do), and in any case for `startup_seconds`
    after it took the lock: by default half a minute, and ten on a network file system, where the
    build may be another machine's.
    """
    lock = directory / "lock"
    if startup_seconds is None:
        startup_seconds = _UNSEEN_SECONDS if _is_shared(directory) else _STARTUP_SECONDS
    try:
        age = time.time() - lock.stat().st_mtime
    except FileNotFoundError:
        return False
    if age < startup_seconds or _is_busy(directory):
        return False
    lock.unlink(missing_ok=True)
    _log.warning("removed a stale build lock, %.0f s old: %s", age, lock)
    return True


def _is_busy(directory: Path) -> bool:
    directory = directory.resolve()
    for process in psutil.process_iter():
        if _works_in(process, directory):
            return True
        try:
            if any(Path(file.path) == directory / "lock" for file in process.open_files()):
                return True
        except (psutil.Error, OSError):  # gone meanwhile, or not ours to look into
            continue
    return False


def _works_in(process: psutil.Process, directory: Path) -> bool:
    """Whether a directory is a process's working directory, as it is of ninja and the compilers."""
    try:
        return Path(process.cwd()) == directory.resolve()
    except (psutil.Error, OSError):
        return False


def _is_shared(directory: Path) -> bool:
    """Whether other machines may build there, too."""
    directory = directory.resolve()
    mounts = [p for p in psutil.disk_partitions(all=True) if directory.is_relative_to(p.mountpoint)]
    deepest = max(mounts, key=lambda p: len(p.mountpoint), default=None)
    return deepest is not None and deepest.fstype in _NETWORK


def wait_for_build(directory: Path) -> None:
    """Wait until no living process builds an operator in a directory."""
    while (directory / "lock").exists() and not remove_stale_lock(directory):
        time.sleep(0.05)


class _Baton(FileBaton):
    """torch's build lock, which does not outlive the build that one waits for."""

    def wait(self) -> None:
        wait_for_build(Path(self.lock_file_path).parent)


def load_cpu_adam(mesh: Mesh, say: Callable[[str], None]) -> bool:
    """Compile or load DeepSpeed's CPU Adam, one rank of each node first; False if it cannot be.

    Where it cannot be compiled, torch's Adam does the same on the host. Every rank gets the same
    answer: one rank with another optimizer would still train right, but not at the same speed.
    """
    problem = _load_everywhere([CPUAdamBuilder], mesh, say)
    if problem:
        say(f"using torch's Adam on the host, because cpu_adam cannot be compiled: {problem}")
    return not problem


def load_async_io(mesh: Mesh, say: Callable[[str], None]) -> None:
    """Compile or load DeepSpeed's asynchronous input and output, one rank of each node first.

    Collective: raises ConfigError on all ranks if one of them cannot.
    """
    problem = _load_everywhere([PinMemoryBuilder, AsyncIOBuilder], mesh, say)
    if problem:
        raise ConfigError(
            "NVMe offload needs DeepSpeed's async_io, which cannot be compiled: "
            f"{problem}. Install libaio's headers on every node (libaio-dev on Debian and Ubuntu, "
            'libaio-devel on Fedora) and a C++ compiler, or offload to "cpu"'
        )


def _load_everywhere(builders: list[type], mesh: Mesh, say: Callable[[str], None]) -> str:
    """Load operators on all ranks, one of each node first; what went wrong, the same on all."""
    problem = ""
    with mesh.one_at_a_time() as first:
        # Whatever goes wrong, this rank's peers wait at the end of this block.
        try:
            for builder in builders:
                _load(builder(), say if first else _log.info)
        except Exception as error:  # the compiler's own errors have no common type
            problem = _reason(error)
    problems = mesh.gather_texts(problem)
    failed = [p for p in problems if p]
    if not failed:
        return ""
    where = "" if len(failed) == len(problems) else f" (on {len(failed)} of {len(problems)} ranks)"
    return failed[0] + where


def _reason(error: Exception) -> str:
    """The line of a failed build that a compiler or linker says why in; else the first one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = (line for line in lines if _WHY.search(line))
    return next(told, lines[0] if lines else repr(error))[:_LONGEST]


def _load(builder: Any, say: Callable[[str], None]) -> None:
    core.read_cpu_quickly()
    name = builder.name
    if not installed_ops.get(name):
        cpp_extension.FileBaton = _Baton  # type: ignore[misc]
        directory = Path(cpp_extension._get_build_directory(name, verbose=False))
        if (directory / "lock").exists() and not remove_stale_lock(directory):
            say(f"waiting for another process that compiles DeepSpeed's {name}: {directory}")
            wait_for_build(directory)
        pulse.doing(f"loading or compiling DeepSpeed's {name}")
        with _telling_of_compiler(directory, name, say):
            builder.load(verbose=False)
    else:
        builder.load(verbose=False)


@contextmanager
def _telling_of_compiler(directory: Path, name: str, say: Callable[[str], None]) -> Iterator[None]:
    """Say once that an operator is compiled: at once if it never was, else when a compiler runs.

    torch alone knows whether what another installation built will do, and does not say.
    """
    text = (
        f"compiling DeepSpeed's {name} (once for this installation; {_ABOUT[name]} on idle cores)"
    )
    if not (directory / f"{name}.so").exists():
        say(text)
        yield
        return
    done = threading.Event()

    def look() -> None:
        while not done.wait(_LOOK_SECONDS):
            if any(_works_in(child, directory) for child in psutil.Process().children()):
                say(text)
                return

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    try:
        yield
    finally:
        done.set()
        looking.join()


def make_optimizer(
    groups: list[dict[str, Any]],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    cpu_adam: bool,
    device: torch.device,
) -> torch.optim.Optimizer:
    """AdamW over parameter groups that carry their own weight decay.

    `cpu_adam`: DeepSpeed's vectorised one for states on the host; else torch's, on CUDA and CPUs in
    one pass without temporaries (two of the size of all weights, where those lie flat).
    """
    if cpu_adam:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        adam: torch.optim.Optimizer = DeepSpeedCPUAdam(
            groups, lr=lr, betas=betas, eps=eps, weight_decay=0.0, adamw_mode=True
        )
        return adam
    fused = device.type in ("cuda", "cpu")
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, weight_decay=0.0, fused=fused)
