"""How a process computes on its device, and what a run's log says of it (floor 1)."""

import os

import torch
import torch.distributed as dist

from parallel3d.mesh.device import steering

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_DETERMINISTIC_CUBLAS = (":4096:8", ":16:8")  # those that torch takes for deterministic


def use(*, tf32: bool, deterministic: bool) -> None:
    """Set how this process computes, on whatever device it has.

    tf32: fp32 products of matrices keep 10 bits of mantissa, on devices that can do that.
    deterministic: the same bits from the same inputs; an operation that cannot raises RuntimeError.
    """
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    if deterministic != torch.are_deterministic_algorithms_enabled():  # to set it loads inductor
        torch.use_deterministic_algorithms(deterministic)
    if deterministic:
        # It would fill all memory that is yet to be written, which changes nothing that is read.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        if os.environ.get(_CUBLAS) not in _DETERMINISTIC_CUBLAS:
            os.environ[_CUBLAS] = _DETERMINISTIC_CUBLAS[0]


def describe(device: torch.device) -> list[str]:
    """What a run's log says of its devices: their name, NCCL, the variables that steer both.

    Empty on a CPU, which has none of it.
    """
    if device.type == "cpu":
        return []
    ask = getattr(torch.get_device_module(device), "get_device_name", None)
    name = str(ask(device)) if ask else device.type
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else ""
    first = f"device  {name}, torch {torch.__version__}{', NCCL ' if nccl else ''}{nccl}"
    return [first, *(f"        {variable}" for variable in steering())]
