"""The digest of those settings of a config that decide what is trained."""

import json
from collections.abc import Iterable
from hashlib import blake2b

from parallel3d.base import reader
from parallel3d.config.run_settings import RunSettings

# Settings of output, stopping and speed, which do not affect what is trained.
_NOT_TRAINED = (
    "steps_per_print",
    "wall_clock_breakdown",
    "flops_profiler",
    "comms_logger",
    "aio",
    "tensorboard",
    "csv_monitor",
    "wandb",
    "comet",
    "zero_optimization.offload_optimizer.nvme_path",
    "zero_optimization.offload_param.nvme_path",
    "parallel3d.run",
    "parallel3d.checkpoint",
    "parallel3d.mesh.fallbacks",
    "parallel3d.pipeline.weights",
    "parallel3d.data.cache",
    "parallel3d.data.max_line_bytes",
    "parallel3d.data.workers",
    "parallel3d.data.read_ahead",
    "parallel3d.data.stream_cache_bytes",
    "parallel3d.train.stop_after",
    "parallel3d.train.timeout_seconds",
    "parallel3d.train.profile",
    "parallel3d.train.digest_every",
    "parallel3d.train.check_bits",
)
PLACEMENT_SETTINGS = (
    "zero_optimization",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "parallel3d.mesh",
    "parallel3d.plan",
    "parallel3d.pipeline",
)
"""Settings that place a run on devices and offload it; they change results by rounding only. The
global batch, train_batch_size, is not among them."""


def digest_of(config: RunSettings, also: Iterable[str] = ()) -> str:
    """Return a digest that is equal for configs that train the same, as they were read.

    - `also`: dotted paths of settings to ignore, besides those of output, stopping and speed.
    """
    values = config.to_public_dict()
    ignored = [p.rpartition(".") for p in (*_NOT_TRAINED, *also)]
    blocks = reader.blocks_at(values, {section for section, _, _ in ignored})
    for section, _, name in ignored:
        blocks[section].pop(name, None)
    return blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=16).hexdigest()
