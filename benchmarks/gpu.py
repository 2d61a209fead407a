"""How near to a device's matrix products a training step comes, and what each switch gives.

    python benchmarks/gpu.py                                     # one device
    torchrun --nproc_per_node 8 benchmarks/gpu.py --tp 8         # one node
    python benchmarks/gpu.py --models toy --sequences 64 --steps 2   # a CPU, to see that it runs

A GPT of 1.3 B parameters and a Llama-like 7 B, bf16, 8,192 tokens a microbatch. MFU is of the
products that this device does in the same minute. Each row is built,
run and freed; what does not fit says so. A row is a line of JSON.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from parallel3d import models
from parallel3d.config import CompleteConfig, RunConfig
from parallel3d.mesh.launch import Launch
from parallel3d.mesh.mesh import Mesh
from parallel3d.model.spec import Shape
from parallel3d.pipeline.executor import Microbatch
from parallel3d.train.assembly import assemble
from parallel3d.train.known_hardware import measure_peak_flops

Settings = dict[str, Any]  # by dotted path
Step = Callable[[], object]

MODELS: dict[str, tuple[Settings, Settings]] = {  # the model, and what it needs to fit
    "gpt-1.3b": (
        {
            "family": "gpt",
            "hidden_size": 2048,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "vocab_size": 50304,
        },
        {},
    ),
    "llama-7b": (
        {
            "family": "llama",
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "intermediate_size": 11008,
            "vocab_size": 32000,
        },
        {
            "zero_optimization.stage": 3,
            "zero_optimization.offload_optimizer.device": "cpu",
            "parallel3d.pipeline.activation_checkpointing": "full",
        },
    ),
    "toy": (
        {
            "family": "llama",
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "vocab_size": 256,
        },
        {},
    ),
}
BLOCK = {"parallel3d.train.compile": "block", "zero_optimization.stage": 1}
# Beside the model's own settings, at ZeRO-1: each switch alone. Some need more than one device.
SWITCHES: dict[str, Settings] = {
    "as it is": {},
    "compile pointwise": {"parallel3d.train.compile": "pointwise"},
    "compile block, ZeRO-1": BLOCK,
    "ZeRO-0": {"zero_optimization.stage": 0},
    "ZeRO-1, reduced to one rank": {
        "zero_optimization.stage": 1,
        "zero_optimization.use_multi_rank_bucket_allreduce": False,
    },
    "ZeRO-3": {"zero_optimization.stage": 3},
    "selective recomputation": {"parallel3d.pipeline.activation_checkpointing": "selective"},
    "TF32 and fp32": {"bf16.enabled": False, "parallel3d.train.tf32": True},
}
ACROSS: dict[str, Settings] = {
    "overlap off": {"parallel3d.train.overlap": False},
    "sequence parallel": {"parallel3d.mesh.sequence_parallel": True},
    "sequence parallel, overlap off": {
        "parallel3d.mesh.sequence_parallel": True,
        "parallel3d.train.overlap": False,
    },
}


def config_of(model: str, seq: int, tokens: int, tp: int, settings: Settings) -> RunConfig:
    """A run's config: `tokens` a microbatch, four of them a step on each replica."""
    sizes, needs = MODELS[model]
    raw: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": max(1, tokens // seq),
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 1},
        "parallel3d": {
            "mesh": {"tp": tp},
            "model": {"max_position_embeddings": max(seq, 2048), **sizes},
            "data": {"sequence_length": seq, "tokenizer": "none that is used"},
            "train": {"steps": 1000},
        },
    }
    for path, value in (needs | settings).items():
        *sections, name = path.split(".")
        section = raw
        for part in sections:
            section = section.setdefault(part, {})
        section[name] = value
    return RunConfig.from_dict(raw)


