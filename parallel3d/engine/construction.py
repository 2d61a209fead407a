"""How a stage's modules are made, and how their parameters are first written."""

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from deepspeed.utils import logger as deepspeed_logger
from torch import Tensor, nn

from parallel3d.engine import op_builds, swap
from parallel3d.engine.engine_settings import EngineSettings
from parallel3d.engine.quirks import core, fp16, nvme
from parallel3d.mesh.mesh import Mesh

_log = logging.getLogger(__name__)


class ModelParallelUnit:
    """The mesh in DeepSpeed's words: its `mp` is all that shares one copy of the model.

    `shard_axis` names the group that ZeRO cuts over: "dp", or "self" where nothing is cut.
    """

    def __init__(self, mesh: Mesh, shard_axis: str) -> None:
        self._mesh, self._shards = mesh, shard_axis

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._mesh.group(self._shards)

    def get_data_parallel_group_ranks(self) -> list[int]:
        return self._mesh.ranks(self._shards)

    def get_data_parallel_rank(self) -> int:
        return self._mesh.coord(self._shards)

    def get_data_parallel_world_size(self) -> int:
        return self._mesh.size(self._shards)

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self._mesh.group("model")

    def get_model_parallel_rank(self) -> int:
        return self._mesh.coord("model")

    def get_model_parallel_world_size(self) -> int:
        return self._mesh.size("model")


def building(
    settings: EngineSettings, mesh: Mesh, *, say: Callable[[str], None] = _log.info,
    beside: nn.Parameter | None = None,
) -> AbstractContextManager[Any]:  # fmt: skip
    """Return the context in which a stage's modules are made.

    Under ZeRO-3 each module is cut over dp before it is filled, so a stage never exists whole on a
    rank. Parameters made `beside` another share its folder on NVMe. Raises ConfigError if
    parameters cannot be offloaded to NVMe.
    """
    _quiet_deepspeed()
    core.skip_shared_memory_operator()
    if settings.precision == "fp16":
        fp16.allow_fp16_on_cpu(mesh.device)
    if not settings.shards_parameters:
        return _plain_building(settings.dtype, mesh.device)
    deepspeed.init_distributed(dist_init_required=False)
    swapper = getattr(beside, "nvme_swapper", None)
    if settings.offload_param == "nvme" and swapper is None:
        nvme.read_through_buffers()
        nvme.refuse_small_buffers()
        nvme.copy_out_of_buffers()
        folder = make_folder(settings.param_options, "param", mesh, say)
        options = settings.param_options | {"nvme_path": str(folder)}
        settings = replace(settings, param_options=options)
    sharding: AbstractContextManager[Any] = deepspeed.zero.Init(
        data_parallel_group=mesh.group("dp"),
        config_dict_or_path=settings.deepspeed_config(mesh.size("dp")),
        # No dtype: an explicit fp32 becomes bf16 where the device has no fp16 (0.19.8).
        mpu=ModelParallelUnit(mesh, "dp"),
        param_swapper=swapper,
    )
    return sharding


@contextmanager
def _plain_building(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(default)


@contextmanager
def writing(parameter: nn.Parameter) -> Iterator[tuple[Tensor, int]]:
    """Yield this rank's flat part of a parameter to be written, and the index of its first element.

    The index counts in the flattened tensor-parallel part. A part on NVMe is read and written back.
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


def make_folder(
    options: Mapping[str, Any], part: str, mesh: Mesh, say: Callable[[str], None]
) -> Path:
    """Load what NVMe offload of `part` ("param", "optimizer") needs; make the engine's folder."""
    op_builds.load_async_io(mesh, say)
    setting = f"zero_optimization.offload_{part}.nvme_path"
    return swap.make_folder(options["nvme_path"], mesh, setting)


def swap_folder(parameter: nn.Parameter) -> Path | None:
    """The folder that `building` swaps a parameter to; None where it is not on NVMe."""
    swapper = getattr(parameter, "nvme_swapper", None)
    # DeepSpeed appends zero_stage_3/<type>params/rank<n>.
    return None if swapper is None else Path(swapper.swap_folder).parents[2]


def _quiet_deepspeed() -> None:
    deepspeed_logger.setLevel(logging.ERROR)
    # DeepSpeed calls torch's collectives by names that torch has since changed.
    warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)
