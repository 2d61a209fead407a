"""Weights that ZeRO-3 keeps gathered for more than one microbatch, stage by stage.

DeepSpeed gathers a module's weights in hooks, for each microbatch anew. Where the program says when
(GATHER, RELEASE), the hooks are taken away. DeepSpeed's gather also loops over the ranks for each
weight (8 ms a layer at 512 ranks); here a layer's weights come in one buffer and one copy each.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor, nn

from parallel3d.engine.quirks import nvme
from parallel3d.mesh.transfer import all_gather_single

Layers = Mapping[int, Sequence[nn.Module]]  # of each stage of a rank


class GatheredWeights:
    """The weights of whole stages, gathered and released on request.

    A weight of two stages stays while one is gathered; what DeepSpeed keeps whole always stays.
    """

    def __init__(self, engine: Any, layers: Layers) -> None:
        self._layers = {
            stage: [list(dict.fromkeys(layer.parameters())) for layer in of_stage]
            for stage, of_stage in layers.items()
        }
        self._coming: dict[int, list[Any]] = {}
        self._holders: Counter[nn.Parameter] = Counter()
        self._gathered: set[int] = set()
        engine.optimizer.parameter_offload._remove_module_hooks()

    def gather(self, stage: int) -> None:
        """Start to gather a stage's weights, one collective a layer; collective over dp."""
        assert stage not in self._gathered, f"stage {stage} is gathered"
        self._gathered.add(stage)
        self._coming[stage] = handles = []
        for parameters in self._layers[stage]:
            todo = [p for p in parameters if not self._holders[p] and _is_cut(p)]
            swapped = [p for p in todo if nvme.is_on_nvme(p)]
            if there := [p for p in todo if not nvme.is_on_nvme(p)]:
                handles.append(_start_gather(there))
            while swapped:  # what they are read into are a few buffers for all
                swapper: Any = swapped[0].nvme_swapper  # type: ignore[attr-defined]
                few = swapped[: max(1, swapper.available_swap_in_buffers())]
                few[0].all_gather_coalesced(few).wait()  # type: ignore[attr-defined]
                if not get_accelerator().is_synchronized_device():
                    # The next read from NVMe must not overwrite what is still being copied.
                    get_accelerator().current_stream().synchronize()
                swapper.remove_partition_and_release_buffers(few)
                del swapped[: len(few)]
            self._holders.update(parameters)

    def wait(self, stage: int) -> None:
        """Wait for a stage's weights: whatever is computed, or queued, after may use them."""
        assert stage in self._gathered, f"stage {stage} has no weights: no GATHER before it"
        coming = deque(self._coming.pop(stage, ()))
        while coming:  # a layer's buffer goes once it is copied out of it
            coming.popleft().wait()

    def release(self, stage: int) -> None:
        """Free a stage's weights; the shards stay."""
        self.wait(stage)
        self._gathered.discard(stage)
        for parameters in self._layers[stage]:
            for parameter in parameters:
                self._holders[parameter] -= 1
                if not self._holders[parameter] and not parameter.ds_persist:  # type: ignore[attr-defined]
                    parameter.partition()  # type: ignore[attr-defined]


@dataclass(frozen=True)
class _Gather:
    """Weights on their way: `buffer` [ranks, a rank's shards of all of them one after another]."""

    parameters: Sequence[Any]
    buffer: Tensor
    work: dist.Work

    def wait(self) -> None:
        """Give each parameter its weights, once they are there."""
        self.work.wait()
        start = 0
        for parameter in self.parameters:
            length = parameter.ds_tensor.ds_numel
            padded = self.buffer.narrow(1, start, length).flatten()  # [ranks * length]
            parameter.data = padded[: parameter.ds_numel].view(parameter.ds_shape)
            parameter.ds_status = ZeroParamStatus.AVAILABLE
            start += length


def _start_gather(parameters: Sequence[Any]) -> Any:
    """Start to gather parameters of one type; return the handle to wait for."""
    group = parameters[0].ds_process_group
    if group.size() == 1:
        return parameters[0].all_gather_coalesced(parameters)
    device = get_accelerator().current_device_name()
    shards = torch.cat([p.ds_tensor.data.to(device, non_blocking=True) for p in parameters])
    buffer = shards.new_empty((group.size(), len(shards)))
    for parameter in parameters:
        parameter.ds_status = ZeroParamStatus.INFLIGHT
    work = all_gather_single(buffer.flatten(), shards, group=group, async_op=True)
    return _Gather(parameters, buffer, work)


def _is_cut(parameter: nn.Parameter) -> bool:
    return parameter.ds_status is ZeroParamStatus.NOT_AVAILABLE  # type: ignore[attr-defined]
