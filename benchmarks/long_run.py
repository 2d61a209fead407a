"""The default model on a whole mesh against one process of plain transformers, step by step.

    python benchmarks/long_run.py [--steps 500] [--mesh 2x2x2] [--micro 4] [--length 128]
                                  [--precision fp32 bf16] [--keep FOLDER] [--picture FILE.png]

Both train configs/ds.json on the Python standard library, from the same weights, on the same
samples, at the same learning rates: here pp x dp x tp ranks (ZeRO-3, the optimizer on the host,
1F1B), there `GPT2LMHeadModel` with torch's AdamW and clipping. In bf16 both keep masters and add up
gradients in fp32. The plain run "again", with each batch in one piece, shows what rounding alone
does to so many steps: it adds the same numbers in another order, and drifts from the first one.

Curves are kept in `--keep`, and what is there is not run again.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from parallel3d import models
from parallel3d.config import CompleteConfig, RunConfig
from parallel3d.config.learning_rate import rate
from parallel3d.data.batches import Batches
from parallel3d.data.prepare import prepare
from parallel3d.extras.report.page import png, style
from parallel3d.mesh.mesh import Mesh
from parallel3d.model.spec import named_params
from parallel3d.train.assembly import assemble
from parallel3d.train.feed import Feed
from parallel3d.verify.local_ranks import run_locally
from parallel3d.verify.measure import compile_operators
from parallel3d.verify.reference import first_weights

CONFIG = Path(__file__).parents[1] / "configs" / "ds.json"
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
KINDS = ("mesh", "plain", "again")
Curve = dict[str, list[float]]  # "loss", "grad_norm" and "seconds" of each step


def config_of(args: argparse.Namespace, precision: str) -> CompleteConfig:
    """The default config on the mesh that was asked for."""
    pp, dp, tp = map(int, args.mesh.split("x"))
    length = args.length
    values = {
        "mesh.pp": pp,
        "mesh.dp": dp,
        "mesh.tp": tp,
        "pipeline.schedule": "one_f_one_b",
        "pipeline.weights": "per_step",
        "train.steps": args.steps,
        "data.sequence_length": length,
        "model.max_position_embeddings": length,
        "train_micro_batch_size_per_gpu": args.micro,
    }
    if precision == "bf16":
        values["bf16.enabled"] = True
    words = [word for key, value in values.items() for word in (f"--{key}", str(value).lower())]
    config = RunConfig.from_json(str(CONFIG), words).resolve(pp * dp * tp)
    corpus = prepare(config.data)
    return config.with_corpus(corpus.vocab_size, len(corpus.train))


def on_the_mesh(rank: int, config: CompleteConfig) -> Curve:
    """This rank's part of the run; what it gives is the same on all of them."""
    assert isinstance(config.mesh.dp, int)
    mesh = Mesh(pp=config.mesh.pp, dp=config.mesh.dp, tp=config.mesh.tp)
    parts = assemble(config, mesh)
    feed = Feed(config, mesh, prepare(config.data), parts.schedule)
    copies = mesh.replicas.size * mesh.tensor.size  # ranks of the last stage, each with its loss

    def steps() -> Iterator[tuple[float, float]]:
        for step in range(config.num_steps):
            batch = feed.training(step * config.global_batch_size)
            loss = parts.executor.run(batch, step)
            norm = parts.engine.step(rate(config, step)).grad_norm
            yield sum(row[0] for row in mesh.messages.gather_floats([loss])) / copies, norm

    curve = _recorded(steps(), f"mesh {config.precision}" if rank == 0 else "")
    feed.close()
    mesh.barrier()
    parts.engine.close()
    return curve


