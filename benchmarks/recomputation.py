"""What a recomputation (train.check_bits.recompute_every) costs, in steps, as ratios in one run.

    python benchmarks/recomputation.py [--mesh 2x1x1 --zero 1 --hidden 256 --layers 4 --seq 256]

Steps with and without a check take turns. The extra CPU time of a checked step on all ranks,
divided by a step's and by N, is the share of a run that a check every N steps takes. Other programs
on the machine hardly change CPU time; all ranks check at once, so wall time has the same share.
"""

import argparse
import statistics
import time

import torch

from parallel3d.base.mesh_sizes import MeshSizes
from parallel3d.extras.calibrate.steps import SmallRun
from parallel3d.extras.guard.recomputation import Recomputation
from parallel3d.mesh.mesh import Mesh
from parallel3d.pipeline.executor import Microbatch
from parallel3d.train.assembly import assemble
from parallel3d.verify.local_ranks import run_locally


def on_rank(rank: int, args: argparse.Namespace) -> tuple[list[float], list[float]]:
    """CPU seconds of plain and of checked steps, in turns, on one rank."""
    sizes = MeshSizes.parse(args.mesh)
    run = SmallRun(
        sizes,
        args.zero,
        args.hidden,
        args.layers,
        micro=args.batch,
        microbatches=args.microbatches,
        seq=args.seq,
        vocab=4096,
        schedule="one_f_one_b" if sizes.pp > 1 else "gpipe",
    )
    config = run.config()
    mesh = Mesh(**sizes._asdict())
    parts = assemble(config, mesh)
    recomputation = Recomputation(config, mesh, parts)
    text = torch.randint(run.vocab, (run.microbatches, args.batch, args.seq + 1))
    batch = [Microbatch(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in text]

    def plain(step: int) -> None:
        parts.executor.run(batch, step)
        mesh.messages.gather_floats([0.0])
        parts.engine.step(1e-3)

    def checked(step: int) -> None:
        with recomputation.recording(step, len(batch)):
            parts.executor.run(batch, step)
        recomputation.compare()
        with recomputation.updating():
            parts.engine.step(1e-3)

    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(args.rounds + 1):
        for kind, step in enumerate((plain, checked)):
            mesh.barrier()
            began = time.process_time()
            step(number)
            mesh.barrier()
            if number:  # the first warms up
                seconds[kind].append(time.process_time() - began)
    return seconds


def main() -> None:
    """Print the seconds of both kinds of steps, and the share of a run for several N."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mesh", default="2x1x1")
    for name, default in [
        ("zero", 1),
        ("hidden", 256),
        ("layers", 4),
        ("seq", 256),
        ("batch", 4),
        ("microbatches", 8),
        ("rounds", 7),
    ]:
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    ranks = MeshSizes.parse(args.mesh).ranks
    found = run_locally(on_rank, ranks, args, timeout=1800)
    plain, checked = (
        [sum(of_ranks) for of_ranks in zip(*(rank[kind] for rank in found), strict=True)]
        for kind in range(2)
    )
    ratios = [b / a - 1 for a, b in zip(plain, checked, strict=True)]
    extra = statistics.median(ratios)
    plain_seconds = statistics.median(plain)
    checked_seconds = statistics.median(checked)
    print(f"CPU seconds of a step: {plain_seconds:.3f}, with a check {checked_seconds:.3f}")
    print(f"extra steps per check: {extra:.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    for every in (1, 10, 100, 1000):
        print(f"every {every:>4} steps: {100 * extra / every:.3g} % of the run")


if __name__ == "__main__":
    main()
