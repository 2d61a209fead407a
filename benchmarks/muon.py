"""How long a step takes with Muon, as a ratio to AdamW's in the same run.

    python benchmarks/muon.py [--steps 6] [--meshes 2x2x1] [--microbatches 4 32]

The model is that of `benchmarks/peers.py`. Both optimizers train in the same processes and take
turns, step by step, so that a noisy machine disturbs both alike; each ratio is of medians.
"""

import argparse
import os
import statistics
import time

import torch

from benchmarks.contestants import common
from parallel3d.base.mesh_sizes import MeshSizes
from parallel3d.config import CompleteConfig, RunConfig
from parallel3d.mesh.mesh import Mesh
from parallel3d.pipeline.executor import Microbatch
from parallel3d.train.assembly import Assembly, assemble
from parallel3d.verify.local_ranks import run_locally
from parallel3d.verify.shrink import parse_meshes

OPTIMIZERS = {
    "AdamW": {"type": "AdamW", "params": {"lr": 1e-3}},
    "Muon": {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 1e-3}},
}


def config_of(optimizer: str, mesh: MeshSizes, microbatches: int) -> CompleteConfig:
    """Return the peers' model under an optimizer, at ZeRO-1."""
    pp, dp, _, tp = mesh
    raw = {
        "train_micro_batch_size_per_gpu": common.MICRO,
        "gradient_accumulation_steps": microbatches,
        "gradient_clipping": 1.0,
        "optimizer": OPTIMIZERS[optimizer],
        "zero_optimization": {"stage": 1},
        "parallel3d": {
            "mesh": {"pp": pp, "dp": dp, "tp": tp},
            "pipeline": {"schedule": "one_f_one_b"},
            "model": {
                "family": "gpt",
                "hidden_size": common.HIDDEN,
                "vocab_size": common.VOCAB,
                "num_hidden_layers": common.LAYERS,
                "num_attention_heads": common.HEADS,
                "max_position_embeddings": common.SEQ,
                "tie_word_embeddings": False,
            },
            "data": {"sequence_length": common.SEQ, "tokenizer": "theirs"},
            "train": {"steps": 1000},
        },
    }
    return RunConfig.from_dict(raw).resolve(pp * dp * tp).completed()


def measure(rank: int, mesh: MeshSizes, microbatches: int, steps: int) -> dict[str, list[float]]:
    """Return the seconds of each step of each optimizer on this rank."""
    grid = Mesh(**mesh._asdict())
    parts = dict[str, Assembly]()
    for name in OPTIMIZERS:
        parts[name] = assemble(config_of(name, mesh, microbatches), grid, seed=0)
    text = torch.randint(common.VOCAB, (microbatches, common.MICRO, common.SEQ + 1))
    batch = [Microbatch(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in text]
    seconds: dict[str, list[float]] = {name: [] for name in OPTIMIZERS}
    for number in range(steps + 1):
        for name, own in parts.items():
            grid.barrier()
            began = time.perf_counter()
            own.executor.run(batch, number)
            own.engine.step(1e-3)
            grid.barrier()
            if number:
                seconds[name].append(time.perf_counter() - began)
    for own in parts.values():
        own.engine.close()
    return seconds


def main() -> None:
    """Print a row for each mesh, number of microbatches and optimizer."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--meshes", default="2x2x1")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 32])
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for mesh in parse_meshes(args.meshes):
        for microbatches in args.microbatches:
            ranks = mesh[0] * mesh[1] * mesh[2]
            seconds = run_locally(measure, ranks, mesh, microbatches, args.steps, timeout=3000)[0]
            base = statistics.median(seconds["AdamW"])
            for name, taken in seconds.items():
                each = statistics.median(taken)
                where = f"{'x'.join(map(str, mesh))}, {microbatches} microbatches"
                print(f"{where:28}{name:12}{each:8.2f} s {each / base:6.3f}", flush=True)


if __name__ == "__main__":
    main()
