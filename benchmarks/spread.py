"""How far loss and norm of one config drift apart by mesh, precision and number of steps.

    python -m benchmarks.spread --config ds.json [--meshes 2x1x1 1x2x1] [--precisions fp32 bf16]
                                [--at 1 10 100] [--keep FOLDER] [--SETTING VALUE ...]

Each is a run of the real command on this machine (torchrun, pp x dp x tp ranks) with the same
batches; the config's first mesh is one process. A cell is the relative difference of the loss to
the run of one process in the same precision, and of the norm: the mean over the last tenth of the
steps so far. The last rows are what one process does with another seed, and in fp32.
Runs are kept in `--keep`, and what is there is not run again.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from math import prod
from pathlib import Path
from statistics import mean

from parallel3d.verify.local_ranks import free_port

PRECISIONS = {
    "fp32": {"bf16.enabled": "false", "fp16.enabled": "false"},
    "bf16": {"bf16.enabled": "true", "fp16.enabled": "false"},
    "fp16": {"fp16.enabled": "true", "bf16.enabled": "false"},
}
ONE_PROCESS = "1x1x1"
Curve = list[tuple[float, float]]  # loss and gradient norm of each step


def curve(args: argparse.Namespace, mesh: str, precision: str, seed: int) -> Curve:
    """Train on a mesh, if the run is not there yet; return its losses and norms."""
    name = f"{mesh}-{precision}-{seed}"
    metrics = args.keep / name / "metrics.jsonl"
    if not (args.keep / f"{name}.done").exists():
        pp, dp, tp = mesh.split("x")
        settings = {
            "mesh.pp": pp,
            "mesh.dp": dp,
            "mesh.tp": tp,
            "gradient_accumulation_steps": "null",
            "train_batch_size": str(args.batch),
            "train.steps": str(args.at[-1]),
            "train.seed": str(seed),
            "run.directory": str(args.keep),
            "run.name": name,
        }
        settings |= PRECISIONS[precision]
        words = [word for key, value in settings.items() for word in (f"--{key}", value)]
        ranks = prod(map(int, mesh.split("x")))
        launcher = ["torchrun", f"--master_port={free_port()}", f"--nproc_per_node={ranks}"]
        command = ["-m", "parallel3d", "train", "--config", args.config, *words, *args.settings]
        subprocess.run(
            [*launcher, *command],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            check=True,
            stdout=subprocess.DEVNULL,
        )
        (args.keep / f"{name}.done").touch()
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [(row["loss"], row["grad_norm"]) for row in rows]


def difference(curve: Curve, other: Curve, step: int) -> str:
    """Return the mean relative difference of loss and norm over the last tenth of `step` steps."""
    first = step - max(1, step // 10)
    losses = []
    norms = []
    for (loss, norm), (loss2, norm2) in zip(curve[first:step], other[first:step], strict=True):
        losses.append(abs(loss / loss2 - 1))
        norms.append(abs(norm / norm2 - 1))
    return f"{mean(losses):.0e} / {mean(norms):.0e}"


def main() -> None:
    """Print a table in Markdown."""
    args = parse_args()
    args.keep.mkdir(parents=True, exist_ok=True)
    steps = " | ".join(f"step {step}" for step in args.at)
    print(f"| precision | mesh pp×dp×tp | {steps} |\n|---|---|{'---|' * len(args.at)}")
    for precision in args.precisions:
        base = curve(args, ONE_PROCESS, precision, args.seed)
        others = [(mesh, curve(args, mesh, precision, args.seed)) for mesh in args.meshes]
        others.append(("1×1×1, another seed", curve(args, ONE_PROCESS, precision, args.seed + 1)))
        if precision != "fp32" and "fp32" in args.precisions:
            others.append(("1×1×1, fp32", curve(args, ONE_PROCESS, "fp32", args.seed)))
        for name, other in others:
            cells = " | ".join(difference(other, base, step) for step in args.at)
            print(f"| {precision} | {name.replace('x', '×')} | {cells} |", flush=True)


def parse_args() -> argparse.Namespace:
    """Read the command line; what is not an option here is a setting of the config."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--config", required=True)
    add("--meshes", nargs="+", default=["2x1x1", "1x2x1", "1x1x2"])
    add("--precisions", nargs="+", choices=PRECISIONS, default=["fp32", "bf16"])
    add("--at", nargs="+", type=int, default=[1, 10, 100], help="steps, rising")
    add("--batch", type=int, default=8, help="samples of a step, on every mesh (default: 8)")
    add("--seed", type=int, default=1)
    add("--keep", type=Path, default=Path(tempfile.mkdtemp()), help="folder of the runs")
    args, args.settings = parser.parse_known_args()
    return args


if __name__ == "__main__":
    sys.exit(main())
