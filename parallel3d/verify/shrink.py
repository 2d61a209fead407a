"""A config in small: everything that could change the numbers is kept, only sizes shrink."""

import re
from collections.abc import Sequence
from itertools import product
from math import lcm, prod
from typing import Any

from parallel3d.base.errors import ConfigError
from parallel3d.config import RunConfig
from parallel3d.schedule import schedules

Sizes = tuple[int, int, int]  # pp, dp, tp

SEQUENCE_LENGTH, VOCAB_SIZE, HEAD_SIZE = 16, 261, 8  # a vocabulary that neither 2 nor 4 divides
ALWAYS_CLIPPED = 0.02
STEPS, MICROBATCHES, LEARNING_RATE, WARMUP_STEPS = 3, 4, 3e-4, 2
EPS = 1e-6  # at least; with Adam's 1e-8 rounding alone moves a weight whose gradient is nearly 0
MESHES: tuple[Sizes, ...] = (
    (1, 1, 1),
    (1, 4, 1),
    (1, 1, 4),
    (4, 1, 1),
    (2, 2, 1),
    (2, 1, 2),
    (1, 2, 2),
    (2, 2, 2),
)
MOST_RANKS = 64  # processes that one machine can be asked for
# ZeRO-3 leaves a model this small whole, unless it is told otherwise.
NO_THRESHOLDS = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0,
}
BUCKETS = {"reduce_bucket_size": 2**16, "allgather_bucket_size": 2**16}
# A loss scale that grows within the steps, from where no gradient overflows.
GROWING_SCALE = {"initial_scale_power": 8, "loss_scale_window": 2}
BLOCK = 1024  # bytes that NVMe offload reads at once; DeepSpeed's own is more than a small tensor
PARAM_BUFFERS = {"buffer_size": 2**16, "max_in_cpu": 0}


def parse_meshes(text: str) -> tuple[Sizes, ...]:
    """Read meshes as "1x1x1,2x2x2": pp x dp x tp; raises ConfigError."""
    meshes = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([1-9][0-9]*)x([1-9][0-9]*)x([1-9][0-9]*)\s*", part)
        if match is None:
            raise ConfigError(f"--meshes {part!r}: is no mesh; write pp x dp x tp, as in 2x2x1")
        pp, dp, tp = map(int, match.groups())
        if pp * dp * tp > MOST_RANKS:
            raise ConfigError(
                f"--meshes {part!r}: is {pp * dp * tp:,} processes, and verify starts at most "
                f"{MOST_RANKS} on one machine; use a smaller mesh"
            )
        meshes.append((pp, dp, tp))
    return tuple(meshes)


def shrink(
    config: RunConfig,
    meshes: tuple[Sizes, ...],
    folder: str = "",
    batch: int | None = None,
    clipping: float = ALWAYS_CLIPPED,
) -> dict[Sizes, RunConfig]:
    """The small config of each mesh; all train the same model on the same global batches.

    Learning rate, clipping and eps are set so that differences mean the same for every config,
    dropout is off (its masks depend on the mesh), and NVMe offload goes to `folder`. A step has
    `batch` samples, by default two in the smallest microbatch; where the config clips, the limit is
    `clipping`. Raises ConfigError for a mesh that cannot run it.
    """
    raw = config.to_dict()
    block = raw["parallel3d"]
    stages = max(pp for pp, _, _ in meshes) * config.pipeline.stages_per_rank
    block["model"] |= _small_model(config.model, stages, [tp for _, _, tp in meshes])
    block["data"] |= {
        "sequence_length": SEQUENCE_LENGTH,
        "vocab_size": min(VOCAB_SIZE, config.data.vocab_size),
    }
    block["train"] |= {
        "steps": STEPS,
        "max_tokens": None,
        "epochs": None,
        "profile": None,
        "lr_schedule": {"type": "constant", "warmup_steps": WARMUP_STEPS},
    }
    raw.pop("scheduler", None)
    raw["gradient_clipping"] = clipping if config.gradient_clipping else 0.0
    raw["optimizer"]["params"]["lr"] = LEARNING_RATE
    raw["optimizer"]["params"]["eps"] = max(EPS, config.optimizer.params.eps)
    if config.precision == "fp16":
        raw["fp16"] |= GROWING_SCALE
    raw["zero_optimization"] |= NO_THRESHOLDS | BUCKETS
    for name in ("offload_optimizer", "offload_param"):
        if raw["zero_optimization"][name]["device"] == "nvme":
            raw["zero_optimization"][name]["nvme_path"] = folder
            raw["aio"]["block_size"] = BLOCK
            if name == "offload_param":
                raw["zero_optimization"][name] |= PARAM_BUFFERS
    microbatches = min(config.num_microbatches, MICROBATCHES)
    batch = batch or 2 * microbatches * lcm(*(dp for _, dp, _ in meshes))
    return {mesh: _on_mesh(raw, mesh, microbatches, batch) for mesh in meshes}


