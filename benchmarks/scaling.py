"""How many times as fast a step is on more ranks: measured, as planned, and ideal.

    python benchmarks/scaling.py [--ranks 1 2 4] [--hardware FILE.json] [--picture FILE.png]

One model and one batch, shared out along each axis of the mesh: replicas take fewer microbatches,
pipeline ranks fewer layers, tensor-parallel ranks a part of each. A rank has one thread. Runs of
one number of ranks take turns step by step, the numbers of ranks by rounds; each speed-up is of
medians. Ideal is the number of ranks, on a CPU no more than there are cores. The plan is of this
machine as `launch/plan.py --calibrate` describes it (a minute, unless --hardware has the file).
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch

from parallel3d.base.mesh_sizes import WITHOUT_CP as AXES
from parallel3d.base.mesh_sizes import MeshSizes
from parallel3d.config import hardware
from parallel3d.config.hardware import Hardware
from parallel3d.extras.calibrate.describe import calibrate
from parallel3d.extras.calibrate.steps import SmallRun, time_steps
from parallel3d.extras.report.page import png, style
from parallel3d.plan.setting import Setting
from parallel3d.plan.time.operators import Curves
from parallel3d.plan.time.step import step_time
from parallel3d.verify.local_ranks import run_locally

COLOURS = dict(zip(AXES, ("#2c6e8f", "#c0392b", "#35a07c"), strict=True))


def runs_of(args: argparse.Namespace, ranks: int) -> dict[str, SmallRun]:
    """One run along each axis; of a single rank there is one, by every name."""
    found = {}
    for axis in AXES:
        mesh = MeshSizes()._replace(**{axis: ranks})
        found[axis] = SmallRun(
            mesh,
            args.zero,
            args.hidden,
            args.layers,
            micro=args.micro,
            microbatches=args.microbatches // mesh.dp,
            seq=args.length,
            vocab=args.vocab,
            schedule="one_f_one_b",
            precision=args.precision,
        )
    return found


def measure(args: argparse.Namespace, machine: Hardware) -> list[dict[str, Any]]:
    """A row for each axis and number of ranks."""
    taken: dict[SmallRun, list[float]] = {}
    for number in range(args.rounds):
        for ranks in args.ranks:
            runs = list(dict.fromkeys(runs_of(args, ranks).values()))
            found = run_locally(time_steps, ranks, runs, args.steps, timeout=1800)[0]
            for run, steps in zip(runs, found, strict=True):
                taken.setdefault(run, []).extend(seconds for seconds, _ in steps)
            said = ", ".join(f"{run}: {median(taken[run]):.2f} s" for run in runs)
            print(f"round {number + 1}: {said}", file=sys.stderr, flush=True)
    rows = []
    cores = len(os.sched_getaffinity(0)) if machine.cores is not None else max(args.ranks)
    for axis in AXES:
        base = runs_of(args, args.ranks[0])[axis]
        for ranks in args.ranks:
            run = runs_of(args, ranks)[axis]
            rows.append(
                {
                    "axis": axis,
                    "ranks": ranks,
                    "seconds": median(taken[run]),
                    "planned_seconds": predict(run, machine),
                    "measured": median(taken[base]) / median(taken[run]),
                    "planned": predict(base, machine) / predict(run, machine),
                    "ideal": min(ranks, cores) / min(args.ranks[0], cores),
                }
            )
    return rows


def predict(run: SmallRun, machine: Hardware) -> float:
    """The planner's seconds of a run's step."""
    curves = Curves(**machine.curves) if machine.curves else None
    return step_time(Setting.from_config(run.config()), machine, curves).seconds


def picture(rows: list[dict[str, Any]]) -> bytes:
    """Speed-up over ranks: an axis has a colour; what is planned is dashed."""
    with style() as plt:
        figure, axes = plt.subplots(figsize=(5.4, 4), constrained_layout=True)
        for axis, colour in COLOURS.items():
            own = [r for r in rows if r["axis"] == axis]
            ranks = [r["ranks"] for r in own]
            axes.plot(ranks, [r["measured"] for r in own], "o-", color=colour, label=axis)
            planned = [r["planned"] for r in own]
            axes.plot(ranks, planned, "s--", color=colour, ms=3, label=f"{axis}, planned")
        own = [r for r in rows if r["axis"] == AXES[0]]
        ideal = [r["ideal"] for r in own]
        axes.plot([r["ranks"] for r in own], ideal, ":", color="#777777", label="ideal")
        axes.set_xticks([r["ranks"] for r in own])
        axes.set(xlabel="ranks", ylabel="times as fast as one rank", ylim=(0, None))
        axes.legend()
        return png(plt, figure)


def table(rows: list[dict[str, Any]]) -> str:
    """A line a row."""
    lines = ["| axis | ranks | step s | planned s | times as fast | planned | ideal |"]
    lines.append("|---|---|---|---|---|---|---|")
    for r in rows:
        lines.append(
            f"| {r['axis']} | {r['ranks']} | {r['seconds']:.3f} | {r['planned_seconds']:.3f} "
            f"| {r['measured']:.2f} | {r['planned']:.2f} | {r['ideal']:.0f} |"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Measure, and print a row for each axis and number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3, help="of each run and round")
    sizes = {"zero": 1, "hidden": 256, "layers": 8, "micro": 2, "microbatches": 8}
    for name, default in (sizes | {"length": 128, "vocab": 2048}).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--hardware", type=Path, help="this machine, as calibrated before")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"
    if args.hardware is not None:
        machine = hardware.load(str(args.hardware), "--hardware")
    else:
        with tempfile.TemporaryDirectory() as folder:
            said = Path(folder) / "this-machine.json"
            machine = calibrate(lambda text: print(text, file=sys.stderr), said)
    rows = measure(args, machine)
    if args.picture:
        args.picture.write_bytes(picture(rows))
    found = {"torch": torch.__version__, "cores": os.cpu_count(), "rows": rows}
    print(json.dumps(found) if args.json else table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
