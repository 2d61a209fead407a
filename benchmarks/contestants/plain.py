"""(e) Plain PyTorch in one process: microbatches one after the other."""

import common
import torch
from torch import Tensor

after_imports = common.resident_bytes()
options = common.arguments(threads=2)
torch.set_num_threads(options.threads)
model = torch.nn.Sequential(*common.layers())
optimizer = torch.optim.AdamW(
    model.parameters(), lr=common.LR, weight_decay=common.WEIGHT_DECAY, foreach=True
)


def step(tokens: Tensor, labels: Tensor) -> Tensor | None:
    count = common.GLOBAL // common.MICRO
    total = torch.zeros(())
    for x, y in common.microbatches(tokens, labels):
        loss = common.loss_fn(model(x), y) / count
        loss.backward()
        total += loss.detach()
    torch.nn.utils.clip_grad_norm_(model.parameters(), common.CLIP, foreach=True)
    optimizer.step()
    optimizer.zero_grad()
    return total


common.compete(options, step, after_imports=after_imports)