def plainly(rank: int, config: CompleteConfig, micro: int) -> Curve:
    """The same run by transformers and torch, in one process, `micro` sequences at a time."""
    family = models.huggingface(config.model.family)
    adam = config.optimizer.params
    assert family is not None
    model = family.reference(config.model)
    model.set_attn_implementation("sdpa")
    theirs = family.to_huggingface(config.model, first_weights(config))
    model.load_state_dict(theirs, strict=False)
    model.to(TYPES[config.precision]).train()
    named = dict(model.named_parameters())
    masters = {name: torch.nn.Parameter(p.detach().float()) for name, p in named.items()}
    for name in masters:  # the mesh's masters begin from them, too
        masters[name].data.copy_(theirs[name])
    optimizer = torch.optim.AdamW(
        _groups(config, family, masters), lr=adam.lr, betas=adam.betas, eps=adam.eps
    )
    batches = Batches(prepare(config.data).train, config.data.sequence_length, config.train.seed)

    def steps() -> Iterator[tuple[float, float]]:
        for step in range(config.num_steps):
            size = config.global_batch_size
            tokens, labels = map(torch.from_numpy, batches.microbatch(step * size, size))
            optimizer.zero_grad()
            loss = 0.0
            for x, y in zip(tokens.split(micro), labels.split(micro), strict=True):
                loss += _backward(model, x, y, micro / size)
                for name, p in named.items():
                    assert p.grad is not None
                    grad = p.grad.float()
                    p.grad = None
                    held = masters[name].grad
                    masters[name].grad = grad if held is None else held.add_(grad)
            limit = config.gradient_clipping or float("inf")
            norm = torch.nn.utils.clip_grad_norm_(masters.values(), limit)
            for group in optimizer.param_groups:
                group["lr"] = rate(config, step)
            optimizer.step()
            for name, p in named.items():
                p.data.copy_(masters[name])
            yield loss, float(norm)

    return _recorded(steps(), f"plain {config.precision}, {micro} sequences at a time")


def _backward(model: Any, x: Tensor, y: Tensor, share: float) -> float:
    logits = model(x, use_cache=False).logits.flatten(0, 1)
    loss = F.cross_entropy(logits.float(), y.flatten()) * share
    loss.backward()
    return loss.item()


def _groups(config: CompleteConfig, family: Any, named: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Which of their parameters decay: the mapping of names, carried out on the answers."""
    marks = {
        name: torch.full(spec.shape, float(spec.weight_decay))
        for name, spec in named_params(models.layers(config.model)).items()
    }
    decays = family.to_huggingface(config.model, marks)
    kinds = (config.optimizer.params.weight_decay, True), (0.0, False)
    return [
        {"params": [p for n, p in named.items() if bool(decays[n].any()) == yes], "weight_decay": w}
        for w, yes in kinds
    ]


def _recorded(steps: Iterator[tuple[float, float]], name: str) -> Curve:
    curve: Curve = {"loss": [], "grad_norm": [], "seconds": []}
    began = time.perf_counter()
    for number, (loss, norm) in enumerate(steps, 1):
        now = time.perf_counter()
        for key, value in zip(curve, (loss, norm, now - began), strict=True):
            curve[key].append(value)
        began = now
        if name and (number % 25 == 0 or number == 3):
            took = median(curve["seconds"][1:])
            print(f"{name}: step {number}, loss {loss:.4f}, {took:.2f} s", file=sys.stderr)
    return curve


def numbers(ours: Curve, theirs: Curve, last: int = 50) -> dict[str, float]:
    """How far two runs are apart: relative differences, and the mean loss of the last steps."""
    last = min(last, len(ours["loss"]))
    loss, norm = (
        np.abs(np.array(ours[k]) / np.array(theirs[k]) - 1) for k in ("loss", "grad_norm")
    )
    ends = [mean(curve["loss"][-last:]) for curve in (ours, theirs)]
    return {
        "loss_first_10": float(loss[:10].max()),
        "loss_worst": float(loss.max()),
        "norm_first_10": float(norm[:10].max()),
        "norm_worst": float(norm.max()),
        "end_of_ours": ends[0],
        "end_of_theirs": ends[1],
        "end": abs(ends[0] / ends[1] - 1),
    }


def picture(curves: Mapping[str, Curve], mesh: str) -> bytes:
    """A column for each precision: the losses, and below how far they are apart."""
    pairs = [(p, f"mesh-{p}", f"plain-{p}") for p in ("fp32", "bf16")]
    pairs = [pair for pair in pairs if {*pair[1:]} <= curves.keys()]
    with style() as plt:
        figure, axes = plt.subplots(
            2,
            len(pairs),
            figsize=(4.6 * len(pairs), 5),
            sharex=True,
            sharey="row",
            squeeze=False,
            constrained_layout=True,
            gridspec_kw={"height_ratios": [3, 2]},
        )
        for (above, below), (precision, ours, theirs) in zip(axes.T, pairs, strict=True):
            steps = np.arange(1, 1 + len(curves[ours]["loss"]))
            above.plot(steps, curves[theirs]["loss"], color="#999999", lw=3, label="plain")
            above.plot(steps, curves[ours]["loss"], color="#c0392b", lw=0.8, label=mesh)
            above.set(title=precision, ylabel="loss (nats per token)")
            others = {f"{mesh} and plain": (ours, theirs, "#c0392b")}
            if (again := f"again-{precision}") in curves:
                others["plain and plain again"] = (theirs, again, "#2c6e8f")
            for name, (a, b, colour) in others.items():
                apart = np.abs(np.array(curves[a]["loss"]) / np.array(curves[b]["loss"]) - 1)
                below.semilogy(steps, np.maximum(apart, 1e-9), color=colour, lw=0.7, label=name)
            below.set(xlabel="step", ylabel="relative difference")
            above.legend(loc="upper right")
            below.legend(loc="best")
        return png(plt, figure)


def main() -> int:
    """Train what is not kept yet, and print how far the runs are apart."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--mesh", default="2x2x2")
    parser.add_argument("--micro", type=int, default=4, help="sequences of a microbatch")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16"], choices=list(TYPES))
    parser.add_argument("--without", nargs="*", default=[], help="runs, as again-fp32")
    parser.add_argument("--keep", type=Path, help="folder of curves, one file a run")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--timeout", type=float, default=7200, help="seconds of a run")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = report(run(args, args.keep or Path(folder)), args)
    print(json.dumps(found) if args.json else table(found))
    return 0


