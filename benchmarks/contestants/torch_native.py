"""(c) torch alone: its pipelining over FSDP2 stages or tensor-parallel ones, or FSDP2 by itself."""

from contextlib import nullcontext

import common
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

after_imports = common.resident_bytes()
options = common.arguments(pp=2, tp=1, schedule="1F1B", keep=False)  # keep: do not reshard
dist.init_process_group("gloo")
pp = options.pp
tp = options.tp
dp = dist.get_world_size() // pp // tp
mesh = init_device_mesh("cpu", (pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))
here = mesh.get_local_rank("pp")
coord = mesh.get_local_rank("dp")
first, last = common.stage_bounds(pp)[here]
stage = torch.nn.Sequential(*common.layers()[first:last])
if tp > 1:
    columns = ("qkv", "up")
    rows = ("proj", "down")
    plan = dict.fromkeys(columns, ColwiseParallel()) | dict.fromkeys(rows, RowwiseParallel())
    for layer in stage:
        if isinstance(layer, common.Block):
            parallelize_module(layer, mesh["tp"], plan)
    if here == pp - 1:  # the logits stay cut over the vocabulary
        head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        parallelize_module(stage, mesh["tp"], {str(len(stage) - 1): head})
if dp > 1:
    for layer in (*stage, stage):
        fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=not options.keep)
parameters = list(stage.parameters())
optimizer = torch.optim.AdamW(
    parameters, lr=common.LR, weight_decay=common.WEIGHT_DECAY, foreach=tp == 1
)
count = common.GLOBAL // common.MICRO // dp


def vocabulary_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


loss_fn = vocabulary_loss if tp > 1 else common.loss_fn
if pp > 1:
    kind = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}[options.schedule]
    place = PipelineStage(stage, here, pp, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = kind(place, n_microbatches=count, loss_fn=loss_fn)


def clip() -> None:
    """The norm over shards by DTensor, over stages by hand."""
    kinds = {True: [], False: []}  # DTensors, and the plain tensors of norms and embedding
    for parameter in parameters:
        kinds[hasattr(parameter.grad, "full_tensor")].append(parameter)
    squares = torch.zeros(())
    for cut, some in kinds.items():
        if some:
            norm = get_total_norm([p.grad for p in some])
            squares += (norm.full_tensor() if cut else norm) ** 2
    if pp > 1:
        dist.all_reduce(squares, group=mesh.get_group("pp"))
    for some in filter(None, kinds.values()):
        clip_grads_with_norm_(some, common.CLIP, squares.sqrt())


def pipeline(tokens: Tensor, labels: Tensor) -> Tensor | None:
    if here == 0:
        schedule.step(tokens, return_outputs=False)
    elif here < pp - 1:
        schedule.step(return_outputs=False)
    else:
        losses = []
        schedule.step(target=labels, losses=losses, return_outputs=False)
        whole = [x.full_tensor() if hasattr(x, "full_tensor") else x for x in losses]
        return torch.stack(whole).detach().mean()
    return None


def alone(tokens: Tensor, labels: Tensor) -> Tensor | None:
    total = torch.zeros(())
    for number, (x, y) in enumerate(common.microbatches(tokens, labels)):
        final = number == count - 1
        stage.set_requires_gradient_sync(final)
        stage.set_is_last_backward(final)
        if options.keep:  # gathered once a step
            stage.set_reshard_after_backward(final)
        loss = loss_fn(stage(x), y) / count
        loss.backward()
        total += loss.detach()
    return total


def step(tokens: Tensor, labels: Tensor) -> Tensor | None:
    with loss_parallel() if tp > 1 else nullcontext():
        loss = (pipeline if pp > 1 else alone)(tokens, labels)
    clip()
    optimizer.step()
    optimizer.zero_grad()
    return loss


common.compete(options, step, dp_coord=coord, dp=dp, after_imports=after_imports)
dist.destroy_process_group()
