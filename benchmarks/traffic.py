"""Bytes that the ranks send each other in a step, by kind, against the least that would do.

    python benchmarks/traffic.py [--mesh 2x2x1] [--microbatches 8] [--precision bf16]

Counted by torch's dispatcher (mesh/traffic) on real ranks, in the second step with the optimizer's,
over all ranks; an all-gather counts as what it gives, a reduction as what it takes. The least:
weights gathered once and gradients reduced once in fp32 (what is sharded is elsewhere before and
after each step), an activation and its gradient over each border between ranks for each microbatch,
and the tensor-parallel collectives that the layers are made of. All weights are cut, however small.
"""

import argparse
import json
import sys
from collections import Counter
from math import prod
from typing import Any

import torch

from parallel3d import models
from parallel3d.config import CompleteConfig, RunConfig
from parallel3d.mesh.mesh import Mesh
from parallel3d.mesh.traffic import Traffic
from parallel3d.model.spec import LayerSpec, Shape
from parallel3d.pipeline.executor import Microbatch
from parallel3d.plan.setting import BYTES
from parallel3d.train.assembly import assemble
from parallel3d.verify.local_ranks import run_locally

KINDS = ("weights", "gradients", "activations", "tensor", "rest")
CHOICES = (  # ZeRO stage, schedule, stages a rank, pipeline.weights
    (1, "one_f_one_b", 1, "per_step"),
    (3, "gpipe", 1, "per_step"),
    (3, "gpipe", 1, "per_microbatch"),
    (3, "one_f_one_b", 1, "per_step"),
    (3, "interleaved", 2, "per_pass"),
    (3, "breadth_first", 2, "per_pass"),
    (3, "breadth_first", 2, "per_step"),
    (3, "breadth_first", 2, "per_microbatch"),
    (3, "zero_bubble", 1, "per_step"),
    (3, "zb_v", 2, "per_pass"),
)
Choice = tuple[int, str, int, str]


def config_of(args: argparse.Namespace, choice: Choice) -> CompleteConfig:
    """The resolved config of one row."""
    (pp, dp, tp) = map(int, args.mesh.split("x"))
    (zero, schedule, per_rank, weights) = choice
    raw: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": args.micro,
        "gradient_accumulation_steps": args.microbatches,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": zero, "stage3_param_persistence_threshold": 0},
        "parallel3d": {
            "mesh": {"pp": pp, "dp": dp, "tp": tp},
            "pipeline": {
                "schedule": schedule,
                "stages_per_rank": per_rank,
                "weights": weights,
                "gradient_reduction": "per_step",
            },
            "model": {
                "family": "gpt",
                "hidden_size": args.hidden,
                "num_hidden_layers": args.layers,
                "num_attention_heads": max(tp, args.hidden // 64),
                "vocab_size": args.vocab,
                "max_position_embeddings": args.length,
                "tie_word_embeddings": False,
            },
            "data": {"sequence_length": args.length, "tokenizer": "theirs"},
            "train": {"steps": 2},
        },
    }
    if args.precision != "fp32":
        raw[args.precision] = {"enabled": True}
    return RunConfig.from_dict(raw).resolve(pp * dp * tp).completed()


def count(rank: int, config: CompleteConfig) -> tuple[Counter[str], int]:
    """Bytes by kind of this rank's second step, and how many parameters it has."""
    assert isinstance(config.mesh.dp, int)
    mesh = Mesh(pp=config.mesh.pp, dp=config.mesh.dp, tp=config.mesh.tp)
    parts = assemble(config, mesh)
    shape = config.num_microbatches, config.micro_batch_size, config.data.sequence_length
    tokens = torch.zeros(shape, dtype=torch.int64, device=mesh.device)
    batch = [Microbatch(t, t) for t in tokens]
    found: Counter[str] = Counter()
    for step in range(2):
        with Traffic(mesh) as traffic:
            parts.executor.run(batch, step)
            parts.engine.step(1e-4)
    for c in traffic.calls:
        if c.operation != "receive":
            found[kind_of(c.group, c.operation)] += c.bytes
    params = sum(prod(held.cut.local_shape) for held in parts.engine.held)
    mesh.barrier()
    parts.engine.close()
    return found, params


