"""How well one run on this machine predicts the others: python -m benchmarks.from_run_here.

    OMP_NUM_THREADS=1 python -m benchmarks.from_run_here [--hardware FILE] [--models small]

Three models train on four meshes each, of one, two and four ranks, whose steps are recorded as by
`wall_clock_breakdown`. Each run of a model is given in turn, as with `plan --from-run`, and the
others are predicted. Measured is the shortest mean of WINDOW steps in --rounds of all runs: others
use the machine too, and its speed changes within minutes.
Without --hardware the machine is calibrated first, which takes a minute.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any

import torch

from parallel3d.base.mesh_sizes import MeshSizes
from parallel3d.config import CompleteConfig, RunConfig, hardware
from parallel3d.config.hardware import Hardware
from parallel3d.extras.calibrate.describe import calibrate
from parallel3d.extras.calibrate.steps import SmallRun
from parallel3d.mesh.mesh import Mesh
from parallel3d.pipeline.executor import Microbatch
from parallel3d.plan.report.explain_run import explain_run
from parallel3d.plan.report.from_run import correction_of
from parallel3d.plan.report.plan_rows import as_written
from parallel3d.plan.request import request_of
from parallel3d.plan.search.plans import Plan
from parallel3d.train import profiler
from parallel3d.train.assembly import assemble
from parallel3d.verify.local_ranks import run_locally

ONE = MeshSizes()
SMALL = SmallRun(ONE, 0, 256, 4, micro=4, microbatches=4, vocab=1024)
WIDE = SmallRun(ONE, 0, 512, 4, micro=2, microbatches=4, vocab=2048)
LLAMA = SmallRun(ONE, 0, 384, 6, family="llama", micro=4, microbatches=4, vocab=2048)
MODELS: dict[str, list[SmallRun]] = {
    "small": [
        SMALL,
        SMALL._replace(mesh=MeshSizes(dp=2), zero=1, microbatches=2),
        SMALL._replace(mesh=MeshSizes(pp=2), schedule="one_f_one_b"),
        SMALL._replace(mesh=MeshSizes(pp=2, dp=2), zero=1, microbatches=2),
    ],
    "wide": [
        WIDE,
        WIDE._replace(mesh=MeshSizes(tp=2)),
        WIDE._replace(mesh=MeshSizes(dp=2), zero=3, microbatches=2),
        WIDE._replace(mesh=MeshSizes(dp=4), zero=1, microbatches=1),
    ],
    "llama": [
        LLAMA,
        LLAMA._replace(mesh=MeshSizes(pp=2)),
        LLAMA._replace(mesh=MeshSizes(pp=4), schedule="one_f_one_b"),
        LLAMA._replace(mesh=MeshSizes(dp=2, tp=2), zero=1, microbatches=2),
    ],
}
WINDOW = 3
Ranks = list[dict[str, Any]]


def measured_steps(rank: int, raw: dict[str, Any], steps: int) -> Ranks:
    """The parts of a run's mean step on each rank, as a run's journal has them."""
    config = RunConfig.from_dict(raw).completed()
    mesh = Mesh(**config.mesh.groups)
    parts = assemble(config, mesh)
    shape = (config.num_microbatches, config.micro_batch_size, config.data.sequence_length + 1)
    text = torch.randint(int(config.model.vocab_size), shape)
    batch = [Microbatch(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in text]
    recorded: list[Ranks] = []

    def keep(event: str, *, ranks: Ranks, **values: object) -> None:
        recorded.append(ranks)

    profiler.record = keep
    watch = profiler.StepWatch(config, mesh, parts, say=print)
    for number in range(steps):
        with watch.around(SimpleNamespace(number=number)):  # type: ignore[arg-type]
            parts.executor.run(batch, number)
            parts.engine.step(config.optimizer.params.lr)
    return min(recorded[1:], key=step_of) if rank == 0 else []


def config_of(run: SmallRun, steps: int) -> CompleteConfig:
    """The config of a run that records the parts of its steps."""
    raw = run.config().to_dict()
    raw |= {"wall_clock_breakdown": True, "steps_per_print": WINDOW}
    raw["parallel3d"]["train"] |= {"steps": steps}
    return RunConfig.from_dict(raw).completed()


def step_of(ranks: Ranks) -> float:
    """The seconds of a mean step, whose parts add up to it on each rank."""
    return mean(sum(rank[name] for name in profiler.PARTS) for rank in ranks)


def plan_of(run: SmallRun, machine: Hardware) -> Plan:
    """The plan of a run on the machine."""
    config = run.config()
    return as_written(config, request_of(config, machine, run.mesh.ranks))


def predicted(given: SmallRun, ranks: Ranks, other: SmallRun, machine: Hardware) -> float:
    """The seconds of another run's step, corrected by the parts of the given one."""
    plan = plan_of(given, machine)
    corrected = correction_of(plan, explain_run(plan, ranks)).applied(machine)
    return plan_of(other, corrected).time.seconds


def measured_round(models: list[str], steps: int) -> dict[str, Ranks]:
    """The parts of each run's shortest window of steps, by the run."""
    measured = {}
    for name in models:
        for run in MODELS[name]:
            raw = config_of(run, steps).to_dict()
            measured[str(run)] = run_locally(measured_steps, run.mesh.ranks, raw, steps)[0]
    return measured


def main() -> None:
    """Print each run, what each other run predicts for it, and the mean errors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5 * WINDOW)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hardware", help="a description of this machine; else it is calibrated")
    parser.add_argument("--runs", type=Path, help="where the measured parts are kept")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    args = parser.parse_args()
    machine = described(args.hardware)
    rounds: list[dict[str, Ranks]] = []
    if args.runs and args.runs.exists():
        rounds = json.loads(args.runs.read_text())
    while len(rounds) < args.rounds:
        rounds.append(measured_round(args.models, args.steps))
        if args.runs:
            args.runs.write_text(json.dumps(rounds))
    measured = {run: min((each[run] for each in rounds), key=step_of) for run in rounds[0]}
    errors = []
    plain = []
    for name in args.models:
        runs = MODELS[name]
        for other in runs:
            seconds = step_of(measured[str(other)])
            own = plan_of(other, machine).time.seconds
            plain.append(abs(own / seconds - 1))
            ratios = []
            for given in runs:
                if given is not other:
                    told = predicted(given, measured[str(given)], other, machine)
                    ratios.append(told / seconds)
                    errors.append(abs(ratios[-1] - 1))
            words = " ".join(f"{ratio:5.2f}" for ratio in ratios)
            print(f"{name:6} {other.mesh} zero {other.zero}: {seconds:.4f} s, ", end="")
            print(f"planned {own / seconds:.2f} times, from the others {words}")
    print(f"mean error: {100 * mean(plain):.1f} % without a run, ", end="")
    print(f"{100 * mean(errors):.1f} % from one run, over {len(errors)} pairs")


def described(name: str | None) -> Hardware:
    """The description called `name`, or that of a calibration."""
    if name is not None:
        return hardware.load(name)
    with tempfile.TemporaryDirectory() as folder:
        return calibrate(say, Path(folder) / "this-machine.json")


def say(text: str) -> None:
    """Progress, beside the table."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
