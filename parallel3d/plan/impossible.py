"""Refusal of model and batch sizes that no machine can hold, before any layer is built."""

from collections.abc import Iterator

from parallel3d.base.section import ABSENT, Problem, raise_if_any
from parallel3d.config import RunConfig
from parallel3d.config.data import DataConfig
from parallel3d.config.parallel3d_block import MeshConfig
from parallel3d.model.config import ModelConfig
from parallel3d.model.optimizers import MATRIX, state_bytes
from parallel3d.model.spec import count_params
from parallel3d.plan.setting import BYTES, TOKEN_BYTES, layers_of

MOST_LAYERS = 2_000
"""The most layers of a model. The deepest published model has 1,000 (arXiv:2203.00555)."""
MOST_MICROBATCHES = 1_000_000
"""The most microbatches of a step. Each is an entry of every rank's program."""
MOST_SAMPLES = 10_000_000
"""The most samples of a step. The planner tries all their divisors."""
MOST_BYTES = 32 * 2**40
"""Device and host memory of one rank together: no machine has more than 32 TiB."""


def refuse_impossible(config: RunConfig, ranks: int, room: int = MOST_BYTES) -> None:
    """Raise ConfigError if the config cannot fit `ranks` ranks of `room` bytes each.

    `room` is device and host memory of a rank together. It is compared with a lower bound that
    holds for every schedule, ZeRO stage and recomputation. Takes milliseconds for any size.
    """
    model = config.parallel3d.model
    raise_if_any(_check_counts(config, model))
    states, activations = _least_bytes(config, model, ranks)
    if (total := states + activations) <= room:
        return
    path = "parallel3d.model"
    what = f"its {_num_params(model, config.data):,} parameters"
    if activations > states:
        path = "parallel3d.data.sequence_length"
        what = f"{config.data.sequence_length:,} tokens"
    each = f"for each of {ranks:,} ranks" if ranks > 1 else "for one rank"
    have = f"but a rank has at most {room / 2**30:,.1f} GiB"
    rule = f"{what} need at least {total / 2**30:,.1f} GiB {each}, {have}"
    raise Problem(path, ABSENT, rule, "use fewer, or more ranks").error()


def _check_counts(config: RunConfig, model: ModelConfig) -> Iterator[Problem]:
    """Check that no count (layers, samples, microbatches) is too large."""
    accumulation = config.gradient_accumulation_steps
    micro = config.train_micro_batch_size_per_gpu
    limits = (
        ("parallel3d.model.num_hidden_layers", model.num_hidden_layers, MOST_LAYERS, "layers"),
        ("gradient_accumulation_steps", accumulation, MOST_MICROBATCHES, "microbatches"),
        ("train_batch_size", config.train_batch_size, MOST_SAMPLES, "samples"),
        ("train_micro_batch_size_per_gpu", micro, MOST_SAMPLES, "samples"),
        *(
            ("parallel3d.train.batch_schedule", size, MOST_SAMPLES, "samples")
            for _, size in config.parallel3d.train.batch_schedule
        ),
    )
    for path, value, most, unit in limits:
        if isinstance(value, int) and value > most:
            yield Problem(
                path, value, f"is above the limit of {most:,} {unit}", f"use {most:,} or less"
            )


def _least_bytes(config: RunConfig, model: ModelConfig, ranks: int) -> tuple[int, int]:
    """Return a lower bound on the fullest rank's bytes of states and of activations, in all places.

    Those of device and host are added up.
    """
    zero = config.zero_optimization
    element = BYTES[config.precision]
    own = config.parallel3d
    file = config.optimizer.type
    mesh = own.mesh
    data = own.data
    split = ranks
    parts = ranks
    weights = 1
    optimizer = 1
    if isinstance(mesh, MeshConfig):
        parts = mesh.cp * mesh.tp
        split = mesh.pp * mesh.tp
        shards = mesh.dp * mesh.cp if isinstance(mesh.dp, int) else max(1, ranks // split)
        weights = shards if zero.stage == 3 else 1
        optimizer = shards if zero.stage else 1
    params = _num_params(model, data)
    states = 0
    if zero.offload_param.device != "nvme":
        states += params * element // (split * weights)
    if zero.offload_optimizer.device != "nvme":
        has_ema = own.train.ema is not None
        each = min(state_bytes(file, role, has_ema) for role in (None, MATRIX))
        states += params * each // (split * optimizer)
    seq = data.sequence_length
    samples = config.train_micro_batch_size_per_gpu or 1
    tokens = samples * seq * TOKEN_BYTES
    stream = samples * seq * model.hidden_size * element // parts  # the input of a layer
    return states, tokens + stream


def _num_params(model: ModelConfig, data: DataConfig) -> int:
    if model.vocab_size == "auto":
        own = data.vocab_size if data.has_own_size else 1
        model = model.model_copy(update={"vocab_size": own})
    return count_params(layers_of(model))
