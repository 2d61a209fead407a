"""How long a training step takes, as ratios to plain transformers in the same run.

    python benchmarks/step.py [--hidden 256 --layers 4 --seq 128 --batch 4 --microbatches 4]

One process, so the ratio is what the mesh, the executor and DeepSpeed's engine add to the same
arithmetic. The contenders take turns, step by step, so that a noisy machine disturbs all alike;
each ratio is of medians.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from parallel3d import models
from parallel3d.engine import Engine
from parallel3d.mesh.mesh import Mesh
from parallel3d.model.spec import Shape
from parallel3d.pipeline.executor import Executor, Microbatch
from parallel3d.pipeline.stages import build_stages
from parallel3d.schedule.schedule import add_sharding
from parallel3d.schedule.schedules import make_schedule
from tests.engine.settings import settings_of

Step = Callable[[], None]


def plain(config: Any, batch: list[Microbatch]) -> Step:
    """transformers' model with torch's AdamW, clipping and gradient accumulation."""
    model = models.huggingface(config.family).reference(config)  # type: ignore[union-attr]
    model.set_attn_implementation("sdpa")
    model.to(batch[0].tokens.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        for microbatch in batch:
            logits = model(microbatch.tokens, use_cache=False).logits
            labels = microbatch.labels.flatten()
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels)
            (loss / len(batch)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def ours(
    config: Any,
    batch: list[Microbatch],
    mesh: Mesh,
    zero: Mapping[str, object],
    **pipeline: str,
) -> Step:
    """The same step by parallel3d."""
    size, seq = batch[0].tokens.shape
    engine_settings = settings_of(size, zero=zero, gradient_clipping=1.0, **pipeline)
    schedule = make_schedule("gpipe", 1, len(batch))
    if engine_settings.holds_weights:
        schedule = add_sharding(schedule, engine_settings.weights, True)
    stages = build_stages(
        models.layers(config), schedule, engine_settings, mesh=mesh, shape=Shape(size, seq)
    )
    engine = Engine(
        stages.module, stages.held, engine_settings, mesh=mesh, layers=stages.module.layers
    )
    executor = Executor(
        schedule, mesh, engine, key=stages.key, hidden_shape=(size, seq, config.hidden_size)
    )

    def step() -> None:
        executor.run(batch)
        engine.step(1e-3)

    return step


def main() -> None:
    """Print a row for each contender: median step time, and its ratio to plain transformers."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in [
        ("hidden", 256),
        ("layers", 4),
        ("seq", 128),
        ("batch", 4),
        ("microbatches", 4),
        ("vocab", 4096),
        ("steps", 15),
    ]:
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--family", default="gpt", choices=models.families())
    args = parser.parse_args()
    config = models.config_class(args.family)(
        family=args.family,
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 32,
        vocab_size=args.vocab,
        max_position_embeddings=args.seq,
    )
    mesh = Mesh()
    shape = args.microbatches, args.batch, args.seq + 1
    text = torch.randint(args.vocab, shape, device=mesh.device)
    batch = [Microbatch(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in text]
    zero3 = {"stage": 3}
    nothing_kept = {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0}
    offloaded = {"offload_optimizer": {"device": "cpu"}}
    contenders = {
        "plain transformers": plain(config, batch),
        "ZeRO-0": ours(config, batch, mesh, {"stage": 0}),
        "ZeRO-1": ours(config, batch, mesh, {"stage": 1}),
        # Weights gathered once a step: pipeline.weights "auto" if they fit, also on CPUs.
        "ZeRO-3": ours(config, batch, mesh, zero3, weights="per_step"),
        "ZeRO-3 + offload": ours(config, batch, mesh, zero3 | offloaded, weights="per_step"),
        "ZeRO-3 by hooks": ours(config, batch, mesh, zero3),
        "the same, nothing kept": ours(config, batch, mesh, zero3 | nothing_kept),
        "the same, reduced each": ours(
            config, batch, mesh, zero3, gradient_reduction="per_microbatch"
        ),
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for i in range(args.steps + 2):
        for name, step in contenders.items():
            start = time.perf_counter()
            step()
            if mesh.device.type != "cpu":
                torch.accelerator.synchronize()
            if i >= 2:
                times[name].append(time.perf_counter() - start)
    base = statistics.median(times["plain transformers"])
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {os.cpu_count()} cores")
    print(f"{'':24}{'step':>10}{'ratio':>8}")
    for name, taken in times.items():
        median = statistics.median(taken)
        print(f"{name:24}{1e3 * median:8.1f} ms{median / base:8.2f}")
    mesh.close()


if __name__ == "__main__":
    main()
