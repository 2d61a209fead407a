"""Reproduce heap corruption in torch's ProcessGroupGloo (torch 2.13, Linux, CPU; one process).

    python benchmarks/upstream/gloo_coalesced.py              # crashes within a minute
    python benchmarks/upstream/gloo_coalesced.py --single     # control: runs for --seconds

Each ProcessGroupGloo has two worker threads. After a collective, the thread that ran it assigns
`pgStatus_->lastCompletedWorkName = opTypeToString(...)` without holding a lock
(ProcessGroupGloo::runLoop). When two collectives end at the same time, both threads assign the same
std::string. Names of up to 15 letters ("ALLREDUCE") are stored inside the string object.
"ALLGATHER_COALESCED" has 19 letters and is stored on the heap, so one thread frees the buffer that
the other one writes to, or both free it. A later malloc of one of the threads then fails:
"malloc(): unaligned tcache chunk detected", or SIGSEGV in malloc.

parallel3d runs no coalesced collective on a CPU (parallel3d/tensor/collectives.py).
"""

import argparse
import time

import torch
import torch.distributed as dist


def main() -> None:
    """Start eight coalesced gathers and eight coalesced reductions at a time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--single", action="store_true", help="do not coalesce")
    parser.add_argument("--seconds", type=float, default=120.0, help="stop after so long")
    args = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    shards, wholes = ([torch.ones(16) for _ in range(2)] for _ in range(2))
    given, reduced = ([torch.ones(4) for _ in range(16)] for _ in range(2))
    rounds = 0
    end = time.monotonic() + args.seconds
    while time.monotonic() < end:
        works = []
        for _ in range(8):
            if args.single:
                for whole, shard in zip(wholes, shards, strict=True):
                    works.append(dist.all_gather_single(whole, shard, async_op=True))
                for part, whole in zip(reduced, given, strict=True):
                    works.append(dist.reduce_scatter_single(part, whole, async_op=True))
            else:
                works.append(group.all_gather_single_coalesced(wholes, shards))
                works.append(group.reduce_scatter_single_coalesced(reduced, given))
        for work in works:
            work.wait()
        rounds += 1
    print(f"{rounds:,} rounds without a crash")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
