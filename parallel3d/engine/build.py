"""The optimizer that DeepSpeed shards, and the compiled operator that it may need.

DeepSpeed's CPU Adam is compiled on its first use (half a minute of g++). A build that was killed
leaves a file named `lock`, on which every later run waits for ever; so we look first.
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from deepspeed.ops.op_builder import CPUAdamBuilder
from torch.utils.cpp_extension import _get_build_directory

from parallel3d.mesh import Mesh

_log = logging.getLogger(__name__)
_OPERATOR = "cpu_adam"
_STARTUP_SECONDS = 30.0  # between taking the lock and starting the compiler


def remove_stale_lock(directory: Path, startup_seconds: float = _STARTUP_SECONDS) -> bool:
    """Remove a build lock whose build is dead; gives whether there was one.

    A build is alive while some process has the build directory as its working directory (ninja and
    the compilers do), and for `startup_seconds` after it took the lock.
    """
    lock = directory / "lock"
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
    for process in psutil.process_iter():
        try:
            if Path(process.cwd()) == directory:
                return True
        except (psutil.Error, OSError):
            continue
    return False


def _wait_for_build(directory: Path) -> None:
    """Until nobody builds there, or the one who did is dead."""
    while (directory / "lock").exists() and not remove_stale_lock(directory):
        time.sleep(0.2)


def load_cpu_adam(mesh: Mesh, say: Callable[[str], None]) -> bool:
    """Compile or load DeepSpeed's CPU Adam, one rank of each node first; False if it cannot be.

    Raises nothing: where there is no compiler, torch's Adam does the same on the host.
    """
    builder = CPUAdamBuilder()
    directory = Path(_get_build_directory(_OPERATOR, verbose=False))
    loaded = False
    with mesh.one_at_a_time() as first:
        _wait_for_build(directory)
        if first and not (directory / f"{_OPERATOR}.so").exists():
            say(f"compiling DeepSpeed's {_OPERATOR} (once on this machine, about 30 s)")
        try:
            builder.load(verbose=False)
            loaded = True
        except Exception as error:  # the compiler's own errors have no common type
            say(f"cannot compile {_OPERATOR}, using torch's Adam: {str(error).splitlines()[0]}")
    # One rank with another optimizer would still train right, but not at the same speed.
    return all(found == [1.0] for found in mesh.gather_floats([float(loaded)]))


def make_optimizer(
    groups: list[dict[str, Any]],
    lr: float,
    betas: tuple[float, float],
    eps: float,
    cpu_adam: bool,
    device: torch.device,
) -> torch.optim.Optimizer:
    """AdamW over parameter groups that carry their own weight decay.

    `cpu_adam`: DeepSpeed's vectorised one for states on the host; else torch's.
    """
    if cpu_adam:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        adam: torch.optim.Optimizer = DeepSpeedCPUAdam(
            groups, lr=lr, betas=betas, eps=eps, weight_decay=0.0, adamw_mode=True
        )
        return adam
    fused = device.type == "cuda"
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, weight_decay=0.0, fused=fused)