def run(args: argparse.Namespace, folder: Path) -> dict[str, Curve]:
    """Every run's curve by its name: those in the folder, and the others once they are trained."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{kind}-{p}" for p in args.precision for kind in KINDS]
    curves = {}
    for name in names:
        if name in args.without:
            continue
        file = folder / f"{name}.json"
        if not file.exists():
            kind, precision = name.split("-")
            config = config_of(args, precision)
            if kind == "mesh":
                compile_operators(config)
                pp, dp, tp = map(int, args.mesh.split("x"))
                found = run_locally(on_the_mesh, pp * dp * tp, config, timeout=args.timeout)[0]
            else:
                sizes = {"plain": config.micro_batch_size, "again": config.global_batch_size}
                found = run_locally(plainly, 1, config, sizes[kind], timeout=args.timeout)[0]
            file.write_text(json.dumps(found))
        curves[name] = json.loads(file.read_text())
    return curves


def report(curves: dict[str, Curve], args: argparse.Namespace) -> dict[str, Any]:
    """What was found, and the picture of it."""
    if args.picture:
        args.picture.write_bytes(picture(curves, args.mesh))
    pairs = [(f"{kind}-{p}", f"plain-{p}") for p in args.precision for kind in ("mesh", "again")]
    rows = [
        {"ours": a, "theirs": b, **numbers(curves[a], curves[b])}
        for a, b in pairs
        if {a, b} <= curves.keys()
    ]
    seconds = {name: median(curve["seconds"][1:]) for name, curve in curves.items()}
    return {"steps": args.steps, "mesh": args.mesh, "rows": rows, "step_seconds": seconds}


def table(found: dict[str, Any]) -> str:
    """The numbers as a table."""
    head = (
        "| runs | loss, first 10 steps | loss, worst | norm, worst | mean of the last 50 | apart |"
    )
    lines = [head, "|---|---|---|---|---|---|"]
    for r in found["rows"]:
        lines.append(
            f"| {r['ours']} and {r['theirs']} | {r['loss_first_10']:.1e} | {r['loss_worst']:.1e} "
            f"| {r['norm_worst']:.1e} | {r['end_of_ours']:.4f} and {r['end_of_theirs']:.4f} "
            f"| {r['end']:.1e} |"
        )
    took = ", ".join(f"{name} {s:.2f} s" for name, s in found["step_seconds"].items())
    return "\n".join([*lines, f"\na step, {os.cpu_count()} cores: {took}"])


if __name__ == "__main__":
    sys.exit(main())
