"""What it costs a training step that its ranks are watched, as ratios in one run.

    python benchmarks/pulse.py [--ranks 2 --hidden 128 --layers 2 --seq 128 --batch 4 --rounds 20]

A pipeline of so many ranks trains in rounds of a few steps, watched and not watched in turns: while
it is not, the sentries are stopped and nothing is written to the pages. The ratio of the rounds'
medians moves with the machine; what the watch itself takes is measured, too: the CPU seconds of the
sentries, and the seconds in which a rank writes what it does.
"""

import argparse
import os
import statistics
import time
from typing import Any

import psutil
import torch
import torch.distributed as dist

from parallel3d.base.mesh_sizes import MeshSizes
from parallel3d.extras.calibrate.steps import SmallRun
from parallel3d.mesh.mesh import Mesh
from parallel3d.mesh.pulse import rank as pulse
from parallel3d.pipeline.executor import Microbatch
from parallel3d.train.assembly import assemble
from parallel3d.verify.local_ranks import run_locally


def on_rank(rank: int, args: argparse.Namespace) -> dict[str, Any]:
    """Rounds in turns on one rank: seconds of a step in each, and what the watch took."""
    mesh = Mesh(pp=args.ranks, watched=True)
    while not pulse.is_watched():
        time.sleep(0.05)
    [sentry] = psutil.Process().children()
    step = step_of(args, mesh)
    page = pulse._page
    writes = 0
    assert page is not None
    write = page.do

    def counted(text: str, waits: bool = False) -> None:
        nonlocal writes
        writes += 1
        write(text, waits)

    step()
    seconds: dict[bool, list[float]] = {True: [], False: []}
    sentries = own = 0.0
    for number in range(2 * args.rounds):
        watched = number % 4 in (0, 3)  # each comes first as often as the other
        pulse._page = page if watched else None
        (sentry.resume if watched else sentry.suspend)()
        mesh.barrier()
        before = sum(sentry.cpu_times()[:2])
        start = time.perf_counter()
        cpu = time.process_time()
        for _ in range(args.steps):
            step()
        seconds[watched].append((time.perf_counter() - start) / args.steps)
        if watched:
            sentries += sum(sentry.cpu_times()[:2]) - before
            own += time.process_time() - cpu
    sentry.resume()
    pulse._page = page
    page.do = counted  # type: ignore[method-assign]
    step()
    page.do = write  # type: ignore[method-assign]
    start = time.perf_counter()
    for _ in range(10_000):
        pulse.doing("1F10 of step 1000")
    one = (time.perf_counter() - start) / 10_000
    dist.barrier()
    pulse.leave(0)
    return {"seconds": seconds, "sentry": sentries, "own": own, "writes": writes, "one": one}


def step_of(args: argparse.Namespace, mesh: Mesh) -> Any:
    """A step of a GPT of the sizes asked for, under 1F1B with four microbatches a rank."""
    run = SmallRun(
        MeshSizes(pp=args.ranks),
        1,
        args.hidden,
        args.layers * args.ranks,
        micro=args.batch,
        microbatches=4 * args.ranks,
        seq=args.seq,
        vocab=4096,
        schedule="one_f_one_b",
    )
    parts = assemble(run.config(), mesh)
    text = torch.randint(run.vocab, (run.microbatches, args.batch, args.seq + 1))
    batch = [Microbatch(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in text]

    def step() -> None:
        parts.executor.run(batch)
        mesh.messages.gather_floats([0.0])
        parts.engine.step(1e-3)

    return step


def main() -> None:
    """Print the ratio of a watched step to one that is not, and the shares that explain it."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in [
        ("ranks", 2),
        ("hidden", 128),
        ("layers", 2),
        ("seq", 128),
        ("batch", 4),
        ("rounds", 20),
        ("steps", 3),
    ]:
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    found = run_locally(on_rank, args.ranks, args, timeout=1800)
    rounds = [found[0]["seconds"][watched] for watched in (True, False)]
    on, off = map(statistics.median, rounds)
    ratio = statistics.median(a / b for a, b in zip(*rounds, strict=True))
    sentries, own = (sum(r[key] for r in found) for key in ("sentry", "own"))
    writing = max(r["writes"] * r["one"] / statistics.median(r["seconds"][True]) for r in found)
    print(f"torch {torch.__version__}, {args.ranks} ranks, {os.cpu_count()} cores")
    print(f"a step watched {1e3 * on:.1f} ms, not watched {1e3 * off:.1f} ms")
    print(f"ratio, median of {args.rounds} pairs of rounds: {ratio:.4f}")
    print(f"CPU time of the sentries: {100 * sentries / own:.3f} % of the ranks'")
    print(
        f"writing what a rank does: {max(r['writes'] for r in found)} times a step, "
        f"{1e6 * found[0]['one']:.2f} us each, {100 * writing:.3f} % of a step"
    )


if __name__ == "__main__":
    main()
