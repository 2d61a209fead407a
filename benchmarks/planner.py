"""The planner's step times against real training steps on this machine.

    OMP_NUM_THREADS=1 python benchmarks/planner.py [--rounds 2 --steps 4 --json]

Each round calibrates the machine, as `launch/plan.py --calibrate` does, and then trains: settings
of one number of ranks take turns, step by step, so that whatever disturbs the machine disturbs all
alike. None of them is among the small runs that calibration looks at. Measured is the median step,
over all rounds (--least: the least, for a machine that others use); predicted the median of what
the rounds' calibrations give. About 6 minutes.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from statistics import mean, median

import torch

from parallel3d.base.mesh_sizes import MeshSizes
from parallel3d.config.hardware import Hardware
from parallel3d.extras.calibrate.describe import calibrate
from parallel3d.extras.calibrate.steps import SmallRun, time_steps
from parallel3d.plan.setting import Setting
from parallel3d.plan.time.operators import Curves
from parallel3d.plan.time.step import step_time
from parallel3d.verify.local_ranks import run_locally

RUNS = (
    SmallRun(MeshSizes(), 0, 512, 4, microbatches=4, vocab=2048),
    SmallRun(MeshSizes(), 3, 384, 6, microbatches=4, vocab=4096),
    SmallRun(MeshSizes(), 0, 768, 3, family="llama", seq=256, vocab=2048),
    SmallRun(MeshSizes(), 1, 512, 4, microbatches=4, seq=256, offload="cpu"),
    SmallRun(MeshSizes(), 0, 512, 6, microbatches=2, seq=256, recompute="full"),
    SmallRun(MeshSizes(dp=2), 1, 512, 4, microbatches=4, vocab=2048),
    SmallRun(MeshSizes(dp=2), 3, 512, 4, micro=4, microbatches=2, vocab=2048),
    SmallRun(MeshSizes(dp=2), 3, 384, 6, family="llama", micro=4, microbatches=4, offload="cpu"),
    SmallRun(MeshSizes(dp=2), 0, 384, 8, micro=4, microbatches=2, vocab=4096, recompute="full"),
    SmallRun(MeshSizes(pp=2), 0, 512, 6, microbatches=8, vocab=2048),
    SmallRun(MeshSizes(pp=2), 1, 384, 8, family="llama", microbatches=8, schedule="one_f_one_b"),
    SmallRun(MeshSizes(tp=2), 0, 512, 4, micro=4, microbatches=2, vocab=2048),
    SmallRun(MeshSizes(tp=2), 1, 768, 4, family="llama", micro=4, microbatches=1, vocab=4096),
)


def main() -> None:
    """Print a row for each setting: seconds measured and predicted, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--least", action="store_true", help="of the steps, not the median")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    measured: dict[SmallRun, list[float]] = {run: [] for run in RUNS}
    predicted: dict[SmallRun, list[float]] = {run: [] for run in RUNS}
    for number in range(args.rounds):
        say(f"round {number + 1} of {args.rounds}")
        with tempfile.TemporaryDirectory() as folder:
            hardware = calibrate(say, Path(folder) / "this-machine.json")
        for ranks in sorted({run.mesh.ranks for run in RUNS}):
            runs = [run for run in RUNS if run.mesh.ranks == ranks]
            say(f"training on {ranks} ranks, {len(runs)} settings in turns")
            taken = run_locally(time_steps, ranks, runs, args.steps, timeout=900)[0]
            for run, steps in zip(runs, taken, strict=True):
                measured[run] += [seconds for seconds, _ in steps]
                predicted[run].append(predict(run, hardware))
    typical = min if args.least else median
    rows = {run: (typical(measured[run]), median(predicted[run])) for run in RUNS}
    ratios = [ours / theirs for theirs, ours in rows.values()]
    errors = [abs(ratio - 1) for ratio in ratios]
    totals = {"median": median(errors), "mean": mean(errors), "worst": max(errors)}
    if args.json:
        table = [
            {"setting": str(run), "measured": theirs, "predicted": ours}
            for run, (theirs, ours) in rows.items()
        ]
        print(json.dumps({"settings": table, "error": totals}))
        return
    print(f"torch {torch.__version__}, {len(os.sched_getaffinity(0))} cores, ", end="")
    print(f"OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'not set')}")
    print(f"{'':64}{'measured':>10}{'predicted':>11}{'ratio':>7}")
    for (run, (theirs, ours)), ratio in zip(rows.items(), ratios, strict=True):
        print(f"{describe(run):64}{theirs:8.3f} s{ours:9.3f} s{ratio:7.2f}")
    print("error: " + ", ".join(f"{name} {100 * x:.1f} %" for name, x in totals.items()))


def predict(run: SmallRun, hardware: Hardware) -> float:
    """The planner's seconds of a run's step."""
    assert hardware.curves is not None
    setting = Setting.from_config(run.config())
    return step_time(setting, hardware, Curves(**hardware.curves)).seconds


def describe(run: SmallRun) -> str:
    """A setting in words, with its batch."""
    return f"{run}; {run.microbatches} x {run.micro} x {run.seq}"


def say(text: str) -> None:
    """Progress, beside the table."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
