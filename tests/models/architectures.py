"""Small configs of the architectures of transformers."""

import json

from transformers import CONFIG_MAPPING

from parallel3d.models.transformers.small import SIZES

VOCABULARY = 96
LAYERS = 4
_SMALL = SIZES | {
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
    "llama4_text": {"interleave_moe_layer_step": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
            "full_attention": {"rope_type": "default", "rope_theta": 1000.0},
        },
    },
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
