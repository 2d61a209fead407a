"""The optimizer that DeepSpeed shards, and the compiled operators that offload may need.

They are compiled on their first use, and anew for another torch or DeepSpeed. A build that was
killed leaves a file named `lock`, on which torch would wait for ever.
"""

import logging
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from deepspeed.git_version_info import installed_ops
from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder, PinMemoryBuilder
from torch.utils import cpp_extension
from torch.utils.file_baton import FileBaton

from parallel3d.base.errors import ConfigError
from parallel3d.engine.quirks import core, nvme
from parallel3d.mesh.mesh import Mesh
from parallel3d.mesh.pulse import rank as pulse

_log = logging.getLogger(__name__)
_ABOUT = {"cpu_adam": "about 30 s", "pin_memory": "about 30 s", "async_io": "some minutes"}
_WHY = re.compile(r"\berror: |: cannot find |undefined reference")
_LONGEST = 300  # characters of a reason: before its own words torch puts the whole command
_BUILD_SECONDS = 900.0  # longer than any build takes


class _Baton(FileBaton):
    """torch's build lock; gives up on a build that takes longer than any does."""

    def wait(self) -> None:
        lock, start = Path(self.lock_file_path), time.monotonic()
        while lock.exists():
            if time.monotonic() - start > _BUILD_SECONDS:
                raise ConfigError(
                    f"{lock}: no build released this lock within {_BUILD_SECONDS:.0f} s; if no "
                    "other process compiles there, a build was killed: delete the file"
                )
            time.sleep(self.wait_seconds)


def load_cpu_adam(mesh: Mesh, say: Callable[[str], None]) -> bool:
    """Compile or load DeepSpeed's CPU Adam, one rank of each node first; False if it cannot be.

    Every rank gets the same answer; torch's Adam then does the same on the host, more slowly.
    """
    problem = _load_everywhere([CPUAdamBuilder], mesh, say)
    if problem:
        say(f"using torch's Adam on the host, because cpu_adam cannot be compiled: {problem}")
    return not problem


def load_async_io(mesh: Mesh, say: Callable[[str], None]) -> None:
    """Compile or load DeepSpeed's async_io; collective: raises ConfigError on all ranks."""
    problem = _load_everywhere([PinMemoryBuilder, AsyncIOBuilder], mesh, say)
    if problem:
        raise ConfigError(
            "NVMe offload needs DeepSpeed's async_io, which cannot be compiled: "
            f"{problem}. Install libaio's headers on every node (libaio-dev on Debian and Ubuntu, "
            'libaio-devel on Fedora) and a C++ compiler, or offload to "cpu"'
        )
    nvme.refuse_unlockable_memory(AsyncIOBuilder().load(verbose=False).aio_handle)


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
        if (lock := directory / "lock").exists():
            say(
                f"waiting for another process that compiles DeepSpeed's {name}; if there is none, "
                f"a build was killed: delete {lock}"
            )
        elif not (directory / f"{name}.so").exists():
            about = f"once for this installation; {_ABOUT[name]} on idle cores"
            say(f"compiling DeepSpeed's {name} ({about})")
        pulse.doing(f"loading or compiling DeepSpeed's {name}")
    builder.load(verbose=False)


def make_optimizer(
    groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float,
    cpu_adam: bool, device: torch.device,
) -> torch.optim.Optimizer:  # fmt: skip
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
