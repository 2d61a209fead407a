"""Two nodes, or more: all that one machine's command looks at, on meshes whose axes cross them.

On each node, with a folder that all of them see:

    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        tests/gpu/nodes.py --folder /shared/try

A rank of the last node is killed, and stopped, and the run goes on from what was saved, on one
clock (`faults`); the losses, norms and weights are those of plain transformers, and each rank's
peak is beside the plan (`meshes`). Prints a line for each, and ends with code 1 where something is
wrong.
"""

import argparse
import gc
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
from parallel3d.plan.memory.peak import per_rank
from parallel3d.plan.setting import Setting
from parallel3d.verify.measure import ReferenceErrors
from parallel3d.verify.shrink import shrink
from tests.gpu import test_device as device
from tests.gpu.crossing import WITHIN, Crossing
from tests.meshes import sizes_of
from tests.plan.memory.test_peak_of_real_runs import config_of as small_config
from tests.verify.configs import config_of
from tests.verify.measuring import errors_of, reference_on_batches, train_and_compare


def meshes_of(launch: Launch) -> dict[str, tuple[int, int, int]]:
    """By the axis that crosses from node to node, which is the outermost that is larger than 1.

    dp first: DeepSpeed numbers modules as they are made, and compares those of dp ranks; after
    a pipeline, whose stages differ, those of another mesh would not be the same.
    """
    world = launch.world_size
    here = launch.local_world_size
    two = 2 if here % 2 == 0 else 1
    nodes = world // here
    return {"dp": (1, world // two, two), "pp": (nodes, here // two, two)}


def compare(sizes: tuple[int, int, int], zero: int, folder: Path) -> tuple[ReferenceErrors, float]:
    """The largest errors of all ranks on a mesh, and the seconds that it took."""
    raw = config_of(schedule="one_f_one_b", zero=zero, sequence_parallel=True)
    named = sizes_of(sizes)
    config = shrink(RunConfig.from_dict(raw), (named,), str(folder))[named]
    mesh = Mesh(**named._asdict())
    rank_folder = folder / f"rank-{mesh.rank}"
    rank_folder.mkdir(exist_ok=True)
    reference = reference_on_batches(config, rank_folder)
    mesh.barrier()
    start = time.monotonic()
    mine = train_and_compare(mesh.rank, config, reference)
    return errors_of(config, gather_json(mesh, mine)), time.monotonic() - start


def meshes(launch: Launch, folder: Path) -> bool:
    """Whether each mesh gives plain transformers' numbers, and takes the memory that is planned."""
    tolerance = 1e-4 if torch.accelerator.is_available() else 1e-5
    right = True
    for axis, sizes in meshes_of(launch).items():
        name = f"{axis} crosses: {'x'.join(map(str, sizes)):8}"
        for zero in (1, 3):
            errors, seconds = compare(sizes, zero, folder)
            wrong = [] if errors.within(tolerance) else [f"more than {tolerance:.0e}"]
            right &= say(launch, f"{name} ZeRO-{zero}  {errors}  {seconds:.1f} s", wrong)
        text, wrong = steps(sizes, launch)
        right &= say(launch, f"{name} {text}", wrong)
    return right


def steps(sizes: tuple[int, int, int], launch: Launch) -> tuple[str, list[str]]:
    """What is to be said of the peaks of all ranks and of the speed, and what is wrong."""
    config = small_config(sizes, zero=3, schedule="one_f_one_b", **device.SIZES)
    plan = [memory.total for memory in per_rank(Setting.from_config(config))]
    gc.collect()  # the engines before, whose memory would count
    figures = device.look_at_steps(launch.rank, config)
    rows = gather_json(Mesh(**sizes_of(sizes)._asdict()), [figures["peak"], figures["seconds"]])
    tokens = config.micro_batch_size * config.num_microbatches * config.data.sequence_length
    speed = f"{tokens * sizes[1] / max(seconds for _, seconds in rows):,.0f} tokens/s"
    if not torch.accelerator.is_available():
        return f"ZeRO-3  {speed}", []
    a_stage = sizes[1] * sizes[2]
    errors = [peak / plan[rank // a_stage] - 1 for rank, (peak, _) in enumerate(rows)]
    worst = max(errors, key=abs)
    wrong = [f"the plan is {plan} bytes"] if abs(worst) > 0.1 else []
    return f"ZeRO-3  {speed}, peaks within {worst:+.1%} of the plan", wrong


def faults(launch: Launch, folder: Path) -> bool:
    """Whether all others end in time and say whom they lost, and the run goes on."""
    crossing = Crossing(launch, folder / "faults")
    right = True
    for number in WITHIN:
        right &= say(launch, *crossing.blow(number))
        right &= say(launch, *crossing.resume(number))
    return right


def say(launch: Launch, text: str, wrong: list[str]) -> bool:
    """Print a finding once; gives whether nothing is wrong."""
    if launch.rank == 0:
        print(text + "".join(f"  WRONG: {reason}" for reason in wrong), flush=True)
    return not wrong


def main() -> int:
    """The exit code: 0 where all is as it should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="that all nodes see")
    parser.add_argument("--only", choices=("faults", "meshes"), help="a part of it")
    arguments = parser.parse_args()
    folder = arguments.folder.absolute()
    launch = Launch.from_environment()
    folder.mkdir(parents=True, exist_ok=True)
    if launch.rank % launch.local_world_size == 0:
        print(f"{socket.gethostname()}: ranks {launch.rank} on, torch {torch.__version__}")
    # Faults first: their ranks are children, and need the devices for themselves.
    parts = {"faults": faults, "meshes": meshes}
    chosen = [arguments.only] if arguments.only else list(parts)
    return int(not all([parts[name](launch, folder) for name in chosen]))


if __name__ == "__main__":
    ended = main()
    sys.stdout.flush()
    os._exit(ended)
