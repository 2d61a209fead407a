"""Which accelerator a process has, how it computes on it, and what a log says of it (floor 1)."""

import os

import torch
import torch.distributed as dist

from parallel3d.base.errors import ConfigError
from parallel3d.mesh.launch import Launch


def settle_accelerator() -> str:
    """Tell DeepSpeed the type of this machine's accelerators, "cpu" without any, and give it.

    DeepSpeed would ask the machine itself, which starts CUDA's driver: a process that is forked
    from this one afterwards could use no GPU.
    """
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = found.type if found else "cpu"
    if kind in ("cpu", "cuda"):  # of others it knows better than we do
        os.environ.setdefault("DS_ACCELERATOR", kind)
    return kind


def pick_device(launch: Launch) -> torch.device:
    """The accelerator of this process, or the CPU where there is none.

    A launcher may show each process one device alone, its own (`srun --gpus-per-task=1`).
    """
    set_allocator()
    kind = settle_accelerator()
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    index = 0 if count == 1 else launch.local_rank
    if index >= count:
        raise ConfigError(
            f"local rank {index} has no device: this node shows {count}; start at most "
            f"{count} processes here"
        )
    torch.accelerator.set_device_index(index)
    return torch.device(kind, index)


def identity_of(device: torch.device) -> str:
    """Return what tells a device from all others of its machine; "" if that is unknown."""
    if device.type == "cpu":
        return ""
    properties = torch.get_device_module(device).get_device_properties(device)
    return str(getattr(properties, "uuid", ""))


def claim_device(identity: str, launch: Launch, store: dist.Store) -> None:
    """Raise ConfigError if another rank uses the same device: NCCL wants one for each rank."""
    if not identity:
        return
    owner = int(store.compare_set(f"device {identity}", "", str(launch.rank)))
    if owner != launch.rank:
        raise ConfigError(
            f"ranks {owner} and {launch.rank} have one device, {identity}: NCCL wants one for "
            "each; start as many processes on a node as it has devices, or let the launcher show "
            "each process one of its own (srun --gpus-per-task=1)"
        )


# Read once, before the first allocation; torch takes one of them.
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_STEERING = ("NCCL_", "RCCL_", "TORCH_NCCL_", "GLOO_", "TORCH_GLOO_", "CUDA_DEVICE_MAX_CONNECTIONS")


def set_allocator() -> None:
    """Let the device's allocator grow its segments, unless the user has set it up.

    Pipeline stages hold tensors of many lifetimes, which fragment segments of fixed sizes.
    """
    if not any(name in os.environ for name in _ALLOCATOR):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def steering() -> list[str]:
    """The variables that steer devices, those that are set, as NAME=value in order of name."""
    return [
        f"{name}={value}"
        for name, value in sorted(os.environ.items())
        if name.startswith((*_STEERING, *_ALLOCATOR))
    ]


_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_DETERMINISTIC_CUBLAS = (":4096:8", ":16:8")  # those that torch takes for deterministic


def set_numerics(*, tf32: bool, deterministic: bool) -> None:
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


def pin_collectives() -> None:
    """Fix the order in which NCCL sums, unless the user has set it; call it before groups exist.

    NCCL otherwise selects its algorithm by message size and topology. With rings and without NVLS
    the order depends only on the ranks' placement on nodes.
    """
    for name, value in (("NCCL_ALGO", "Ring"), ("NCCL_NVLS_ENABLE", "0")):
        os.environ.setdefault(name, value)


def describe_device(device: torch.device) -> list[str]:
    """The lines of a log on an accelerator: its name, NCCL, the variables that steer both."""
    if device.type == "cpu":
        return []
    ask = getattr(torch.get_device_module(device), "get_device_name", None)
    name = str(ask(device)) if ask else device.type
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else ""
    first = f"device  {name}, torch {torch.__version__}{', NCCL ' if nccl else ''}{nccl}"
    return [first, *(f"        {variable}" for variable in steering())]
