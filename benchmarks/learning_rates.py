"""Whether the best learning rate stays where it is as models get wider: standard beside muP.

    python benchmarks/learning_rates.py --out runs/learning-rates [--widths 32 64 128 256]
        [--steps 100] [--seeds 1] [--parallel 2] [--draw FILE.png] [--family llama]
        [--kinds standard mup] [--powers -10 ... -3] [--muon spectral]

Trains a small model on the default corpus at each width and rate, once with each parametrisation,
one thread a run, and writes the held-out loss of each to results.jsonl as it ends; what is there is
not trained again. At the base width, the first, the two are one model bit for bit, trained once.
Prints a table of the means over the seeds, and with --draw the curves as one picture. With --muon
the rate is that of hidden matrices, with that scale; the others have AdamW's best rate, 2^-6.
"""

import argparse
import json
import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

from parallel3d.base.errors import TrainingError
from parallel3d.config import RunConfig
from parallel3d.data.prepare import prepare
from parallel3d.extras.report.page import png, style
from parallel3d.verify.local_ranks import run_locally

KINDS = "standard", "mup"
Key = tuple[str, int, float]  # kind, width, rate
Run = tuple[str, int, float, int]  # the same, and the seed


def config_of(run: Run, base: int, args: argparse.Namespace) -> dict[str, Any]:
    """The object of a run's ds.json: two blocks, heads of 16 features, 1,024 tokens a step."""
    kind, width, rate, seed = run
    steps = args.steps
    model = {
        "family": args.family,
        "hidden_size": width,
        "num_hidden_layers": 2,
        "num_attention_heads": width // 16,
        "max_position_embeddings": 64,
        "intermediate_size": 11 * width // 4 if args.family == "llama" else 4 * width,
    }
    if kind == "mup":
        model["parametrization"] = {"type": "mup", "base_width": base}
    params = {"lr": rate, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
    if args.muon:
        params |= {"scale": args.muon, "adam_lr": 2.0**-6}
    optimizer = {"type": "Muon" if args.muon else "AdamW", "params": params}
    return {
        "train_micro_batch_size_per_gpu": 16,
        "gradient_clipping": 1.0,
        "optimizer": optimizer,
        "zero_optimization": {"stage": 1},
        "parallel3d": {
            "model": model,
            "data": {"source": "python-stdlib", "vocab_size": 512, "sequence_length": 64},
            "train": {
                "steps": steps,
                "seed": seed,
                "lr_schedule": {"type": "cosine", "warmup_steps": steps // 10},
                "evaluate_samples": 128,
            },
        },
    }


def train(rank: int, raw: dict[str, Any]) -> float:
    """The held-out loss of a run on this rank; infinite where it diverges."""
    from rich.console import Console

    from parallel3d.mesh.mesh import Mesh
    from parallel3d.mesh.nodes import find_nodes
    from parallel3d.train.assembly import assemble
    from parallel3d.train.observers import observed_trainer
    from parallel3d.train.open_corpus import open_corpus
    from parallel3d.train.start import Start

    config = RunConfig.from_dict(raw).resolve(1)
    mesh = Mesh()
    corpus = open_corpus(config, mesh, find_nodes(mesh), Console(quiet=True))
    config = config.with_corpus(corpus.vocab_size, len(corpus.train))
    parts = assemble(config, mesh)
    try:
        start = Start(config=config, settings={}, folder=Path(), digest="", corpus=corpus)
        result = observed_trainer(start, mesh, parts).run()
    except TrainingError:
        return math.inf
    return result.held_out_loss if result.held_out_loss is not None else math.nan


def main() -> None:
    """Train what is missing, then print and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--widths", type=int, nargs="+", default=[32, 64, 128, 256])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--family", default="llama", choices=["gpt", "llama"])
    parser.add_argument("--kinds", nargs="+", default=["standard", "mup"], choices=KINDS)
    parser.add_argument("--powers", type=int, nargs="+", default=list(range(-10, -2)))
    parser.add_argument("--muon", choices=["spectral", "match_rms_adamw"])
    parser.add_argument("--draw", type=Path)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    # Runs side by side: two threads of each would wait for one another's cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    base = min(args.widths)
    rates = [2.0**power for power in args.powers]
    wanted = [
        (kind, width, rate, seed)
        for seed in range(args.seeds)
        for width in args.widths
        for kind in args.kinds
        for rate in rates
        if kind == args.kinds[0] or width != base
    ]
    file = args.out / "results.jsonl"
    found = read(file)
    missing = [key for key in wanted if key not in found]
    if missing:
        prepare(RunConfig.from_dict(config_of(missing[0], base, args)).data)

    def run(key: Run) -> None:
        began = time.monotonic()
        (loss,) = run_locally(train, 1, config_of(key, base, args), timeout=3000)
        line = {
            "kind": key[0],
            "width": key[1],
            "rate": key[2],
            "seed": key[3],
            "steps": args.steps,
            "loss": loss if math.isfinite(loss) else None,
            "seconds": time.monotonic() - began,
        }
        with open(file, "a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)

    with ThreadPoolExecutor(args.parallel) as pool:
        list(pool.map(run, missing))
    found = read(file)
    means = {key[:3]: mean(found[*key[:3], s] for s in range(args.seeds)) for key in wanted}
    first = args.kinds[0]
    means |= {(k, base, rate): means[first, base, rate] for k in args.kinds for rate in rates}
    print(table(means))
    if args.draw:
        args.draw.write_bytes(draw(means))


def read(file: Path) -> dict[Run, float]:
    """The losses that are there, by run."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else ()
    rows = [json.loads(line) for line in lines]
    return {
        (row["kind"], row["width"], row["rate"], row.get("seed", 0)): (
            math.inf if row["loss"] is None else row["loss"]
        )
        for row in rows
    }


def grid(found: dict[Key, float]) -> tuple[list[str], list[int], list[float]]:
    """The parametrisations, widths and rates of the runs."""
    kinds, widths, rates = (sorted({key[i] for key in found}) for i in range(3))
    return kinds[::-1], widths, rates


def table(found: dict[Key, float]) -> str:
    """Markdown: a row for each parametrisation and width, the best loss in bold."""
    kinds, widths, rates = grid(found)
    names = [f"2^{round(math.log2(rate))}" for rate in rates]
    lines = [f"| | width | {' | '.join(names)} |", f"|{'---|' * (len(rates) + 2)}"]
    for kind in kinds:
        for width in widths:
            losses = [found[kind, width, rate] for rate in rates]
            best = min(losses)
            cells = [f"**{x:.3f}**" if x == best else f"{x:.3f}" for x in losses]
            lines.append(f"| {kind} | {width} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(found: dict[Key, float]) -> bytes:
    """A PNG: a panel for each parametrisation, a curve for each width, its best rate marked."""
    import matplotlib

    kinds, widths, rates = grid(found)
    with style() as plt:
        figure, ((*panels,),) = plt.subplots(
            1,
            len(kinds),
            figsize=(4 * len(kinds), 3.4),
            sharey=True,
            constrained_layout=True,
            squeeze=False,
        )
        colours = matplotlib.colormaps["viridis"]([0.9 * i / len(widths) for i in range(4)])
        for axes, kind in zip(panels, kinds, strict=True):
            for width, colour in zip(widths, colours, strict=False):
                losses = [found[kind, width, rate] for rate in rates]
                axes.plot(rates, losses, ".-", color=colour, label=f"width {width}")
                best = min(range(len(rates)), key=lambda i: losses[i])
                axes.plot(rates[best], losses[best], "o", color=colour, ms=8, mfc="none")
            axes.set_xscale("log", base=2)
            axes.set_title({"standard": "standard", "mup": f"muP, base width {min(widths)}"}[kind])
            axes.set_xlabel("learning rate (peak, of the base width)")
        finite = [x for x in found.values() if math.isfinite(x)]
        panels[0].set_ylim(min(finite) - 0.1, sorted(finite)[int(0.9 * len(finite))] + 0.1)
        panels[0].set_ylabel("held-out loss, nats per token")
        panels[0].legend()
        return png(plt, figure)


if __name__ == "__main__":
    main()