def drops_out(config: RunConfig) -> bool:
    """True if a config trains with dropout."""
    model = config.model
    return any(getattr(model, n) > 0 for n in type(model).model_fields if n.endswith("_pdrop"))


def resuming_pair(meshes: Sequence[Sizes]) -> tuple[Sizes, Sizes]:
    """Where a run is saved, and where it goes on: as many axes as may be differ, on few ranks."""

    def rank(pair: tuple[Sizes, Sizes]) -> tuple[int, int, int]:
        saved, resumed = pair
        differ = sum(a != b for a, b in zip(saved, resumed, strict=True))
        return -differ, -min(prod(resumed), 2), prod(resumed)

    return min(product(meshes, meshes), key=rank)


def why_not(config: RunConfig, mesh: Sizes) -> str | None:
    """Why a config's schedule cannot run on a mesh; None if it can."""
    pipeline = config.pipeline
    microbatches = min(config.num_microbatches, MICROBATCHES)
    return schedules.load(pipeline.schedule).invalid(
        mesh[0], microbatches, pipeline.stages_per_rank
    )


def _on_mesh(raw: dict[str, Any], mesh: Sizes, microbatches: int, batch: int) -> RunConfig:
    pp, dp, tp = mesh
    block = raw["parallel3d"]
    sizes = block["mesh"] | {"pp": pp, "dp": dp, "tp": tp}
    changed = raw | {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": batch // (dp * microbatches),
        "gradient_accumulation_steps": microbatches,
        "parallel3d": block | {"mesh": sizes},
    }
    source = f"the config, made small for mesh {pp}x{dp}x{tp}"
    return RunConfig.from_dict(changed, source).resolve(pp * dp * tp)


def _small_model(model: Any, stages: int, tp_sizes: list[int]) -> dict[str, Any]:
    """A family's sizes, which bear the names of Hugging Face's configs; all else stays."""
    widest = lcm(*tp_sizes)
    heads, queries = widest, 1
    kv_heads = getattr(model, "num_key_value_heads", None)
    if kv_heads is not None:
        queries = model.num_attention_heads // kv_heads
        # As few key/value heads as may be: fewer than tp ranks is the case that breaks most.
        counts = (n for n in range(min(2, kv_heads), 2 * widest + 1) if n * queries % widest == 0)
        kv_heads = next(n for n in counts if all(n % tp == 0 or tp % n == 0 for tp in tp_sizes))
        heads = kv_heads * queries
    head_dim = getattr(model, "head_dim", None)
    small: dict[str, Any] = {
        "hidden_size": heads * HEAD_SIZE,
        "num_attention_heads": heads,
        # The embedding and the head are layers, too; one more does not divide evenly.
        "num_hidden_layers": max(3, stages - 1),
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": SEQUENCE_LENGTH,
        "num_key_value_heads": kv_heads,
        "intermediate_size": 12 * heads,
        "head_dim": None if head_dim is None else 2 * HEAD_SIZE,
    }
    small |= {name: 0.0 for name in type(model).model_fields if name.endswith("_pdrop")}
    scaling = getattr(model, "rope_scaling", None)
    if scaling is not None and hasattr(scaling, "original_max_position_embeddings"):
        small["rope_scaling"] = scaling.model_dump(mode="json") | {
            "original_max_position_embeddings": SEQUENCE_LENGTH // 2
        }
    return {name: value for name, value in small.items() if name in type(model).model_fields}
