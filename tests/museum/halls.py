"""The configs that the museum shows its exhibits in, where the user names none.

Each holds what the others lack; an exhibit is shown in the first one that can hold it.
"""

from typing import Any

from parallel3d.config import RunConfig
from tests.verify.configs import MUON, config_of

_SIZES = {
    "hidden_size": 512,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "max_position_embeddings": 512,
}
_GPT = {"family": "gpt", **_SIZES}
_LLAMA = {"family": "llama", **_SIZES, "qk_norm": True}
_DROPOUT = {"embd_pdrop": 0.1, "resid_pdrop": 0.1, "attn_pdrop": 0.1}
_GQA = {"num_key_value_heads": 2, "num_attention_heads": 8}
_WINDOWS = {
    "sliding_window": 64,
    "layer_types": ["full_attention", *["sliding_attention"] * 11],
}

_WEIGHTED = {
    "source": "parquet",
    "paths": ["ids.parquet"],
    "token_field": "input_ids",
    "weight_field": "loss_weight",
    "tokenizer": "none",
    "vocab_size": 512,
    "end_of_text_id": 511,
}
_TEXT = {"source": "text", "paths": ["*.txt"]}
_MIXTURE = {"source": "mixture", "mixture": [_TEXT | {"weight": 0.7}, _TEXT | {"weight": 0.3}]}

# Of each hall what is not as in the first.
HALLS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "ZeRO-0": {"zero": 0, "schedule": "zero_bubble"},
    "llama": {"model": {**_LLAMA, **_GQA}, "zero": 3, "isolate": True},
    "sequence parallelism": {
        "sequence_parallel": True,
        "checkpointing": "selective",
        "isolate": True,
    },
    "dropout": {"model": {**_GPT, **_DROPOUT}, "checkpointing": "full"},
    "reduced in backward": {"zero": 0, "overlap": True},
    "weighted labels": {"data": _WEIGHTED},
    "mixture": {"data": _MIXTURE},
    "bf16": {"precision": "bf16", "zero": 3},
    "bf16 llama": {"model": {**_LLAMA, **_GQA}, "precision": "bf16"},
    "fp16": {"precision": "fp16", "zero": 3},
    "windows": {"model": {**_LLAMA, **_WINDOWS}},
    "weights by hooks": {
        "zero": 3,
        "weights": "per_microbatch",
        "reduction": "per_microbatch",
    },
    "Muon": {"optimizer": MUON},
    "experts": {"model": {"family": "moe", **_SIZES}},
    "Muon experts": {"model": {"family": "moe", **_SIZES}, "optimizer": MUON},
    "divided experts": {"model": {"family": "moe", **_SIZES}, "zero": 3, "ep": 2},
    "copies": {"dp_shards": 2},
    "copies at ZeRO-3": {"zero": 3, "dp_shards": 2},
    "copies each microbatch": {"zero": 3, "reduction": "per_microbatch", "dp_shards": 2},
    "copies in bf16": {"precision": "bf16", "dp_shards": 2},
    "copies of experts": {
        "model": {"family": "moe", **_SIZES},
        "zero": 3,
        "ep": 2,
        "dp_shards": 2,
    },
}


def hall(name: str, **changes: Any) -> RunConfig:
    """Make the config of a hall, with changed settings."""
    settings: dict[str, Any] = {"zero": 1, "reduction": "auto", "weights": "auto"}
    settings |= HALLS[name] | changes
    model = settings.pop("model", _GPT)
    data = settings.pop("data", {})
    overlap = settings.pop("overlap", None)
    clipping = settings.pop("clipping", None)
    groups = {"ep": settings.pop("ep", 1), "dp_shards": settings.pop("dp_shards", None)}
    raw = config_of(**settings)
    raw["parallel3d"].setdefault("mesh", {}).update(groups)
    raw["parallel3d"]["data"] |= data
    raw["zero_optimization"]["overlap_comm"] = overlap
    if clipping is not None:
        raw["gradient_clipping"] = clipping
    raw["parallel3d"]["model"] = model
    return RunConfig.from_dict(raw, f"the museum's hall {name!r}")
