"""Device memory that is not tensors: the CUDA context and the reserve of torch's allocator."""

from parallel3d.config.hardware import Hardware

CONTEXT = 1113 * 2**20
"""Bytes of a process's CUDA context and kernels: bigscience experiments/tr3m-1B3.md, "calibration"
(the same on a V100 of 16 GB and of 32 GB)."""
ALLOCATOR = 0.1
"""What torch's caching allocator reserves beyond the tensors at their fullest moment, as a share of
them: blocks that are free but of no fitting size. The same for every program and device. What runs
reported that had room to spare is 0.13 to 0.16 (published_memory.py, each group left out in turn);
an allocator that runs out first gives back what is free."""


def margin(tensors: int, hardware: Hardware | None) -> int:
    """Bytes of device memory beside `tensors` bytes of tensors; 0 where no GPU is named."""
    if hardware is None or hardware.cores is not None:
        return 0
    return CONTEXT + round(ALLOCATOR * tensors)
