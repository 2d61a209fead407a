"""A digest of what a config trains: equal for two configs that train the same."""

import json
from collections.abc import Iterable
from hashlib import blake2b

from parallel3d.base import reader
from parallel3d.config.run import RunConfig

# What says where and how a run is written, how far this time, and how fast, not what is trained.
_APART = (
    *("steps_per_print", "wall_clock_breakdown", "flops_profiler", "comms_logger", "aio"),
    *("tensorboard", "csv_monitor", "wandb", "comet"),
    *(f"zero_optimization.offload_{what}.nvme_path" for what in ("optimizer", "param")),
    *(
        "parallel3d.run",
        "parallel3d.checkpoint",
        "parallel3d.pipeline.weights",
        "parallel3d.data.cache",
        "parallel3d.data.max_line_bytes",
        "parallel3d.data.workers",
        "parallel3d.data.read_ahead",
        "parallel3d.data.remote_cache_bytes",
    ),
    *(f"parallel3d.train.{name}" for name in ("stop_after", "timeout_seconds", "profile")),
)
PLACED = (
    *("zero_optimization", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    *("parallel3d.mesh", "parallel3d.plan", "parallel3d.pipeline"),
)
"""How a run is spread over devices and what is offloaded, which changes no number beyond rounding;
the global batch is train_batch_size."""


def digest_of(config: RunConfig, also: Iterable[str] = ()) -> str:
    """The digest of what two launches that train the same have in common.

    Where and how the run is written is left out, and the dotted paths of `also`. Of a config as it
    was read, before the number of processes filled anything in, it tells meshes apart.
    """
    values = config.to_dict()
    # Until the next release, runs are found that were begun before this setting was removed.
    values["parallel3d"]["train"]["check_layers"] = True
    for path in (*_APART, *also):
        section, _, name = path.rpartition(".")
        block = reader.at(values, section)
        if isinstance(block, dict):
            block.pop(name, None)
    return blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=16).hexdigest()