def batch_of(config: CompleteConfig, device: torch.device) -> list[Microbatch]:
    """Random tokens: one step's microbatches of a replica."""
    shape = config.num_microbatches, config.micro_batch_size, config.data.sequence_length + 1
    text = torch.randint(int(config.model.vocab_size), shape, device=device)
    return [Microbatch(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in text]


@contextmanager
def ours(config: CompleteConfig, mesh: Mesh) -> Iterator[Step]:
    """A step by parallel3d."""
    parts = assemble(config, mesh)
    batch = batch_of(config, mesh.device)

    def step() -> None:
        parts.executor.run(batch)
        parts.engine.step(1e-4)

    try:
        yield step
    finally:
        parts.engine.close()


@contextmanager
def transformers(config: CompleteConfig, mesh: Mesh) -> Iterator[Step]:
    """A step by transformers' model, compiled, under autocast, with torch's fused AdamW."""
    device = mesh.device
    model = models.huggingface(config.model.family).reference(config.model)  # type: ignore[union-attr]
    model.set_attn_implementation("sdpa")
    model.to(device).compile(dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    batch = batch_of(config, device)

    def step() -> None:
        optimizer.zero_grad()
        for tokens, labels, *_ in batch:
            with torch.autocast(device.type, torch.bfloat16):
                logits = model(tokens, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
            (loss / len(batch)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    yield step


def seconds_of(step: Step, steps: int, device: torch.device) -> float:
    """The median of `steps` steps, after two that compile, allocate and warm up."""
    backend = torch.get_device_module(device)
    taken = []
    for _ in range(steps + 2):
        backend.synchronize()
        start = time.perf_counter()
        step()
        backend.synchronize()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[2:])


def measure(
    contender: Any, config: CompleteConfig, mesh: Mesh, steps: int, peak: float
) -> dict[str, object]:
    """One row: seconds, tokens a second, MFU of `peak` FLOP/s a device, peak memory."""
    on_device = mesh.device.type != "cpu"
    if on_device:
        torch.accelerator.reset_peak_memory_stats()
    shape = Shape(config.micro_batch_size, config.data.sequence_length)
    costs = [layer.cost(shape) for layer in models.layers(config.model)]
    flops = sum(cost.train_flops for cost in costs) / shape.tokens
    try:
        with contender(config, mesh) as step:
            seconds = seconds_of(step, steps, mesh.device)
    except torch.OutOfMemoryError:
        return {"fits": False}
    finally:
        gc.collect()
        if on_device:
            torch.accelerator.empty_cache()
    speed = config.tokens_per_step / seconds / mesh.world.size
    memory = torch.accelerator.max_memory_allocated() if on_device else None
    return {
        "fits": True,
        "step_seconds": seconds,
        "tokens_per_second_and_device": speed,
        "mfu_of_measured_products": speed * flops / peak,
        "peak_memory_bytes": memory,
    }


def main() -> None:
    """Print a row of JSON for each model, sequence and switch."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["gpt-1.3b", "llama-7b"], choices=MODELS)
    parser.add_argument("--sequences", nargs="+", type=int, default=[2048, 8192])
    parser.add_argument("--tokens", type=int, default=8192, help="of a microbatch")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--only", nargs="+", help="switches, as they are named in the rows")
    parser.add_argument("--set", nargs="+", default=[], metavar="PATH=JSON", help="for every row")
    args = parser.parse_args()
    given = {p: json.loads(v) for p, _, v in (text.partition("=") for text in args.set)}
    world = Launch.from_environment().world_size
    mesh = Mesh(dp=world // args.tp, tp=args.tp)
    dtype = torch.float32 if mesh.device.type == "cpu" else torch.bfloat16
    peak = measure_peak_flops(mesh.device, dtype, seconds=2.0)
    say({"device": describe(mesh.device), "torch": torch.__version__, "peak_flops": peak}, mesh)
    switches = SWITCHES | (ACROSS if args.tp > 1 else {})
    for model in args.models:
        for seq in args.sequences:
            rows: dict[str, tuple[Any, Settings]] = {n: (ours, s) for n, s in switches.items()}
            if world == 1:
                rows["transformers, compiled"] = (transformers, {})
            for name, (contender, settings) in rows.items():
                if args.only and name not in args.only:
                    continue
                config = config_of(model, seq, args.tokens, args.tp, given | settings)
                found = measure(
                    contender, config.resolve(world).completed(), mesh, args.steps, peak
                )
                say({"model": model, "sequence": seq, "switch": name, **found}, mesh)
    mesh.close()


def describe(device: torch.device) -> str:
    """The device's name."""
    if device.type == "cpu":
        return "cpu"
    return str(torch.get_device_module(device).get_device_name(device))


def say(row: dict[str, object], mesh: Mesh) -> None:
    """One line, by the first rank."""
    if mesh.rank == 0:
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
