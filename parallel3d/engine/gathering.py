"""Gather ZeRO-3's weights stage by stage and keep them for several microbatches.

DeepSpeed gathers a module's weights in hooks, again for each microbatch. If the program has GATHER
and RELEASE actions, the hooks are removed and these functions are called instead. DeepSpeed's
gather also loops over the ranks for each weight (8 ms per layer at 512 ranks). Here one collective
gathers a layer's weights into one buffer, and one copy per weight takes them out.
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

Layers = Mapping[int, Sequence[nn.Module]]  # the layers of each of a rank's stages


class GatheredWeights:
    """Gathers and releases the weights of a stage on request.

    A weight that two stages share stays gathered while either needs it.
    """

    def __init__(self, engine: Any, layers: Layers) -> None:
        self._layers: dict[int, list[list[Any]]] = {}
        for stage, of_stage in layers.items():
            self._layers[stage] = [list(layer.parameters()) for layer in of_stage]
        # By gathered stage, the gathers that were not waited for yet.
        self._coming: dict[int, deque[Any]] = {}
        self._holders: Counter[nn.Parameter] = Counter()
        engine.optimizer.parameter_offload._remove_module_hooks()

    def gather(self, stage: int) -> None:
        """Start to gather a stage's weights, one collective per layer; collective over dp."""
        handles = deque[Any]()
        self._coming[stage] = handles
        for parameters in self._layers[stage]:
            swapped: list[Any] = []
            in_memory: dict[Any, list[Any]] = {}  # by group: experts have fewer ranks
            for p in parameters:
                if self._holders[p] or p.ds_status is not ZeroParamStatus.NOT_AVAILABLE:
                    continue
                if nvme.is_on_nvme(p):
                    swapped.append(p)
                else:
                    in_memory.setdefault(p.ds_process_group, []).append(p)
            handles.extend(map(_start_gather, in_memory.values()))
            while swapped:
                # Gather as many at a time as there are free swap buffers.
                swapper = swapped[0].nvme_swapper
                batch = swapped[: max(1, swapper.available_swap_in_buffers())]
                batch[0].all_gather_coalesced(batch).wait()
                if not get_accelerator().is_synchronized_device():
                    # The next read from NVMe must not overwrite what is still being copied.
                    get_accelerator().current_stream().synchronize()
                swapper.remove_partition_and_release_buffers(batch)
                del swapped[: len(batch)]
            self._holders.update(parameters)

    def wait(self, stage: int) -> None:
        """Wait for a stage's weights; work that is queued afterwards may use them."""
        while self._coming[stage]:
            # A layer's buffer is free as soon as its weights are copied out.
            self._coming[stage].popleft().wait()

    def release(self, stage: int) -> None:
        """Free a stage's gathered weights, but not the shards."""
        self.wait(stage)
        del self._coming[stage]
        for parameters in self._layers[stage]:
            for parameter in parameters:
                self._holders[parameter] -= 1
                if not self._holders[parameter]:
                    parameter.partition()


@dataclass(frozen=True)
class _Gather:
    """A gather in progress: `buffer` is [ranks, the concatenated shards of one rank]."""

    parameters: Sequence[Any]
    buffer: Tensor
    work: dist.Work

    def wait(self) -> None:
        """Wait for the collective, and copy each parameter's weights out of the buffer."""
        self.work.wait()
        start = 0
        for parameter in self.parameters:
            length = parameter.ds_tensor.ds_numel
            padded = self.buffer.narrow(1, start, length).flatten()  # [ranks * length]
            parameter.data = padded[: parameter.ds_numel].view(parameter.ds_shape)
            parameter.ds_status = ZeroParamStatus.AVAILABLE
            start += length


def _start_gather(parameters: Sequence[Any]) -> Any:
    """Start to gather parameters of one dtype; return a handle with `wait`."""
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
