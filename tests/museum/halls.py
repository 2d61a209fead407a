"""The configs that the museum shows its exhibits in, where the user names none.

Each holds what the others lack; an exhibit is shown in the first one that can hold it.
"""

from collections.abc import Mapping
from typing import Any

from parallel3d.config import RunConfig

_SIZES = {
    "hidden_size": 512,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "max_position_embeddings": 512,
}
_GPT = {"family": "gpt", **_SIZES}
_LLAMA = {"family": "llama", **_SIZES, "num_key_value_heads": 8, "qk_norm": True, "head_dim": 64}
_DROPOUT = {"embd_pdrop": 0.1, "resid_pdrop": 0.1, "attn_pdrop": 0.1}
_GQA = {"qk_norm": True, "num_key_value_heads": 2, "num_attention_heads": 8}

# Of each hall what is not as in the first.
HALLS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "ZeRO-0": {"zero": 0, "schedule": "zero_bubble"},
    "llama": {"model": {**_LLAMA, **_GQA, "head_dim": None}, "zero": 3, "isolate": True},
    "sequence parallelism": {"split": True, "checkpointing": "selective", "isolate": True},
    "dropout": {"model": {**_GPT, **_DROPOUT}, "checkpointing": "full"},
    "bf16": {"precision": "bf16", "zero": 3},
    "fp16": {"precision": "fp16", "zero": 3},
}


def hall(name: str) -> RunConfig:
    """Make the config of a hall."""
    return RunConfig.from_dict(_config_of(HALLS[name]), f"the museum's hall {name!r}")


def _config_of(has: Mapping[str, Any]) -> dict[str, Any]:
    precision = has.get("precision")
    block = {
        "mesh": {"sequence_parallel": has.get("split", False)},
        "pipeline": {
            "schedule": has.get("schedule", "gpipe"),
            "activation_checkpointing": has.get("checkpointing", "none"),
        },
        "model": has.get("model", _GPT),
        "data": {"sequence_length": 512, "isolate_documents": has.get("isolate", False)},
        "train": {"steps": 1000},
    }
    adam = {"lr": 3e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": adam},
        "zero_optimization": {"stage": has.get("zero", 1)},
        **({precision: {"enabled": True}} if precision else {}),
        "parallel3d": block,
    }
