"""Whole configs for tests of parity: what a user could write, of any family and mesh."""

from typing import Any

from parallel3d.models import families

# Every family that is found, as its defaults are, and what else some of them can be.
# Sizes of the family "transformers" are those of its own config (tests/models/test_any_decoder.py).
WRITTEN = sorted({*families()} - {"transformers"})
MODELS: dict[str, dict[str, Any]] = {family: {"family": family} for family in WRITTEN} | {
    "gpt untied": {"family": "gpt", "tie_word_embeddings": False},
    "llama": {"family": "llama", "num_key_value_heads": 8, "tie_word_embeddings": True},
    "llama untied": {
        "family": "llama",
        "num_key_value_heads": 8,
        "rope_scaling": {"factor": 8.0, "original_max_position_embeddings": 128},
        "max_position_embeddings": 1024,
    },
    "qwen3": {
        "family": "llama",
        "num_key_value_heads": 8,
        "qk_norm": True,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "qwen2": {
        "family": "llama",
        "num_key_value_heads": 4,
        "attention_bias": True,
        "sliding_window": 64,
        "layer_types": ["full_attention", *["sliding_attention"] * 11],
    },
}
_RATES: dict[str, Any] = {"lr": 3e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}
ADAMW = {"type": "AdamW", "params": _RATES}
MUON = {"type": "Muon", "params": _RATES | {"lr": 0.02, "adam_lr": 3e-3}}
SIZES = {"hidden_size": 512, "num_hidden_layers": 12, "num_attention_heads": 16}


def config_of(
    *,
    model: str = "gpt",
    zero: int = 3,
    offload: str = "none",
    schedule: str = "gpipe",
    stages_per_rank: int = 1,
    microbatches: int = 4,
    reduction: str = "per_step",
    weights: str = "per_microbatch",
    checkpointing: str = "none",
    sequence_parallel: bool = False,
    isolate: bool = False,
    balance: bool = False,
    precision: str = "fp32",
    optimizer: dict[str, Any] = ADAMW,
) -> dict[str, Any]:
    """The object of a ds.json; `offload` is "none", "cpu", "nvme", "cpu+cpu" or "nvme+nvme".

    The second of two is where parameters go.
    """
    states, _, parameters = offload.partition("+")
    zero_optimization: dict[str, Any] = {"stage": zero, "offload_optimizer": {"device": states}}
    if parameters:
        zero_optimization["offload_param"] = {"device": parameters}
    for name, device in (("offload_optimizer", states), ("offload_param", parameters)):
        if device == "nvme":
            zero_optimization[name]["nvme_path"] = "/somewhere"  # shrink() writes its own
    block = {
        "mesh": {"sequence_parallel": sequence_parallel},
        "pipeline": {
            "schedule": schedule,
            "stages_per_rank": stages_per_rank,
            "gradient_reduction": reduction,
            "weights": weights,
            "activation_checkpointing": checkpointing,
        },
        "model": SIZES | {"max_position_embeddings": 512} | MODELS[model],
        "data": {
            "sequence_length": 512,
            "isolate_documents": isolate,
            "balance_microbatches": balance,
        },
        "train": {"steps": 1000},
    }
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": microbatches,
        "optimizer": optimizer,
        "zero_optimization": zero_optimization,
        "parallel3d": block,
    } | ({precision: {"enabled": True}} if precision != "fp32" else {})
