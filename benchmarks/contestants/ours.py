"""(a) parallel3d; `--set` takes more of a config, as dotted.key=value, with commas between."""

import json
import os

import common
import deepspeed  # noqa: F401 - else loaded when the engine is built
import torch
from torch import Tensor

from parallel3d.config import RunConfig
from parallel3d.mesh.mesh import Mesh
from parallel3d.pipeline.executor import Microbatch
from parallel3d.train.assembly import assemble

after_imports = common.resident_bytes()
options = common.arguments(pp=1, tp=1, zero=3, schedule="one_f_one_b", weights="per_step", set="")
world = int(os.environ.get("WORLD_SIZE", "1"))
pp = options.pp
tp = options.tp
dp = world // pp // tp
adam = {"lr": common.LR, "weight_decay": common.WEIGHT_DECAY, "betas": [0.9, 0.999], "eps": 1e-8}
raw = {
    "train_micro_batch_size_per_gpu": common.MICRO,
    "gradient_accumulation_steps": common.GLOBAL // dp // common.MICRO,
    "gradient_clipping": common.CLIP,
    "optimizer": {"type": "AdamW", "params": adam},
    "zero_optimization": {"stage": options.zero},
    "parallel3d": {
        "mesh": {"pp": pp, "dp": dp, "tp": tp},
        "pipeline": {"schedule": options.schedule, "weights": options.weights},
        "model": {
            "family": "gpt",
            "hidden_size": common.HIDDEN,
            "num_hidden_layers": common.LAYERS,
            "num_attention_heads": common.HEADS,
            "max_position_embeddings": common.SEQ,
            "vocab_size": common.VOCAB,
            "tie_word_embeddings": False,
        },
        "data": {"sequence_length": common.SEQ, "tokenizer": "theirs"},
        "train": {"steps": 100},
    },
}
for item in filter(None, options.set.split(",")):
    path, _, value = item.partition("=")
    *blocks, name = path.split(".")
    place = raw
    for block in blocks:
        place = place.setdefault(block, {})
    place[name] = json.loads(value)
config = RunConfig.from_dict(raw).resolve(world).completed()
if world == 1:
    torch.set_num_threads(2)
mesh = Mesh(pp=pp, dp=dp, tp=tp)
parts = assemble(config, mesh)


def step(tokens: Tensor, labels: Tensor) -> Tensor | None:
    pairs = common.microbatches(tokens, labels)
    loss = parts.executor.run([Microbatch(x, y) for x, y in pairs])
    parts.engine.step(common.LR)
    return loss if mesh.pipeline.coord == pp - 1 else None


coord = mesh.samples.coord
common.compete(options, step, dp_coord=coord, dp=dp, after_imports=after_imports)
os._exit(0)
