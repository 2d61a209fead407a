"""What all contestants of peers.py share: one GPT, its tokens, the clock, and the result's line.

The model is written in plain PyTorch; whoever brings a model of his own copies these weights. Work
and precision are the same for all: pre-norm blocks, GELU by tanh, an untied head, fp32, AdamW with
clipping, GLOBAL sequences a step in microbatches of MICRO.
"""

import argparse
import json
import os
import resource
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch._inductor.compile_fx  # loaded early, so that it counts as no memory of the training
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from parallel3d.mesh.traffic import Traffic

HIDDEN = 256
LAYERS = 8
HEADS = 8
VOCAB = 8192
SEQ = 256
# sequences
MICRO = 4
GLOBAL = int(os.environ.get("PEERS_BATCH", "64"))
LR = 3e-4
WEIGHT_DECAY = 0.1
CLIP = 1.0
_ZIPF = 1.0 / torch.arange(1, VOCAB + 1, dtype=torch.float)
_MIB = 2**20


class Embed(nn.Module):
    """Token and position embeddings: [batch, seq] -> [batch, seq, hidden]."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCAB, HIDDEN)
        self.position = nn.Embedding(SEQ, HIDDEN)
        self.register_buffer("places", torch.arange(SEQ), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Token ids to vectors."""
        found: Tensor = self.token(x) + self.position(self.places[: x.shape[1]])
        return found


class Block(nn.Module):
    """A pre-norm block; its fused weight goes head by head, so a column shard has whole heads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(HIDDEN)
        self.norm2 = nn.LayerNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.proj = nn.Linear(HIDDEN, HIDDEN)
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, hidden] -> the same."""
        batch, seq, _ = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, seq, -1, 3, HIDDEN // HEADS)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(3))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(seen.transpose(1, 2).reshape(batch, seq, -1))
        x = x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return x


def layers() -> list[nn.Module]:
    """Embedding, blocks, final norm and head, with the same weights on every rank."""
    torch.manual_seed(0)
    made = [Embed(), *(Block() for _ in range(LAYERS)), nn.LayerNorm(HIDDEN)]
    made.append(nn.Linear(HIDDEN, VOCAB, bias=False))
    for module in (m for layer in made for m in layer.modules()):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    return made


def stage_bounds(stages: int) -> list[tuple[int, int]]:
    """The layers of each stage, in equal numbers, the first ones with one more."""
    count = LAYERS + 3
    at = 0
    bounds = []
    for index in range(stages):
        size = count // stages
        if index < count % stages:
            size += 1
        bounds.append((at, at + size))
        at += size
    return bounds


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean cross-entropy of [batch, seq, vocabulary] against [batch, seq]."""
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]).float(), labels.reshape(-1))


def batch(step: int, dp_coord: int, dp: int) -> tuple[Tensor, Tensor]:
    """A data-parallel rank's tokens and labels [sequences, seq] of a step, drawn by Zipf's law."""
    generator = torch.Generator().manual_seed(1000 + step)
    count = GLOBAL * (SEQ + 1)
    drawn = torch.multinomial(_ZIPF, count, replacement=True, generator=generator)
    mine = drawn.view(GLOBAL, SEQ + 1).chunk(dp)[dp_coord]
    return mine[:, :-1].contiguous(), mine[:, 1:].contiguous()


def microbatches(tokens: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The tokens and labels of each microbatch of a rank's step."""
    return list(zip(tokens.split(MICRO), labels.split(MICRO), strict=True))


def deepspeed_config(stage: int, dp: int) -> dict[str, Any]:
    """The config of DeepSpeed's contestants."""
    adam = {"lr": LR, "weight_decay": WEIGHT_DECAY, "torch_adam": True}
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": GLOBAL // MICRO // dp,
        "gradient_clipping": CLIP,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": adam},
    }


def resident_bytes() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def arguments(**defaults: Any) -> argparse.Namespace:
    """Steps, and a contestant's own options."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    for name, value in defaults.items():
        if isinstance(value, bool):
            parser.add_argument(f"--{name}", action="store_true")
        else:
            parser.add_argument(f"--{name}", type=type(value), default=value)
    return parser.parse_args()


def compete(
    options: argparse.Namespace,
    step: Callable[[Tensor, Tensor], Tensor | None],
    *,
    dp_coord: int = 0,
    dp: int = 1,
    after_imports: int = 0,
) -> None:
    """Time `step(tokens, labels)`, which gives the loss where this rank has it; rank 0 prints.

    Tokens are drawn outside the clock. `cpu`: seconds of all of a rank's threads. `moved`: bytes of
    one more step by operation. `above`: the most memory, above that after imports.
    """
    many = dist.is_initialized() and dist.get_world_size() > 1
    walls = []
    cpus = []
    losses = []
    for number in range(options.warm + options.steps):
        tokens, labels = batch(number, dp_coord, dp)
        if many:
            dist.barrier()
        cpu = time.process_time()
        wall = time.perf_counter()
        loss = step(tokens, labels)
        if many:
            dist.barrier()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
        losses.append(None if loss is None else float(loss))
    above = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - after_imports
    names: Any = SimpleNamespace(name_of=lambda group: group.group_name)
    with Traffic(names) as traffic:
        step(*batch(99, dp_coord, dp))
    moved: dict[str, int] = {}
    for calls in traffic.calls:
        moved[calls.operation] = moved.get(calls.operation, 0) + calls.bytes
    mine = {"loss": losses, "cpu": cpus[options.warm :], "above": above / _MIB, "moved": moved}
    ranks: list[Any] = [mine]
    if many:
        ranks = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, mine)
    if not many or dist.get_rank() == 0:
        print("RESULT " + json.dumps({"walls": walls[options.warm :], "ranks": ranks}), flush=True)
