"""The C++ operators that offload needs.

Operators are compiled on first use, and again for another version of torch or DeepSpeed. A killed
build leaves a file named `lock`, on which torch before 2.14 would wait forever; ours names its
process. Later versions hold a lock of the kernel on it, which ends with its process.
"""

import logging
import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from deepspeed.git_version_info import installed_ops
from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder, PinMemoryBuilder
from torch.utils import cpp_extension
from torch.utils.file_baton import FileBaton

from parallel3d.base import lock
from parallel3d.base.errors import ConfigError
from parallel3d.base.say import Say
from parallel3d.engine.quirks import core, nvme
from parallel3d.mesh.mesh import Mesh
from parallel3d.mesh.pulse import rank as pulse

_log = logging.getLogger(__name__)
_BUILD_SECONDS = 900.0  # longer than any build takes
_QUIET_SECONDS = 60.0  # after which a build of which nothing is seen counts as killed


class _BuildLock(FileBaton):
    """torch's build lock, which names its holder, and whose wait ends."""

    def try_acquire(self) -> bool:
        """Create the lock file; return False if it exists."""
        is_ours = bool(super().try_acquire())
        if is_ours:
            path = Path(self.lock_file_path)
            path.write_text(lock.Lock(path).this_process.model_dump_json())
        return is_ours

    def wait(self) -> None:
        """Wait for another process's build; raise ConfigError if that is killed."""
        path = Path(self.lock_file_path)
        if not _is_released(path):
            path.unlink(missing_ok=True)
            raise ConfigError(f"{path.parent}: the build was killed; start the same command again")


def _is_released(path: Path) -> bool:
    """Wait for a build lock; return True if it is released, False if its builder is dead.

    Raises ConfigError if the build takes too long.
    """
    start = time.monotonic()
    last_change = start
    files = _times(path.parent)
    while (holder := lock.read(path)) is not None:
        now = time.monotonic()
        if files != (files := _times(path.parent)):
            last_change = now
        is_alive = holder.is_alive()
        is_silent = is_alive is None and now - last_change > _QUIET_SECONDS
        if (is_alive is False or is_silent) and not _is_worked_in(path.parent):
            return False
        if now - start > _BUILD_SECONDS:
            raise ConfigError(
                f"{path}: this build lock was not released within {_BUILD_SECONDS:.0f} s; if "
                "no other process is compiling, a build was killed: delete the file"
            )
        time.sleep(0.1)
    return True


def _times(folder: Path) -> dict[str, int]:
    """Return when each file of a folder was changed, in nanoseconds, by its name."""
    times = {}
    for file in folder.iterdir():
        with suppress(FileNotFoundError):
            times[file.name] = file.stat().st_mtime_ns
    return times


def _is_worked_in(folder: Path) -> bool:
    """Return True if a process of this machine, such as a compiler, has it as its directory.

    A compiler may outlive the process that started it.
    """
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if Path(process.cwd()) == folder.resolve():
                return True
    return False


def load_cpu_adam(mesh: Mesh, say: Say) -> bool:
    """Compile or load DeepSpeed's CPU Adam; return False if it cannot be compiled.

    One rank of each node goes first, and all ranks return the same. Without CPU Adam, torch's Adam
    computes the same on the host, more slowly.
    """
    problem = _load_everywhere([CPUAdamBuilder], mesh, say)
    if problem:
        say(f"using torch's Adam on the host, because cpu_adam cannot be compiled: {problem}")
    return not problem


def use_host_threads(device: torch.device, local_size: int, say: Say) -> None:
    """Let Adam on the host of an accelerator use this rank's share of the node's cores.

    Without OMP_NUM_THREADS every rank would use all cores. A user's number is respected; 1 under
    torchrun is not one, because torchrun sets it where there is none.
    """
    number = os.environ.get("OMP_NUM_THREADS")
    by_torchrun = number == "1" and "TORCHELASTIC_RUN_ID" in os.environ
    if device.type == "cpu" or (number and not by_torchrun):  # on CPUs the mesh sets them
        return
    threads = max(1, (os.cpu_count() or 1) // local_size)
    if threads != torch.get_num_threads():  # say it for the first engine only
        torch.set_num_threads(threads)
        say(f"threads per rank for Adam on the host: {threads}")


def load_async_io(mesh: Mesh, say: Say) -> None:
    """Compile or load DeepSpeed's async_io; collective.

    Raise ConfigError on all ranks if it cannot be compiled on one.
    """
    problem = _load_everywhere([PinMemoryBuilder, AsyncIOBuilder], mesh, say)
    if problem:
        raise ConfigError(
            "NVMe offload needs DeepSpeed's async_io, which cannot be compiled: "
            f"{problem}. Install a C++ compiler and libaio's headers on every node (libaio-dev on "
            'Debian and Ubuntu, libaio-devel on Fedora), or offload to "cpu"'
        )
    nvme.refuse_unlockable_memory(AsyncIOBuilder().load(verbose=False).aio_handle)


def _load_everywhere(builders: list[type], mesh: Mesh, say: Say) -> str:
    """Load operators on all ranks, one rank of each node first; return the problem, or ""."""
    problem = ""
    with mesh.one_at_a_time() as first:
        # On any error this rank must still reach the end of the block: its peers wait there.
        try:
            for builder in builders:
                _load(builder(), say if first else _log.info)
        except Exception as error:  # build errors have no common type
            problem = _reason(error)
    return next(filter(None, mesh.messages.gather_texts(problem)), "")


def _reason(error: Exception) -> str:
    """Return the line of a failed build with the compiler's error, else the first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    errors = (x for x in lines if re.search(r"\berror: |: cannot find |undefined reference", x))
    # At most 300 characters: torch puts the whole command line first.
    return next(errors, lines[0] if lines else repr(error))[:300]


def _load(builder: Any, say: Say) -> None:
    core.read_cpu_info_from_proc()
    name = builder.name
    if not installed_ops.get(name):
        waits_for_file = hasattr(cpp_extension, "FileBaton")  # torch 2.14 has none
        if waits_for_file:
            cpp_extension.FileBaton = _BuildLock  # type: ignore[misc]
        directory = Path(cpp_extension._get_build_directory(name, verbose=False))
        path = directory / "lock"
        if path.exists() and waits_for_file:
            say(
                f"waiting for another process to compile DeepSpeed's {name}; if there is none, "
                f"that is noticed within {_QUIET_SECONDS:.0f} s, or at once if you delete {path}"
            )
            if not _is_released(path):
                say(f"the process that compiled DeepSpeed's {name} was killed; compiling it again")
                path.unlink(missing_ok=True)
        elif not (directory / f"{name}.so").exists():
            say(f"compiling DeepSpeed's {name} (once for this installation; up to minutes)")
        pulse.doing(f"loading or compiling DeepSpeed's {name}")
    builder.load(verbose=False)
