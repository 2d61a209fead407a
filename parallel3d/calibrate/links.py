"""Timings of the collectives between the ranks of this machine."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.calibrate.device import Effort
from parallel3d.mesh.mesh import Mesh
from parallel3d.mesh.transfer import all_gather_single, reduce_scatter_single

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "send")
SIZES = tuple(4 * 1024 * 4**i for i in range(8))  # bytes of the whole tensor, 4 KiB to 64 MiB


def measure_links(
    mesh: Mesh, effort: Effort, say: Callable[[str], None]
) -> dict[str, list[tuple[int, float]]]:
    """For each collective over all ranks, and a send between two: (bytes, seconds) by size.

    Bytes are of the whole, gathered tensor. Collective; seconds are the slowest rank's.
    """
    results: dict[str, list[tuple[int, float]]] = {kind: [] for kind in KINDS}
    for kind in KINDS:
        say(f"{kind} between {mesh.size('world')} ranks")
        for size in SIZES:
            seconds = _seconds(kind, size, mesh, effort)
            results[kind].append((size, seconds))
            # A line needs two sizes, however slow a busy machine is.
            if len(results[kind]) > 1 and 4 * seconds > effort.longest:
                break
    return results


def _seconds(kind: str, size: int, mesh: Mesh, effort: Effort) -> float:
    run = _collective(kind, size, mesh)
    mesh.barrier()
    run()
    taken: list[float] = []
    spent = 0.0
    while len(taken) < 3 or (spent < effort.seconds and len(taken) < 20):
        mesh.barrier()
        torch.get_device_module(mesh.device).synchronize()
        start = time.perf_counter()
        run()
        torch.get_device_module(mesh.device).synchronize()
        mine = time.perf_counter() - start
        # The same on each rank, so that all stop together.
        taken.append(max(row[0] for row in mesh.gather_floats([mine])))
        spent += taken[-1]
    return min(taken)


def _collective(kind: str, size: int, mesh: Mesh) -> Callable[[], Any]:
    group, ranks = mesh.group("world"), mesh.size("world")
    numel = max(1, size // 4 // ranks) * ranks
    whole = torch.ones(numel, device=mesh.device)
    part = torch.ones(numel // ranks, device=mesh.device)
    if kind == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group)
    if kind == "all_gather":
        return lambda: all_gather_single(whole, part, group=group)
    if kind == "reduce_scatter":
        return lambda: reduce_scatter_single(part, whole, group=group)
    return _send(whole, mesh)


def _send(tensor: Tensor, mesh: Mesh) -> Callable[[], None]:
    """From the first rank to the second; the others have nothing to do."""
    coord = mesh.coord("world")

    def run() -> None:
        if coord == 0:
            dist.send(tensor, group=mesh.group("world"), group_dst=1)
        elif coord == 1:
            dist.recv(tensor, group=mesh.group("world"), group_src=0)

    return run
