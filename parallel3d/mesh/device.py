"""The accelerator of a process: which one, how it computes, how a log describes it (floor 1)."""

import os

import torch
import torch.distributed as dist

from parallel3d.base.errors import ConfigError
from parallel3d.mesh.launch import Launch


def settle_accelerator() -> str:
    """Return the type of this machine's accelerators ("cpu" without any), and tell it to DeepSpeed.

    DeepSpeed would detect it by starting CUDA's driver; processes that are forked afterwards could
    then use no GPU.
    """
    kind = "cpu"
    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
        kind = device.type if device else "cpu"
    if kind in ("cpu", "cuda"):  # DeepSpeed detects the other types itself
        os.environ.setdefault("DS_ACCELERATOR", kind)
    return kind


def pick_device(launch: Launch) -> torch.device:
    """Return the accelerator of this process, or the CPU where there is none.

    A launcher may make only one device visible to each process (`srun --gpus-per-task=1`).
    """
    set_allocator()
    kind = settle_accelerator()
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    index = 0 if count == 1 else launch.local_rank
    if index >= count:
        raise ConfigError(
            f"local rank {index} has no device: this node has {count}; start at most "
            f"{count} processes on it"
        )
    torch.accelerator.set_device_index(index)
    return torch.device(kind, index)


def limit_threads(device: torch.device, local_world_size: int) -> None:
    """Divide the machine's cores among its ranks, unless the user has set their threads.

    Otherwise each rank would start a thread for every core, and torch.compile up to 32 processes
    per rank.
    """
    cores = max(1, (os.cpu_count() or 1) // local_world_size)
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(cores)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(min(cores, 32)))


# torch reads one of these, once, before the first allocation.
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_STEERING = ("NCCL_", "RCCL_", "TORCH_NCCL_", "GLOO_", "TORCH_GLOO_", "CUDA_DEVICE_MAX_CONNECTIONS")


def set_allocator() -> None:
    """Let the device's allocator grow its segments, unless the user has configured it.

    Pipeline stages hold tensors of many lifetimes, which fragment segments of fixed size.
    """
    if not any(name in os.environ for name in _ALLOCATOR):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def device_variables() -> list[str]:
    """Return the environment variables that configure devices, as NAME=value, sorted by name."""
    return [
        f"{name}={value}"
        for name, value in sorted(os.environ.items())
        if name.startswith((*_STEERING, *_ALLOCATOR))
    ]


_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_DETERMINISTIC_CUBLAS = (":4096:8", ":16:8")  # torch accepts these as deterministic


def set_numerics(*, tf32: bool, deterministic: bool) -> None:
    """Set the precision and determinism of this process, on any device.

    - `tf32`: fp32 matrix products keep 10 bits of mantissa, on devices that support it.
    - `deterministic`: equal inputs produce equal bits; an operation that cannot do that raises
      RuntimeError.
    """
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    if deterministic != torch.are_deterministic_algorithms_enabled():  # setting it imports inductor
        torch.use_deterministic_algorithms(deterministic)
    if deterministic:
        # Filling memory that is written before it is read costs time and changes no result.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        if os.environ.get(_CUBLAS) not in _DETERMINISTIC_CUBLAS:
            os.environ[_CUBLAS] = _DETERMINISTIC_CUBLAS[0]


def pin_collectives() -> None:
    """Fix the order in which NCCL sums, unless the user has set it; call it before groups exist.

    NCCL otherwise selects its algorithm by message size and topology. With rings and without NVLS
    the order depends only on the ranks' placement on nodes.
    """
    os.environ.setdefault("NCCL_ALGO", "Ring")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")


def name_of_device(device: torch.device) -> str:
    """Return the model of an accelerator; the type of a device without one."""
    get_name = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(get_name(device)) if get_name else device.type


def describe_device(device: torch.device) -> list[str]:
    """Return the log lines that describe an accelerator: its name, NCCL, its variables."""
    if device.type == "cpu":
        return []
    first = f"device  {name_of_device(device)}, torch {torch.__version__}"
    if dist.is_nccl_available():
        first += f", NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    return [first, *(f"        {variable}" for variable in device_variables())]
