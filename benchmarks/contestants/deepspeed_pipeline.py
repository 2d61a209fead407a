"""(b) DeepSpeed's PipelineModule with ZeRO-1, which is the highest stage it goes with."""

import common
import deepspeed
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from torch import Tensor

after_imports = common.resident_bytes()
options = common.arguments(pp=2)
deepspeed.init_distributed(dist_backend="gloo")
dp = dist.get_world_size() // options.pp
model = PipelineModule(
    common.layers(), num_stages=options.pp, loss_fn=common.loss_fn, partition_method="uniform"
)
engine, *_ = deepspeed.initialize(
    model=model,
    model_parameters=[p for p in model.parameters() if p.requires_grad],
    config=common.deepspeed_config(1, dp),
)


def step(tokens: Tensor, labels: Tensor) -> Tensor | None:
    loss: Tensor = engine.train_batch(iter(common.microbatches(tokens, labels)))
    return loss


coord = engine.mpu.get_data_parallel_rank()
common.compete(options, step, dp_coord=coord, dp=dp, after_imports=after_imports)
dist.destroy_process_group()
