"""Small configs of the architectures of transformers."""

import json

from transformers import CONFIG_MAPPING

VOCABULARY = 96
LENGTH = 64
LAYERS = 4
# By the name in a config; a name that the architecture does not have is left out.
_SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 4,
    "head_dim": 8,
    "intermediate_size": 64,
    "ffn_dim": 64,
    "ffn_hidden_size": 64,
    "n_inner": 64,
    "word_embed_proj_dim": 32,
    "max_position_embeddings": LENGTH,
    "vocab_size": VOCABULARY,
    "sliding_window": 6,
    "window_size": 6,
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
    "dropout": 0.0,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "attention_softmax_in_fp32": True,
    "mlp_layer_types": None,
    "moe_layer_freq": None,
    "layer_types": None,
    "use_sliding_window": True,
}
# Where the common values do not make a model.
_OWN: dict[str, dict[str, object]] = {
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1},
    "mixtral": {"sliding_window": None},
    "bamba": {
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_n_groups": 1,
        "attn_layer_indices": [1],
    },
    "granitemoehybrid": {
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_n_groups": 1,
        "layer_types": ["mamba", "attention", "mamba", "attention"],
    },
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
}

_WITHOUT_EACH_TYPE = {"bailing_hybrid", "gemma3_text", "kimi_linear", "kolibri1", "lfm3"}


def small_config(kind: str, std: float = 0.02, layers: int = LAYERS) -> dict[str, object]:
    """Return the fields of a config.json of a small model of an architecture."""
    chosen = CONFIG_MAPPING[kind]
    default = chosen()
    names = {*default.to_dict(), *chosen.attribute_map}
    fields: dict[str, object] = {"model_type": kind}
    for name, value in _SMALL.items():
        if name in names and (value is not None or getattr(default, name, None) is not None):
            fields[name] = value
    if "kv_lora_rank" in names:
        fields["num_key_value_heads"] = fields["num_attention_heads"]
        fields.pop("head_dim", None)
    if "initializer_range" in names:
        fields["initializer_range"] = std
    if "num_hidden_layers" in names:
        fields["num_hidden_layers"] = layers
    fields |= _OWN.get(kind, {})
    types = set(getattr(default, "layer_types", None) or ())
    if kind in _WITHOUT_EACH_TYPE:  # the first layers are all alike
        ordered = sorted(types)
        fields["layer_types"] = [ordered[number % len(types)] for number in range(layers)]
    return {name: value for name, value in fields.items() if value is not None}


def as_text(fields: dict[str, object]) -> str:
    """Return the fields as the family keeps them."""
    return json.dumps(fields, sort_keys=True)
