"""Shrink a config: sizes become small; every setting that could change the numbers stays."""

from collections.abc import Sequence
from itertools import product
from math import gcd, lcm, prod
from typing import Any, NamedTuple

from parallel3d import models
from parallel3d.base.errors import ConfigError
from parallel3d.base.mesh_sizes import MeshSizes
from parallel3d.base.reader import JsonObject
from parallel3d.config import CompleteConfig, RunConfig
from parallel3d.model import optimizers
from parallel3d.model.config import HasKeyValueHeads, ModelConfig
from parallel3d.model.parametrization import parametrization_of
from parallel3d.schedule import schedules

SEQUENCE_LENGTH = 16
VOCAB_SIZE = 261  # neither 2 nor 4 divides it
HEAD_SIZE = 8
ALWAYS_CLIPPED = 0.02
STEPS = 3
MICROBATCHES = 4
WARMUP_STEPS = 2
# Learning rate x decay, if the config decays; a mistake in less would move nothing in three steps.
DECAY_PER_STEP = 5 * 3e-4
DECAY = {"warmup_steps": 1, "min_ratio": 0.5}  # so that the last step still trains
SCHEDULES: dict[str, dict[str, float]] = {
    "constant": {"warmup_steps": WARMUP_STEPS},
    "cosine": DECAY,
    "linear": DECAY,
    "wsd": DECAY | {"decay_steps": STEPS - 1},
}
EPS = 1e-6  # minimum; with Adam's 1e-8 rounding alone moves weights whose gradient is nearly 0
MESHES = tuple(
    map(MeshSizes.parse, ("1x1x1", "1x4x1", "1x1x4", "4x1x1", "2x2x1", "2x1x2", "1x2x2", "2x2x2"))
)
MOST_RANKS = 64  # processes on one machine
# By default ZeRO-3 would not partition a model this small.
NO_THRESHOLDS = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0,
}
WHOLE = {"stage3_param_persistence_threshold": 2**7}  # vectors stay whole, matrices do not
BUCKETS = {"reduce_bucket_size": 2**12, "allgather_bucket_size": 2**12}  # some are full
OTHER_RATES = {"muon_lr": 2.0, "adam_lr": 0.5}  # relative to lr
# A loss scale that grows within the steps and starts where no gradient overflows.
GROWING_SCALE = {"initial_scale_power": 8, "loss_scale_window": 2}
BLOCK = 1024  # bytes per NVMe read; DeepSpeed's default is larger than a small tensor
PARAM_BUFFERS = {"buffer_size": 2**19, "max_in_cpu": 0}


class Extent(NamedTuple):
    """How long a run is, and how wide its ids and positions are."""

    steps: int = STEPS
    sequence_length: int = SEQUENCE_LENGTH
    vocab_size: int = VOCAB_SIZE
    initializer_range: float | None = None  # None: the config's


SHORT = Extent()
# More positions than bf16 tells apart, ids that uint16 does not hold, and weights so large that
# attention depends on positions from the first step on.
LONG = Extent(1, 320, 2**16 + 261, 0.15)
# Weights so large that activation functions are not nearly linear.
EXACT = Extent(initializer_range=0.1)


def parse_meshes(text: str) -> tuple[MeshSizes, ...]:
    """Parse "1x1x1,2x2x2" into meshes, pp x dp x tp. Raises ConfigError."""
    meshes = []
    for part in text.split(","):
        try:
            mesh = MeshSizes.parse(part.strip())
        except ValueError as error:
            raise ConfigError(f"--meshes {error}") from None
        if mesh.ranks > MOST_RANKS:
            raise ConfigError(
                f"--meshes {part!r}: needs {mesh.ranks:,} processes, but verify starts at most "
                f"{MOST_RANKS} on one machine; use a smaller mesh"
            )
        meshes.append(mesh)
    return tuple(meshes)


