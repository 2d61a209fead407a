"""Two nodes, or more: the numbers of plain transformers on meshes whose axes cross them.

On each node, with a folder that all of them see:

    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        tests/gpu/nodes.py --folder /shared/try

Prints a line for each mesh: the axis that crosses, the errors, the seconds. Ends with code 1 where
an error is too large. That save, kill and resume work there, `launch/train.py` shows.
"""

import argparse
import os
import socket
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from parallel3d.config import RunConfig
from parallel3d.mesh.agree import gather_json
from parallel3d.mesh.launch import Launch
from parallel3d.mesh.mesh import Mesh
from parallel3d.verify.measure import Errors, errors_of, train_and_compare
from parallel3d.verify.reference import train_reference
from parallel3d.verify.shrink import shrink
from tests.verify.configs import config_of


def meshes_of(launch: Launch) -> dict[str, tuple[int, int, int]]:
    """By the axis that crosses from node to node, which is the outermost that is larger than 1.

    dp first: DeepSpeed numbers modules as they are made, and compares those of dp ranks; after
    a pipeline, whose stages differ, those of another mesh would not be the same.
    """
    world, here = launch.world_size, launch.local_world_size
    two = 2 if here % 2 == 0 else 1
    nodes = world // here
    return {"dp": (1, world // two, two), "pp": (nodes, here // two, two)}


def compare(sizes: tuple[int, int, int], zero: int, folder: Path) -> tuple[Errors, float]:
    """The largest errors of all ranks on a mesh, and the seconds that it took."""
    raw = config_of(schedule="one_f_one_b", zero=zero, sequence_parallel=True)
    config = shrink(RunConfig.from_dict(raw), (sizes,), str(folder))[sizes]
    mesh = Mesh(*sizes)
    own = folder / f"rank-{mesh.rank}"
    own.mkdir(exist_ok=True)
    reference = train_reference(config, own)
    mesh.barrier()
    start = time.monotonic()
    mine = train_and_compare(mesh.rank, config, reference)
    return errors_of(config, gather_json(mesh, mine)), time.monotonic() - start


def main() -> int:
    """The exit code: 0 where all is within rounding."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="that all nodes see")
    folder = parser.parse_args().folder
    launch = Launch.from_environment()
    folder.mkdir(parents=True, exist_ok=True)
    tolerance = 1e-4 if torch.accelerator.is_available() else 1e-5
    code = 0
    if launch.rank % launch.local_world_size == 0:
        print(f"{socket.gethostname()}: ranks {launch.rank} on, torch {torch.__version__}")
    for axis, sizes in meshes_of(launch).items():
        for zero in (1, 3):
            errors, seconds = compare(sizes, zero, folder)
            right = errors.within(tolerance)
            code |= not right
            if launch.rank == 0:
                mesh = "x".join(map(str, sizes))
                said = "" if right else f"  TOO FAR: more than {tolerance:.0e}"
                print(f"{axis} crosses: {mesh:8} ZeRO-{zero}  {errors}  {seconds:.1f} s{said}")
    return int(code)


if __name__ == "__main__":
    ended = main()
    sys.stdout.flush()
    os._exit(ended)
