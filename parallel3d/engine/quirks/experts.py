"""ZeRO over ranks that divide the experts: DeepSpeed 0.19.8 shards an expert over its replicas.

It does so only for its own layers. These functions tell it of ours, and correct what it then
leaves out of the gradient norm (docs/deepspeed.md).
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups
from torch import Tensor, nn

from parallel3d.mesh.mesh import Mesh
from parallel3d.tensor.cut import HeldParameter, is_of_experts

NAME = "parallel3d_experts"


class ZeroInit(deepspeed.zero.Init):  # type: ignore[misc]
    """ZeRO-3's construction, which shards an expert over those of `shards` that hold it."""

    def __init__(self, mesh: Mesh, **options: object) -> None:
        self._shards = mesh.expert_shards.group
        super().__init__(data_parallel_group=mesh.shards.group, **options)

    def _convert_to_deepspeed_param(self, param: Any) -> None:
        if is_of_experts(param):
            param.ds_zero_partition_process_group = self._shards
        super()._convert_to_deepspeed_param(param)


@contextmanager
def sharded_by_zero12(parameters: Iterable[nn.Parameter], mesh: Mesh) -> Iterator[None]:
    """Initialise ZeRO-1 or 2 inside this context: experts are sharded over their replicas."""
    divided: list[Any] = [p for p in parameters if is_of_experts(p)]
    if not divided:
        yield
        return
    for parameter in divided:
        parameter.allreduce = False
        parameter.group_name = NAME
    known: dict[str, Any] = {
        "expert_parallel_group": {NAME: mesh.experts.group},
        "expert_data_parallel_group": {NAME: mesh.expert_shards.group},
    }
    groups._EXPERT_PARALLEL_GROUP |= known["expert_parallel_group"]
    groups._EXPERT_DATA_PARALLEL_GROUP |= known["expert_data_parallel_group"]
    original = DeepSpeedZeroOptimizer.__init__

    def with_experts(self: object, *args: object, **options: object) -> None:
        original(self, *args, **options | known | {"has_moe_layers": True})

    with patch.object(DeepSpeedZeroOptimizer, "__init__", with_experts):
        yield


def count_on_first_owner(held: Iterable[HeldParameter], mesh: Mesh) -> None:
    """Without shards, let the first owner of experts count what all owners hold copies of."""
    if mesh.experts.coord == 0:
        return
    for h in held:
        if not is_of_experts(h.parameter):
            h.parameter.model_parallel = False  # type: ignore[attr-defined]


def add_norms_of_owners(optimizer: ZeROOptimizer, mesh: Mesh) -> None:
    """Add the other owners' experts to ZeRO-3's norms; it sums over the shards of one expert."""

    def summed(original: Any, *args: Any) -> Tensor:
        norm: Tensor = original(*args)
        parameters = args[min(1, len(args) - 1)]
        if not is_of_experts(parameters[0]):
            return norm
        square = torch.where(norm < 0, torch.inf, norm.square()).to(mesh.device)
        dist.all_reduce(square, group=mesh.experts.group)
        total = square.sqrt().to(norm.device)
        return torch.where(total.isfinite(), total, -1.0)  # DeepSpeed marks an overflow by -1

    if mesh.experts.size > 1:
        for name in ("get_grad_norm_direct", "complete_grad_norm_calculation_for_cpu_offload"):
            setattr(optimizer, name, partial(summed, getattr(optimizer, name)))