def shrink(
    config: RunConfig,
    meshes: Sequence[MeshSizes],
    folder: str = "",
    batch: int | None = None,
    clipping: float = ALWAYS_CLIPPED,
    extent: Extent = SHORT,
) -> dict[MeshSizes, CompleteConfig]:
    """Return the small config of each mesh; all train the same model on the same global batches.

    Learning rate, decay, clipping and eps are fixed so that one tolerance fits every config.
    Dropout is off, because its masks depend on the mesh.

    - `folder`: where NVMe offload writes
    - `batch`: samples in a step; by default the smallest microbatch has two
    - `clipping`: the limit, if the config clips
    - `extent`: steps, sequence length and vocabulary; a long one has one sample a microbatch

    Raises ConfigError for a mesh that cannot run the config.
    """
    raw = config.to_dict()
    block = raw["parallel3d"]
    microbatches = num_microbatches(config)
    is_long = extent.sequence_length > SEQUENCE_LENGTH
    samples = (1 if is_long else 2) * microbatches
    batch = batch or samples * lcm(*(mesh.dp for mesh in meshes))
    stages = max(mesh.pp for mesh in meshes) * config.pipeline.stages_per_rank
    tp_sizes = [mesh.tp for mesh in meshes]
    block["model"] |= _small_model(config.model, stages, tp_sizes, extent)
    block["data"] |= {
        "sequence_length": extent.sequence_length,
        "vocab_size": min(extent.vocab_size, config.data.vocab_size),
        "fim": None,
    }
    if config.data.end_of_text_id is not None:
        block["data"]["vocab_size"] = extent.vocab_size
        block["data"]["end_of_text_id"] = extent.vocab_size - 1
    kind = "constant" if config.scheduler is not None else config.train.lr_schedule.type
    block["train"] |= {
        "steps": extent.steps,
        "max_tokens": None,
        "epochs": None,
        "profile": None,
        "batch_schedule": (),
        "batch_lr": "none",
        "evaluate_every": 0,
        "evaluate_samples": -(-batch // 2) if is_long else 3 * batch // 2,  # the last is half full
        "stop_after": None,
        "noise_scale_every": 0,
        "evaluate_tasks": {},
        "digest_every": 0,
        "check_bits": {},
        "lr_schedule": _small_schedule(kind, extent.steps),
    }
    block["checkpoint"] |= {"every": STEPS - 1, "at": (), "in_memory_every": 0}
    raw.pop("scheduler", None)
    raw["gradient_clipping"] = clipping if config.gradient_clipping else 0.0
    params = raw["optimizer"]["params"]
    params["lr"] = optimizers.load(config.optimizer.type).VERIFY_LR
    if "eps" in params:
        params["eps"] = max(EPS, params["eps"])
    for name, factor in OTHER_RATES.items():
        if params.get(name) is not None:
            params[name] = factor * params["lr"]
    if params.get("weight_decay"):
        params["weight_decay"] = DECAY_PER_STEP / params["lr"]
    if params.get("adam_weight_decay"):
        params["adam_weight_decay"] = DECAY_PER_STEP / params["lr"] / 2
    if config.precision == "fp16":
        raw["fp16"] |= GROWING_SCALE
    zero = raw["zero_optimization"]
    zero |= NO_THRESHOLDS | WHOLE | BUCKETS
    for name in ("offload_optimizer", "offload_param"):
        if zero[name]["device"] == "nvme":
            zero[name]["nvme_path"] = folder
            raw["aio"]["block_size"] = BLOCK
            if name == "offload_param":
                zero[name] |= PARAM_BUFFERS
    return {mesh: _on_mesh(raw, mesh, microbatches, batch) for mesh in meshes}


def in_fp32(config: RunConfig) -> RunConfig:
    """Return a config without half precision."""
    raw = config.to_dict()
    for name in ("bf16", "fp16"):
        raw[name] = {"enabled": False}
    raw["communication_data_type"] = None
    return RunConfig.from_dict(raw, "the config in fp32")


def drops_out(config: RunConfig) -> bool:
    """Return True if a config trains with dropout."""
    settings = config.model.model_dump().items()
    return any(value for name, value in settings if name.endswith("_pdrop"))


def resuming_pair(meshes: Sequence[MeshSizes]) -> tuple[MeshSizes, MeshSizes]:
    """Return the meshes to save on and to resume on: most axes differ, and few ranks are used."""

    def rank(pair: tuple[MeshSizes, MeshSizes]) -> tuple[int, int, int]:
        saved, resumed = pair
        differ = sum(a != b for a, b in zip(saved, resumed, strict=True))
        return -differ, -min(prod(resumed), 2), prod(resumed)

    return min(product(meshes, meshes), key=rank)


def why_not(config: RunConfig, mesh: MeshSizes) -> str | None:
    """Return why a config's schedule cannot run on a mesh, or None if it can."""
    pipeline = config.pipeline
    return schedules.load(pipeline.schedule).invalid(
        mesh.pp, num_microbatches(config), pipeline.stages_per_rank
    )


def num_microbatches(config: RunConfig) -> int:
    """Return the microbatches of a small step: the config's, if it sets few."""
    return min(config.gradient_accumulation_steps or MICROBATCHES, MICROBATCHES)


def _on_mesh(raw: dict[str, Any], mesh: MeshSizes, microbatches: int, batch: int) -> CompleteConfig:
    block = raw["parallel3d"]
    experts = block["model"].get("num_experts", 1)
    ep = gcd(block["mesh"]["ep"], mesh.dp, experts)
    sizes = block["mesh"] | mesh._asdict() | {"ep": ep}
    is_hybrid = sizes.get("dp_shards") not in (None, block["mesh"]["dp"])
    if is_hybrid and (mesh.dp // ep) % 2 == 0:
        sizes["dp_shards"] = mesh.dp // 2  # two copies, also where the config's hosts are unknown
    else:
        sizes["dp_shards"] = None
    changed = raw | {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": batch // (mesh.dp * microbatches),
        "gradient_accumulation_steps": microbatches,
        "parallel3d": block | {"mesh": sizes},
    }
    source = f"the config, shrunk for mesh {mesh}"
    return RunConfig.from_dict(changed, source).resolve(mesh.ranks).completed()


def _small_schedule(kind: str, steps: int) -> JsonObject:
    """Return a schedule of the rate that acts within these steps."""
    schedule: JsonObject = {"type": kind, **SCHEDULES[kind]}
    warmup = SCHEDULES[kind]["warmup_steps"]
    if warmup >= steps:
        schedule["warmup_steps"] = warmup = steps - 1
    if "decay_steps" in schedule:
        # A run of a single step has the decay alone.
        schedule["decay_steps"] = min(STEPS - 1, steps - warmup)
    return schedule


def _small_bases(model: ModelConfig, small: dict[str, Any]) -> JsonObject:
    """Return muP's bases of a small model."""
    mup = parametrization_of(model)
    head_size = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    sizes = {
        "base_width": (small["hidden_size"], model.hidden_size),
        "base_head_size": (small["head_dim"] or HEAD_SIZE, head_size),
        "base_depth": (small["num_hidden_layers"], model.num_hidden_layers),
    }
    bases: JsonObject = {}
    for name, (small_size, size) in sizes.items():
        base = getattr(mup, name)
        if base is not None:
            bases[name] = _same_ratio(small_size, size, base)
    return bases


def _same_ratio(small: int, size: int, base: int) -> int:
    """Return the base of muP for a small size: as many times smaller as the config's is.

    A base of another size is never rounded to the size itself, where muP changes nothing.
    """
    # A base that is much larger would multiply all numbers, and with them their rounding.
    wanted = min(max(1, round(small * base / size)), 4 * small)
    if wanted == small and base != size:
        return max(1, small // 2) if base < size else 2 * small
    return wanted


def _small_model(
    model: ModelConfig, stages: int, tp_sizes: list[int], extent: Extent
) -> JsonObject:
    """Return small sizes under the names of Hugging Face's configs; other settings stay.

    A family's `small` in its spec.py has the last word on its own settings.
    """
    settings = model.model_dump()
    widest = lcm(*tp_sizes)
    heads = max(2, widest)  # the matrix of one head would be the whole one
    queries = 1
    kv_heads = model.num_key_value_heads if isinstance(model, HasKeyValueHeads) else None
    if kv_heads is not None:
        queries = model.num_attention_heads // kv_heads
        # As few key/value heads as possible: fewer than tp ranks breaks most often.
        counts = (n for n in range(min(2, kv_heads), 2 * widest + 1) if n * queries % widest == 0)
        for count in counts:
            if all(count % tp == 0 or tp % count == 0 for tp in tp_sizes):
                kv_heads = count
                break
        heads = kv_heads * queries
    small: dict[str, Any] = {
        "hidden_size": heads * HEAD_SIZE,
        "num_attention_heads": heads,
        # With the embedding and the head, one layer more than the stages divide evenly.
        "num_hidden_layers": max(3, stages - 1),
        "vocab_size": extent.vocab_size,
        "max_position_embeddings": extent.sequence_length,
        "initializer_range": extent.initializer_range or settings.get("initializer_range"),
        "num_key_value_heads": kv_heads,
        "intermediate_size": 12 * heads,
        "head_dim": None if settings.get("head_dim") is None else 2 * HEAD_SIZE,
    }
    small |= {name: 0.0 for name in settings if name.endswith("_pdrop")}
    mup = parametrization_of(model)
    if mup.type == "mup":
        small["parametrization"] = mup.model_dump() | _small_bases(model, small)
    own = {name: value for name, value in small.items() if name in settings}
    return own | models.small(model.model_copy(update=own), tp_sizes, small)
