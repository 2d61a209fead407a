"""A block's step with experts over that of a dense block of the same active FLOPs, in one run.

python benchmarks/experts.py [--hidden 512 --inner 512 --experts 8 --chosen 2 --tokens 2048]

Both blocks take turns in one process of one thread. The time is the process's own CPU time, which
other programs hardly move; the ratio is that of the fastest turns.
"""

import argparse
import time

import torch

from parallel3d import models
from parallel3d.mesh.mesh import Mesh
from parallel3d.tensor.context import LayerContext
from parallel3d.tensor.random_key import RandomKey


def main() -> None:
    """Print the seconds of both blocks' steps, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    sizes = {"hidden": 512, "inner": 512, "experts": 8, "chosen": 2, "tokens": 2048, "turns": 9}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.set_num_threads(1)
    mesh = Mesh()
    context = LayerContext(mesh.tensor.group, RandomKey(0))
    shared = {"hidden_size": args.hidden, "num_hidden_layers": 1, "num_attention_heads": 8}
    dense = {"family": "llama", "intermediate_size": args.chosen * args.inner}
    experts = {
        "family": "moe",
        "intermediate_size": args.inner,
        "num_experts": args.experts,
        "num_experts_per_tok": args.chosen,
    }
    seconds = {}
    blocks = {}
    for settings in (dense, experts):
        family = settings["family"]
        config = models.config_class(family)(vocab_size=64, **shared, **settings)
        spec = models.layers(config)[1]
        module = __import__(spec.build.partition(":")[0], fromlist=["Block"]).Block
        blocks[family] = module(config, spec.name, context)
        for parameter in blocks[family].parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        seconds[family] = []
    x = torch.randn(args.tokens // 256, 256, args.hidden, requires_grad=True)
    for _ in range(args.turns):
        for family, block in blocks.items():
            start = time.process_time()
            y = block(x)
            (y if isinstance(y, torch.Tensor) else y[0]).sum().backward()
            seconds[family].append(time.process_time() - start)
    fastest = {family: min(times) for family, times in seconds.items()}
    print(f"dense {fastest['llama']:.3f} s, experts {fastest['moe']:.3f} s")
    print(f"ratio {fastest['moe'] / fastest['llama']:.2f}")
    mesh.close()


if __name__ == "__main__":
    main()
