"""The variables that steer devices and their communication (floor 1, no torch)."""

import os

# Read once, before the first allocation; torch takes one of them.
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_STEERING = ("NCCL_", "RCCL_", "TORCH_NCCL_", "GLOO_", "TORCH_GLOO_", "CUDA_DEVICE_MAX_CONNECTIONS")


def set_allocator() -> None:
    """Let the device's allocator grow its segments, unless the user has set it up.

    Stages of a pipeline hold tensors of many lifetimes, which fragment segments of fixed sizes. To
    be called before the device is used.
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
