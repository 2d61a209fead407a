"""Remedies for faults of DeepSpeed 0.19.8 under NVMe offload, one function each.

DeepSpeed reads and writes past the page cache (O_DIRECT), which requires memory aligned to the
drive's blocks. If it is not aligned, DeepSpeed silently reads nothing and uses the buffer's old
contents.
"""

import ctypes
import mmap
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

from deepspeed.runtime.swap_tensor import optimizer_utils, partitioned_param_swapper
from deepspeed.runtime.zero import partition_parameters
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from torch import Tensor, nn

from parallel3d.base.errors import ConfigError

_Swapper = optimizer_utils.OptimizerSwapper
_ParamSwapper = partitioned_param_swapper.AsyncPartitionedParameterSwapper


def is_on_nvme(parameter: Any) -> bool:
    """True if ZeRO-3 keeps the parameter's shard on NVMe."""
    location = getattr(parameter.ds_tensor, "final_location", None)
    return bool(location == OffloadDeviceEnum.nvme)


def align_gradients() -> None:
    """Swap only the block-aligned part of each gradient in the optimizer's buffer.

    DeepSpeed trims a gradient's unaligned end but not its unaligned beginning. After a parameter
    whose size is no multiple of a block, gradients are therefore not read at all. The unaligned
    ends stay in host memory, at most two blocks per parameter.
    """
    _Swapper._adjust_for_misaligned_lengths = _cut_at_blocks


def _cut_at_blocks(
    swapper: Any, tensors: Sequence[Tensor], offsets: Sequence[int]
) -> tuple[list[Tensor], list[int]]:
    block = swapper.numel_alignment
    pieces = []
    starts = []
    for tensor, offset in zip(tensors, offsets, strict=True):
        size = tensor.numel()
        head = min(-offset % block, size)
        middle = (size - head) // block * block
        for start, length in ((0, head), (head, middle), (head + middle, size - head - middle)):
            if length:
                pieces.append(tensor.narrow(0, start, length))
                starts.append(offset + start)
    return pieces, starts


def read_through_buffers() -> None:
    """Read a parameter's shard into its swap buffer, then copy it to its destination.

    If the flat buffer of all parameters is page-locked, DeepSpeed reads directly into it, even
    where the shard's start is not aligned.
    """
    _ParamSwapper.swap_into_buffer = _swap_into_buffer


def _swap_into_buffer(swapper: Any, param: nn.Parameter, dest_buffer: Tensor) -> None:
    swapper.swap_in([param], async_op=False)
    dest_buffer.data.copy_(param.ds_tensor.data)  # type: ignore[attr-defined]
    swapper.remove_partition_and_release_buffers([param])


def copy_out_of_buffers() -> None:
    """Copy gathered parameters out of swap buffers.

    A rank that is alone in its group "gathers" by pointing at its shard, on a CPU at the swap
    buffer itself. The next parameter is read into the same buffer, so a weight that activation
    checkpointing saved for the backward would change.
    """
    for kind in (partition_parameters.NoGatherHandle, partition_parameters.NoGatherCoalescedHandle):
        _wrap(kind, "__init__", _make_and_copy)


def _make_and_copy(make: Callable[..., None], handle: object, params: Any) -> None:
    make(handle, params)
    several = params if isinstance(params, list) else [params]
    for param in several:
        if is_on_nvme(param) and param.data.data_ptr() == param.ds_tensor.data.data_ptr():
            param.data = param.data.clone()


def _wrap(kind: Any, name: str, function: Callable[..., Any]) -> None:
    """Let `function` stand for a method, which it gets first; once for the process."""
    method = getattr(kind, name)
    if not hasattr(method, "__wrapped__"):

        @wraps(method)
        def stand_in(*args: object) -> object:
            return function(method, *args)

        setattr(kind, name, stand_in)


def refuse_unlockable_memory(aio_handle: Any) -> None:
    """Raise ConfigError if a swap buffer cannot be locked in memory; DeepSpeed would abort.

    All swap buffers are allocated by this class. Ordinary users may often lock only 8 MiB.
    """
    _wrap(aio_handle, "new_cpu_locked_tensor", _allocate_or_refuse)


def _allocate_or_refuse(
    allocate: Callable[..., Tensor], handle: object, num_elements: int, example: Tensor
) -> Tensor:
    _check_lockable(num_elements * example.element_size())
    return allocate(handle, num_elements, example)


def _check_lockable(num_bytes: int) -> None:
    """Raise the soft limit to the hard one and try to lock as many bytes.

    Raise ConfigError if that fails.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
    with mmap.mmap(-1, max(num_bytes, 1)) as memory:
        start = ctypes.c_char.from_buffer(memory)
        address = ctypes.c_void_p(ctypes.addressof(start))
        is_locked = ctypes.CDLL(None).mlock(address, ctypes.c_size_t(num_bytes)) == 0
        del start  # the map cannot be closed while it is referenced
    if not is_locked:
        raise ConfigError(
            f"zero_optimization: NVMe offload needs to lock a buffer of {num_bytes / 2**20:.1f} "
            f"MiB in memory, but the limit is {hard / 2**20:.1f} MiB per process; raise it (ulimit "
            "-l unlimited; Docker: --ulimit memlock=-1; Slurm: "
            'PropagateResourceLimitsExcept=MEMLOCK), or offload to "cpu"'
        )


@contextmanager
def swapping_small_tensors(num_bytes: int) -> Iterator[None]:
    """Swap tensors of `num_bytes` or more; DeepSpeed keeps those below 1 MiB in memory."""
    with (
        patch.object(optimizer_utils, "MIN_AIO_BYTES", num_bytes),
        patch.object(partitioned_param_swapper, "MIN_AIO_BYTES", num_bytes),
    ):
        yield
