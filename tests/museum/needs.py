"""What a config must have for an exhibit to be planted in it."""

from collections.abc import Callable

from parallel3d.config import CompleteConfig, RunConfig
from parallel3d.model.recompute import NONE
from parallel3d.schedule import schedules
from parallel3d.verify.shrink import drops_out
from tests.museum.exhibit import Exhibit

# Takes the user's config and the small config made of it.
Need = Callable[[RunConfig, CompleteConfig], bool]


def _model(name: str, value: object = True) -> Need:
    return lambda config, small: getattr(small.model, name, None) == value


def _family(*names: str) -> Need:
    return lambda config, small: small.model.family in names


def _stages(*numbers: int) -> Need:
    return lambda config, small: small.zero_optimization.stage in numbers


def _few_heads(config: RunConfig, small: CompleteConfig) -> bool:
    return (getattr(small.model, "num_key_value_heads", None) or 8) < 4


NEEDS: dict[str, Need] = {
    "microbatches": lambda config, small: small.num_microbatches > 1,
    "clipping": lambda config, small: small.gradient_clipping > 0,
    "weight decay": lambda config, small: small.optimizer.params.weight_decay > 0,
    "dropout": lambda config, small: drops_out(config),
    "recomputation": lambda c, small: small.pipeline.activation_checkpointing != NONE,
    "sequence parallelism": lambda config, small: small.mesh.sequence_parallel,
    "replicated activations": lambda config, small: not small.mesh.sequence_parallel,
    "isolated documents": lambda config, small: small.data.isolate_documents,
    "tied": _model("tie_word_embeddings"),
    "query and key norms": _model("qk_norm"),
    "learned positions": _family("gpt"),
    "biases": _family("gpt"),
    "cut biases": _family("gpt"),
    "fused projections": lambda config, small: True,
    "fewer key/value heads than tp": _few_heads,
    "reduced once": lambda c, small: small.pipeline.reduces_once(small.zero_optimization.stage),
    "reduced each microbatch": lambda c, small: (
        not small.pipeline.reduces_once(small.zero_optimization.stage)
    ),
    "copies": lambda config, small: small.mesh.num_copies > 1,
    "weight gradients apart": lambda c, small: schedules.splits_backward(small.pipeline.schedule),
    "no offload": lambda c, small: small.zero_optimization.offload_optimizer.device == "none",
    "ZeRO-0": _stages(0),
    "ZeRO-1 or 2": _stages(1, 2),
    "ZeRO below 3": _stages(0, 1, 2),
    "weighted labels": lambda config, small: small.data.weight_field is not None,
    "mixture": lambda config, small: small.data.source == "mixture",
    "rotary": _family("llama", "moe"),
    "experts": _family("moe"),
    "divided experts": lambda config, small: small.mesh.ep > 1,
    "ZeRO-3": _stages(3),
    "reduced in backward": lambda config, small: bool(small.zero_optimization.overlap_comm),
    "long": lambda config, small: True,  # planted in the case of long sequences and large ids
    "bf16": lambda config, small: small.precision == "bf16",
    "fp16": lambda config, small: small.precision == "fp16",
    "Muon": lambda config, small: small.optimizer.type == "muon",
    "windows": lambda config, small: getattr(small.model, "layer_types", None) is not None,
    "weights by hooks": lambda config, small: (
        small.zero_optimization.stage == 3 and small.pipeline.weights == "per_microbatch"
    ),
    "resume": lambda config, small: True,
    "save": lambda config, small: small.checkpoint.asynchronous,  # planted in a run that saves
}


def lacking(exhibit: Exhibit, config: RunConfig, small: CompleteConfig) -> str | None:
    """The first of an exhibit's needs that a config does not have; None if it has all.

    An exhibit that does not name a precision needs fp32, where rounding hides nothing.
    """
    needs = exhibit.needs
    for name in needs:
        if not NEEDS[name](config, small):
            return name
    if small.precision != "fp32" and small.precision not in needs:
        return "fp32"
    return None
