"""The config.json of Llama, Mistral, Qwen2 and Qwen3 as the "model" block of the family (floor 0).

SmolLM2 is a `LlamaForCausalLM`. Where a file leaves a field out, the default is that of the class.
"""

from typing import Any

from parallel3d.models.pretrained import Fields

MODEL_TYPES = {
    "llama": ("LlamaForCausalLM", "LlamaModel"),
    "mistral": ("MistralForCausalLM", "MistralModel"),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Model"),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Model"),
}
FREE = {"initializer_range": "initializer_range"}
_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def model_block(fields: Fields) -> dict[str, Any]:
    """The settings that a config.json fixes; what is refused is noted in `fields`."""
    kind = fields.model_type
    heads = fields.take("num_attention_heads")
    # Llama alone of the four classes has a default that does not depend on the version.
    kv_heads = fields.take("num_key_value_heads", *([heads] if kind == "llama" else []))
    head_dim = fields.take("head_dim", *([] if kind == "qwen3" else [None]))
    base, scaling = _rope(fields)
    fields.only("hidden_act", "silu", "swish", rule="is not SiLU")
    fields.only("attention_dropout", 0, 0.0, rule="is dropout, which the family does not have")
    biases = "gives query, key, value and output biases, which no family here has"
    fields.only("attention_bias", False, *([True] if kind == "qwen2" else []), rule=biases)
    for name, rule in (
        ("mlp_bias", "gives the MLP biases"),
        ("rope_interleaved", "pairs neighbours in the rotation"),
        ("use_mrope", "rotates by several positions"),
    ):
        fields.only(name, False, rule=f"{rule}, which the family does not have")
    fields.only("partial_rotary_factor", 1, 1.0, rule="rotates a part of each head")
    fields.ignore(*FREE.values(), "max_window_layers", "is_llama_config")
    return {
        "family": "llama",
        "hidden_size": fields.take("hidden_size"),
        "num_hidden_layers": fields.take("num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": fields.take("intermediate_size"),
        "vocab_size": fields.take("vocab_size"),
        "max_position_embeddings": _longest(fields),
        "rms_norm_eps": fields.take("rms_norm_eps", 1e-6),
        "rope_theta": base,
        "rope_scaling": scaling,
        "tie_word_embeddings": fields.take("tie_word_embeddings", False),
        "attention_bias": kind == "qwen2",
        "qk_norm": kind == "qwen3",
    }


def _longest(fields: Fields) -> Any:
    """The longest sequence in which no window bites; a token is one of those that it sees."""
    longest = fields.take("max_position_embeddings", 2048)
    # MistralConfig's default, where the file says nothing; null is no window.
    unsaid = fields.model_type == "mistral" and not fields.has("sliding_window")
    window = fields.take("sliding_window", 4096 if unsaid else None)
    types = fields.take("layer_types", [])
    used = fields.take("use_sliding_window", fields.model_type == "mistral")
    if not isinstance(types, list):
        fields.refuse("layer_types", "is no list", "use one of a kind for each layer")
    elif any(kind != "full_attention" for kind in types):
        used = True
        known = all(kind in ("full_attention", "sliding_attention") for kind in types)
        if not known or window is None:
            fields.refuse("layer_types", "has layers that do not attend to all that is before")
    if window is None or (not used and fields.model_type in ("qwen2", "qwen3")):
        return longest
    if not _is_count(window):
        fields.refuse("sliding_window", "is no number of tokens", "download the file again")
        return longest
    if not _is_count(longest):
        return longest
    if fields.length is not None and fields.length > window:
        rule = f"hides the beginning of samples of data.sequence_length={fields.length} tokens"
        fields.refuse("sliding_window", rule, f"use samples of {window} tokens or fewer")
    return min(longest, window)


def _rope(fields: Fields) -> tuple[Any, dict[str, Any] | None]:
    """The base of the rotary frequencies, and Llama 3.1's scaling of them, or None."""
    base = fields.take("rope_theta", 10_000.0)
    where, kind, rope = fields.rope("rope_parameters", "rope_scaling")
    base = rope.pop("rope_theta", base)
    if rope.pop("partial_rotary_factor", 1) not in (1, None):
        fields.refuse(where, "rotates a part of each head")
    if kind == "default":
        return base, None
    if kind != "llama3":
        rule = f'scales rotations by the rule "{kind}", which the family does not have'
        fields.refuse(where, rule, 'use a model with "llama3" or "default"')
        return base, None
    if missing := [name for name in _SCALING if name not in rope]:
        fields.refuse(where, f"has no {missing[0]}", "add it")
    if more := sorted(rope.keys() - set(_SCALING)):
        fields.refuse(where, f"has {more[0]}, which is unknown here")
    return base, {"rope_type": "llama3"} | {name: rope.get(name) for name in _SCALING}


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0
