"""Host time of ZeRO-3's gather and reduction of a layer, by the number of data-parallel ranks.

    python benchmarks/host_time.py

One process stands for rank 0 of a world of torch's "fake" process group, whose collectives do
nothing. The layer is Llama's: nine weights, with few elements each, so that what is timed are calls
and not copies. Each dp size has a process of its own.
"""

import argparse
import statistics
import subprocess
import sys
import time
from unittest.mock import patch

SIZES = (8, 64, 128, 512)
LAYERS = 2
WEIGHTS = 9
ELEMENTS = 2048
ROUNDS = 20


def measure(dp: int) -> tuple[float, float]:
    """Return the milliseconds that a layer's gather and its reduction take, medians."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from parallel3d.engine import Engine
    from parallel3d.engine.construction import building
    from parallel3d.mesh import mesh as mesh_module
    from parallel3d.mesh.launch import Launch
    from parallel3d.model.spec import Init, ParamSpec
    from parallel3d.tensor.cut import cut_parameter, held_parameters
    from tests.engine.settings import settings_of

    def join(launch: Launch, device: torch.device, watched: bool) -> None:
        dist.init_process_group("fake", rank=0, world_size=dp, store=FakeStore())

    with patch.object(mesh_module, "join", join):
        mesh = mesh_module.Mesh(dp=dp, launch=Launch(0, dp, 0))
    torch.set_num_threads(1)  # several would wait for each other where the cores are busy
    settings = settings_of(weights="per_step", zero={"stage3_param_persistence_threshold": 0})

    def layer() -> nn.Module:
        weights = (cut_parameter((ELEMENTS,)) for _ in range(WEIGHTS))
        return nn.ParameterList(weights)

    with building(settings, mesh):
        layers = [layer() for _ in range(LAYERS)]
    stages = nn.ModuleList(layers)
    specs = [
        ParamSpec(name, (ELEMENTS,), (), Init(0.0), weight_decay=True)
        for name, _ in stages.named_parameters()
    ]
    held = list(held_parameters(stages, specs, mesh))
    engine = Engine(stages, held, settings, mesh=mesh, layers={0: layers})
    gathers = []
    reductions = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        engine.gather(0)
        engine.wait_for_weights(0)
        gathers.append(time.perf_counter() - start)
        with engine.accumulation():
            for parameter in stages.parameters():
                parameter.grad = torch.ones(ELEMENTS)
            start = time.perf_counter()
            engine.reduce(0)
            reductions.append(time.perf_counter() - start)
        engine.release(0)
    in_ms = 1000 / LAYERS
    return statistics.median(gathers) * in_ms, statistics.median(reductions) * in_ms


def main() -> None:
    """Print a line for each dp size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dp", type=int, help="measure this size alone, in this process")
    args = parser.parse_args()
    if args.dp:
        print("{:.3f} {:.3f}".format(*measure(args.dp)))
        return
    print("  dp  gather ms  reduce ms  (of a layer of nine weights)")
    for dp in SIZES:
        command = [sys.executable, __file__, "--dp", str(dp)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)
        gather, reduce = map(float, done.stdout.split()[-2:])
        print(f"{dp:>4}  {gather:>9.2f}  {reduce:>9.2f}")


if __name__ == "__main__":
    main()
