"""Converts config.json of Llama, Mistral, Qwen2, Qwen3 and SmolLM3 to the "model" block (floor 0).

SmolLM2 is a `LlamaForCausalLM`. Missing fields have the default of the class.
"""

from typing import TypeGuard

from parallel3d.models.llama.spec import SCALINGS
from parallel3d.models.pretrained import Fields

MODEL_TYPES = {
    "llama": ("LlamaForCausalLM", "LlamaModel"),
    "mistral": ("MistralForCausalLM", "MistralModel"),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Model"),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Model"),
    "smollm3": ("SmolLM3ForCausalLM", "SmolLM3Model"),
}
FREE = {"initializer_range": "initializer_range", "attn_pdrop": "attention_dropout"}
_LENGTH = "original_max_position_embeddings"
_BASES = {"smollm3": 2e6, "mixtral": 1e6}  # of the rotary frequencies, where not 10,000


def model_block(fields: Fields, kind: str | None = None) -> dict[str, object]:
    """Return the "model" block of a config.json; unsupported values are recorded in `fields`.

    kind: the model_type with the same attention, if the file's is another family's.
    """
    kind = kind or fields.model_type
    heads = fields.take("num_attention_heads")
    # Only Llama's default does not depend on the version of transformers.
    kv_heads = fields.take("num_key_value_heads", *([heads] if kind == "llama" else []))
    head_dim = fields.take("head_dim", *([] if fields.model_type == "qwen3" else [None]))
    base, scaling = _rope(fields)
    fields.only("hidden_act", "silu", "swish", rule="is not SiLU")
    # Qwen2 always has biases on query, key and value; Mistral has none.
    has_bias = kind in ("llama", "qwen3") and fields.take("attention_bias", False)
    biased = f'adds biases, which are not supported for model_type "{fields.model_type}"'
    if kind in ("mistral", "smollm3"):
        fields.only("attention_bias", False, rule=biased)
    if kind != "llama":
        fields.only("mlp_bias", False, rule=biased)
    fields.ignore("attention_bias")
    for name, rule in (
        ("rope_interleaved", "rotates pairs of neighbouring features"),
        ("use_mrope", "rotates by several positions per token"),
    ):
        fields.only(name, False, rule=f"{rule}, which the family does not support")
    fields.only("partial_rotary_factor", 1, 1.0, rule="rotates only part of each head")
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
        "max_position_embeddings": _longest(fields, kind),
        "rms_norm_eps": fields.take("rms_norm_eps", 1e-6),
        "rope_theta": base,
        "rope_scaling": scaling,
        "no_rope_layer_interval": _interval(fields) if kind == "smollm3" else None,
        "tie_word_embeddings": fields.take("tie_word_embeddings", kind == "smollm3"),
        "attention_bias": kind == "qwen2" or has_bias,
        "attention_output_bias": has_bias,
        "mlp_bias": kind == "llama" and fields.take("mlp_bias", False),
        "qk_norm": kind == "qwen3",
    }


def _longest(fields: Fields, kind: str) -> object:
    """Return the longest sequence that no attention window cuts; a window counts its own token."""
    longest = fields.take("max_position_embeddings", 2048)
    # A missing field means MistralConfig's default; null means no window.
    is_default = fields.model_type == "mistral" and not fields.has("sliding_window")
    window = fields.take("sliding_window", 4096 if is_default else None)
    types = fields.take("layer_types", [])
    used = fields.take("use_sliding_window", fields.model_type == "mistral")
    if not isinstance(types, list):
        fields.refuse("layer_types", "must be a list", "use one attention type per layer")
    elif any(layer != "full_attention" for layer in types):
        used = True
        known = all(layer in ("full_attention", "sliding_attention") for layer in types)
        if not known or window is None:
            fields.refuse("layer_types", "has layers that do not attend to all previous tokens")
    if window is None or (not used and kind not in ("llama", "mistral")):
        return longest
    if not _is_count(window):
        fields.refuse("sliding_window", "must be a number of tokens", "download the file again")
        return longest
    if not _is_count(longest):
        return longest
    if fields.length is not None and fields.length > window:
        rule = f"hides the beginning of samples of data.sequence_length={fields.length} tokens"
        fields.refuse("sliding_window", rule, f"use samples of {window} tokens or fewer")
    return min(longest, window)


def _interval(fields: Fields) -> object:
    """Return after how many blocks one has no rotary positions, or None if all have them."""
    interval, count = fields.take("no_rope_layer_interval", 4), fields.take("num_hidden_layers", 0)
    listed = fields.take("no_rope_layers", None)
    if listed is None:
        return interval
    if not isinstance(listed, list) or not _is_count(count) or len(listed) < count:
        fields.refuse("no_rope_layers", "must be a list with 0 or 1 for each layer", "correct it")
        return None
    without = [number for number, rotates in enumerate(listed[:count], 1) if not rotates]
    if without and without != [*range(without[0], count + 1, without[0])]:
        fields.refuse("no_rope_layers", "is not 0 for every n-th layer alone")
    return without[0] if without else None


def _rope(fields: Fields) -> tuple[object, dict[str, object] | None]:
    """Return the base of the rotary frequencies, and the scaling of them, or None."""
    base = fields.take("rope_theta", _BASES.get(fields.model_type, 10_000.0))
    where, kind, rope = fields.rope("rope_parameters", "rope_scaling")
    base = rope.pop("rope_theta", base)
    if rope.pop("partial_rotary_factor", 1) not in (1, None):
        fields.refuse(where, "rotates only part of each head")
    if kind == "default":
        return base, None
    if str(kind) not in SCALINGS:
        rule = f'has rope_type "{kind}", which the family does not support'
        fields.refuse(where, rule, f"use a model with {', '.join(SCALINGS)} or default")
        return base, None
    own = SCALINGS[kind]
    required = ["factor", *(own if kind == "llama3" else ())]
    entries = {name: value for name, value in rope.items() if value is not None}
    if kind == "yarn":
        entries.setdefault(_LENGTH, fields.take("max_position_embeddings", 2048))
    if missing := [name for name in required if name not in entries]:
        fields.refuse(where, f"has no {missing[0]}", "add it")
    if more := sorted(entries.keys() - {"factor", *own}):
        fields.refuse(where, f"has {more[0]}, which is unknown")
    return base, {"rope_type": kind, **entries}


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and value > 0