def kind_of(group: str, operation: str) -> str:
    """What an operation on a group is for; an axis that holds all ranks is named "dp=world"."""
    axis = group.partition("=")[0]
    if operation == "send":
        return "activations"
    if axis == "tp":
        return "tensor"
    if axis == "dp" and operation == "all_gather":
        return "weights"
    if axis == "dp" and operation in ("reduce_scatter", "all_reduce", "reduce"):
        return "gradients"
    return "rest"


def least(config: CompleteConfig, layers: list[LayerSpec], params: int) -> Counter[str]:
    """The fewest bytes of each kind, over all ranks; `params`: the sum of what each has."""
    pp = config.mesh.pp
    dp = config.mesh.dp
    tp = config.mesh.tp
    m = config.num_microbatches
    assert isinstance(dp, int)
    shape = Shape(config.micro_batch_size, config.data.sequence_length)
    size = BYTES[config.precision]
    hidden = int(config.model.hidden_size)
    found: Counter[str] = Counter()
    if dp > 1:
        found["weights"] = params * size
        found["gradients"] = params * 4
    message = shape.tokens * hidden * size
    found["activations"] = 2 * m * (pp - 1) * dp * tp * message
    if tp > 1:
        for layer in layers:
            cost = layer.cost(shape, tp, config.mesh.sequence_parallel)
            each = (*cost.forward.collectives, *cost.backward_collectives)
            found["tensor"] += m * dp * tp * size * sum(c.elements for c in each)
    return found


def row(args: argparse.Namespace, choice: Choice) -> dict[str, Any]:
    """One choice, counted."""
    config = config_of(args, choice)
    pp, dp, tp = map(int, args.mesh.split("x"))
    ranks = run_locally(count, pp * dp * tp, config)
    moved = sum((found for found, _ in ranks), Counter())
    params = sum(own for _, own in ranks)
    return {
        "zero_stage": choice[0],
        "schedule": choice[1],
        "stages_per_rank": choice[2],
        "weights": choice[3],
        "num_params": params,
        "bytes": {kind: moved[kind] for kind in KINDS},
        "least": dict(least(config, models.layers(config.model), params)),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """A line a row: MiB of each kind, and how many times the least that is."""
    lines = ["| ZeRO | schedule | weights | " + " | ".join(KINDS) + " | bytes a parameter |"]
    lines.append("|---" * (4 + len(KINDS)) + "|")
    for r in rows:
        cells = []
        for kind in KINDS:
            moved = r["bytes"][kind]
            low = r["least"].get(kind, 0)
            times = f" ({moved / low:.2f}×)" if low else ""
            cells.append(f"{moved / 2**20:,.1f}{times}" if moved else "–")
        several = f" ×{r['stages_per_rank']}" if r["stages_per_rank"] > 1 else ""
        held = r["weights"] if r["zero_stage"] == 3 else "whole"
        states = (r["bytes"]["weights"] + r["bytes"]["gradients"]) / r["num_params"]
        lines.append(
            f"| {r['zero_stage']} | {r['schedule']}{several} | {held} | {' | '.join(cells)} "
            f"| {states:.1f} |"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Count all choices and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--mesh", default="2x2x1")
    parser.add_argument("--precision", default="bf16", choices=("fp32", "bf16"))
    sizes = {"microbatches": 8, "micro": 1, "length": 64, "hidden": 128, "layers": 6, "vocab": 512}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only", default="", help="schedules whose name contains this")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(arguments)
    rows = []
    for choice in CHOICES:
        if args.only in choice[1]:
            rows.append(row(args, choice))
            print(f"counted {choice}: {rows[-1]['bytes']}", file=sys.stderr, flush=True)
    print(json.dumps({"mesh": args.mesh, "rows": rows}) if args.json else table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
