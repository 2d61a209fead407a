"""Small configs of the same architecture, which `verify` trains in place of a large one."""

from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING

# By the name in a config; a name that the architecture does not have is left out.
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 4,
    "head_dim": 8,
    "intermediate_size": 64,
    "ffn_dim": 64,
    "ffn_hidden_size": 64,
    "n_inner": 64,
    "word_embed_proj_dim": 32,
    "max_position_embeddings": 64,
    "vocab_size": 96,
    "sliding_window": 6,
    "window_size": 6,
    "attention_chunk_size": 6,
    "floor_scale": 4,
    "intermediate_size_mlp": 64,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "rotary_dim": 4,
    "dim_model_base": 16,
    "swa_head_dim": 8,
    "swa_v_head_dim": 8,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "mamba_d_state": 8,
    "mamba_dt_rank": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "attention_dropout": 0.0,
    "residual_dropout": 0.0,
    "hidden_dropout": 0.0,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "activation_dropout": 0.0,
    "layerdrop": 0.0,
    "router_jitter_noise": 0.0,
    "input_jitter_noise": 0.0,
    "dropout": 0.0,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
}
_CHOSEN = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "max_position_embeddings",
    "initializer_range",
)


def shrunk(fields: Mapping[str, Any], sizes: Mapping[str, object]) -> dict[str, Any]:
    """Return the fields of a config.json with small sizes; switches stay.

    A list with an entry for each layer keeps its kinds of entries, in turns.

    - `sizes`: those that verify has chosen, by their names (parallel3d/verify/shrink.py).
    """
    chosen = CONFIG_MAPPING[fields["model_type"]]
    own = {name: value for name, value in fields.items() if name != "model_type"}
    large = chosen(**own)
    names = {*large.to_dict(), *chosen.attribute_map}
    small = dict(fields)
    for name, value in SIZES.items():
        if name in names and getattr(large, name, None) is not None:
            small[name] = value
    for name in _CHOSEN:
        if name in names and sizes.get(name) is not None:
            small[name] = sizes[name]
    if "kv_lora_rank" in names:  # compressed keys and values serve every head
        small["num_key_value_heads"] = small["num_attention_heads"]
        small.pop("head_dim", None)
    count = int(str(sizes["num_hidden_layers"]))
    for name, value in fields.items():
        if isinstance(value, list) and len(value) == large.num_hidden_layers:
            kinds = list(dict.fromkeys(value))
            small[name] = [kinds[number % len(kinds)] for number in range(count)]
    return small
