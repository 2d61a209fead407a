"""Idle time as measured against as simulated, for every schedule found, on real ranks.

    python benchmarks/bubble.py [--pp 2 4] [--microbatches 8] [--milliseconds 100]

A forward sleeps for so long, and so do the two halves of a backward; transfers between the ranks
are real, and the executor is the one that trains. Ranks that sleep leave the cores free, so that
more of them than there are cores do not stretch each other's computes.
"""

import argparse
import json
import sys
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from parallel3d.mesh.mesh import Mesh
from parallel3d.pipeline.clock import timing
from parallel3d.pipeline.executor import Executor, Microbatch
from parallel3d.schedule.action import Op, Span
from parallel3d.schedule.schedule import Schedule, bubble, peak_in_flight, simulate
from parallel3d.schedule.schedules import load, make_schedule, names
from parallel3d.verify.local_ranks import run_locally

SHAPE = (4, 16, 32)  # [batch, seq, hidden] of what passes between stages


class Sleeper:
    """As much of an engine as the executor asks for, whose computes take fixed times."""

    def __init__(self, seconds: float, split: bool) -> None:
        self.settings = SimpleNamespace(dtype=torch.float32, reduces_once=True)
        self._seconds = seconds
        self._backward = seconds if split else 2 * seconds
        self._weight = torch.ones((), requires_grad=True)

    def forward(self, stage: int, x: Tensor, labels: Tensor | None, *_: None) -> Tensor:
        """What a stage gives: the loss [], or activations of SHAPE."""
        time.sleep(self._seconds)
        x = x.float() if x.is_floating_point() else torch.zeros(SHAPE)
        return (x * self._weight).mean() if labels is not None else x * self._weight

    evaluate = forward

    def backward(
        self, output: Tensor, grad: Tensor | None, *, side_loss: None, stage: int, last: bool
    ) -> None:
        """The input's gradient; the weights', too, where backwards are whole."""
        time.sleep(self._backward)
        output.backward(grad)

    def wait_for_weights(self, stage: int) -> None:
        """Nothing is gathered."""

    gather = release = reduce = wait_for_weights

    def accumulation(self) -> nullcontext[None]:
        """Nothing is reduced."""
        return nullcontext()


def spans_of(rank: int, name: str, sizes: tuple[int, int, int], seconds: float) -> list[Any]:
    """This rank's spans of the second of two steps, on the clock of all."""
    pp, count, _ = sizes
    mesh = Mesh(pp=pp)
    schedule = make_schedule(name, *sizes)
    split = any(action.op is Op.W for action in schedule.actions)
    engine: Any = Sleeper(seconds, split)
    key: Any = SimpleNamespace(step=0, microbatch=0)
    executor = Executor(schedule, mesh, engine, key=key, hidden_shape=SHAPE)
    make = executor.methods[Op.W]

    def weights(stage: int, microbatch: int) -> None:
        time.sleep(seconds)
        make(stage, microbatch)

    executor.methods[Op.W] = weights
    batch, seq, _ = SHAPE
    tokens = torch.zeros(batch, seq, dtype=torch.int64)
    microbatches = [Microbatch(tokens, tokens)] * count
    executor.run(microbatches)
    mesh.barrier()
    with timing(executor):
        executor.run(microbatches)
    zero = executor.started
    return [(str(a), zero + start, zero + end) for a, start, end in executor.spans]


def row(name: str, pp: int, count: int, seconds: float) -> dict[str, Any] | None:
    """One schedule at one size; None where no number of stages a rank will do."""
    sizes = next(((pp, count, v) for v in (1, 2) if not load(name).invalid(pp, count, v)), None)
    if sizes is None:
        return None
    schedule: Schedule = make_schedule(name, *sizes)
    cost = {Op.F: 1.0, Op.B: 2.0, Op.I: 1.0, Op.W: 1.0}
    planned = bubble(simulate(schedule, lambda action: cost.get(action.op, 0.0)))
    ranks = run_locally(spans_of, pp, name, sizes, seconds)
    parse = type(next(iter(schedule.actions))).parse
    spans = tuple(tuple(Span(parse(a), start, end) for a, start, end in rank) for rank in ranks)
    return {
        "schedule": name,
        "pp": pp,
        "num_microbatches": count,
        "stages_per_rank": sizes[2],
        "closed_form": load(name).bubble(*sizes),
        "simulated": planned,
        "measured": bubble(spans),
        "peak_in_flight": list(peak_in_flight(schedule)),
    }


def main() -> int:
    """Measure all and print a table; exit code 1 where one is more than 5 points off."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--pp", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--milliseconds", type=float, default=100)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = []
    for pp in args.pp:
        for name in names():
            measured = row(name, pp, args.microbatches, args.milliseconds / 1e3)
            if measured:
                rows.append(measured)
    if args.json:
        print(json.dumps({"rows": rows}))
    else:
        print("| schedule | pp | stages a rank | closed form | simulated | measured | in flight |")
        print("|---|---|---|---|---|---|---|")
        for r in rows:
            shares = " | ".join(f"{r[k]:.1%}" for k in ("closed_form", "simulated", "measured"))
            held = " ".join(map(str, r["peak_in_flight"]))
            print(f"| {r['schedule']} | {r['pp']} | {r['stages_per_rank']} | {shares} | {held} |")
    return int(any(abs(r["measured"] - r["simulated"]) > 0.05 for r in rows))


if __name__ == "__main__":
    sys.exit(main())
