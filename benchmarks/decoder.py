"""The step of a Llama in the family `transformers`, relative to the hand-written family.

    python -m benchmarks.decoder --layers 16 --hidden 512 --seq 256

The blocks alone, forward and backward, in turns in one process; the medians are compared.
"""

import argparse
import time
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel3d import models
from parallel3d.pipeline.stages import build_layer
from parallel3d.tensor.context import LayerContext
from parallel3d.tensor.random_key import RandomKey

WARM_UP = 2  # steps that are not timed


def blocks_of(section: dict[str, object]) -> list[nn.Module]:
    """Return the blocks of a model with random weights."""
    config = models.config_class(str(section["family"])).model_validate(section)
    context = LayerContext(dist.group.WORLD, RandomKey(0))
    blocks = [build_layer(layer, context) for layer in models.layers(config)[1:-1]]
    for block in blocks:
        for parameter in block.parameters():
            nn.init.normal_(parameter, std=0.02)
    return blocks


def seconds_of(blocks: list[nn.Module], x: Tensor) -> float:
    """Return the seconds of a forward and a backward through the blocks."""
    begin = time.perf_counter()
    y = x.clone().requires_grad_()
    for block in blocks:
        y = block(y)
    y.sum().backward()
    return time.perf_counter() - begin


def main() -> None:
    """Print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    sizes: dict[str, object] = {
        "hidden_size": asked.hidden,
        "num_hidden_layers": asked.layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 4 * asked.hidden,
    }
    written = blocks_of({"family": "llama", "vocab_size": 1000} | sizes)
    fields = {"model_type": "llama"} | sizes
    generic = blocks_of({"family": "transformers", "vocab_size": 1000, "config": fields})
    x = torch.randn(1, asked.seq, asked.hidden)
    times: list[tuple[float, float]] = []
    for _ in range(WARM_UP + asked.rounds):
        times.append((seconds_of(written, x), seconds_of(generic, x)))
    own, other = map(median, zip(*times[WARM_UP:], strict=True))
    print(f"llama {1e3 * own:.1f} ms, transformers {1e3 * other:.1f} ms: {other / own:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
