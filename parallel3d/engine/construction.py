"""Build a stage's modules, and write the first values of their parameters."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal

import deepspeed
import torch
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from deepspeed.utils import logger as deepspeed_logger
from torch import Tensor, nn

from parallel3d.base.say import Say
from parallel3d.engine import op_builds, swap
from parallel3d.engine.engine_settings import EngineSettings
from parallel3d.engine.quirks import core, experts, fp16, nvme
from parallel3d.mesh.mesh import Mesh, Peers

_log = logging.getLogger(__name__)


def model_parallel_unit(model: Peers, shards: Peers) -> SimpleNamespace:
    """Return the mesh as DeepSpeed's model-parallel unit (`mpu`).

    DeepSpeed's model-parallel group is every rank that shares one copy of the model (pp x tp).
    `shards` are the ranks over which ZeRO shards, or this rank alone if nothing is sharded.
    """
    return SimpleNamespace(
        get_data_parallel_group=lambda: shards.group,
        get_data_parallel_group_ranks=lambda: shards.ranks,
        get_data_parallel_rank=lambda: shards.coord,
        get_data_parallel_world_size=lambda: shards.size,
        get_model_parallel_group=lambda: model.group,
        get_model_parallel_rank=lambda: model.coord,
        get_model_parallel_world_size=lambda: model.size,
    )


def building(
    settings: EngineSettings,
    mesh: Mesh,
    *,
    say: Say = _log.info,
    beside: nn.Parameter | None = None,
) -> AbstractContextManager[None]:
    """Return the context in which a stage's modules are constructed.

    Under ZeRO-3 each module is sharded over dp before it is initialised, so no rank ever holds a
    whole stage. Parameters constructed `beside` another one share its folder on NVMe. Raise
    ConfigError if parameters cannot be offloaded to NVMe.
    """
    deepspeed_logger.setLevel(logging.ERROR)
    # DeepSpeed calls torch's collectives by their deprecated names.
    warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)
    core.skip_shared_memory_operator()
    core.leave_muon_uncompiled()
    if settings.precision == "fp16":
        fp16.allow_fp16_on_cpu(mesh.device)
    if not settings.shards_parameters:
        return plain_building(settings.dtype, mesh.device)
    deepspeed.init_distributed(dist_init_required=False)
    swapper = getattr(beside, "nvme_swapper", None)
    if settings.zero.offload_param.device == "nvme" and swapper is None:
        nvme.read_through_buffers()
        nvme.copy_out_of_buffers()
        settings = with_swap_folder(settings, "offload_param", mesh, say)
    sharding: AbstractContextManager[None] = experts.ZeroInit(
        mesh,
        config_dict_or_path=settings.deepspeed_config(mesh.shards.size),
        # No dtype: DeepSpeed 0.19.8 turns an explicit fp32 into bf16 on devices without fp16.
        mpu=model_parallel_unit(mesh.model, mesh.shards),
        param_swapper=swapper,
    )
    return sharding


@contextmanager
def plain_building(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Construct whole modules of this dtype on this device inside the context."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(default)


@contextmanager
def writing(parameter: nn.Parameter) -> Iterator[tuple[Tensor, int]]:
    """Yield this rank's flat part of a parameter for writing, and the index of its first element.

    The index is into the flattened tensor-parallel part. A shard on NVMe is read, and written back
    on exit.
    """
    shard = getattr(parameter, "ds_tensor", None)
    if shard is None:
        yield parameter.data.view(-1), 0
        return
    swapped = shard.status is PartitionedParamStatus.NOT_AVAILABLE
    swapper: Any = parameter.nvme_swapper  # type: ignore[attr-defined]
    if swapped:
        swapper.swap_in([parameter], async_op=False)
    yield shard.data, shard.numel() * parameter.ds_process_group.rank()  # type: ignore[attr-defined]
    if swapped:
        swapper.swap_out_and_release([parameter])


def with_swap_folder(
    settings: EngineSettings,
    part: Literal["offload_optimizer", "offload_param"],
    mesh: Mesh,
    say: Say,
) -> EngineSettings:
    """Load async_io for the NVMe offload of `part`, and return the settings with its new folder."""
    op_builds.load_async_io(mesh, say)
    offload = getattr(settings.zero, part)
    path = f"zero_optimization.{part}.nvme_path"
    folder = swap.make_folder(str(offload.nvme_path), mesh, path)
    offload = offload.model_copy(update={"nvme_path": str(folder)})
    return replace(settings, zero=settings.zero.model_copy(update={part: offload}))
