"""Converts config.json of Llama-like models to the "model" block (floor 0).

SmolLM2 is a `LlamaForCausalLM`. Missing fields have the default of the class.
"""

from parallel3d.base.section import ABSENT
from parallel3d.models.llama.spec import SCALINGS
from parallel3d.models.pretrained import Fields

MODEL_TYPES = {
    "llama": ("LlamaForCausalLM", "LlamaModel"),
    "mistral": ("MistralForCausalLM", "MistralModel"),
    "ministral": ("MinistralForCausalLM", "MinistralModel"),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Model"),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Model"),
}
FREE = {"initializer_range": "initializer_range", "attn_pdrop": "attention_dropout"}
# Classes with a window of 4096 in a config.json without the field; with a switch for it; with it in
# every layer or in none.
_WITH_WINDOW = ("mistral", "ministral", "qwen2", "qwen3", "qwen3_moe", "dots1")
_SWITCHED = ("qwen2", "qwen3", "qwen3_moe")
_UNIFORM = ("mistral", "mixtral", "qwen3_moe")
_SLIDING = "sliding_attention"
# Bases of the rotary frequencies that are not 10,000.
_BASES = {"mixtral": 1e6}
# An rms_norm_eps of 1e-5 where a config.json has none, not 1e-6.
_LARGE_EPS = ("mixtral", "olmoe", "glm4_moe")


def model_block(fields: Fields, kind: str | None = None) -> dict[str, object]:
    """Return the "model" block of a config.json; unsupported values are recorded in `fields`.

    - `kind`: the model_type with the same attention, if the file's is another family's.
    """
    kind = kind or fields.model_type
    heads = fields.take("num_attention_heads")
    # Only Llama's default does not depend on the version of transformers.
    kv_heads = fields.take("num_key_value_heads", heads if kind == "llama" else ABSENT)
    head_dim = fields.take("head_dim", ABSENT if fields.model_type == "qwen3" else None)
    base, scaling, part = _rope(fields)
    fields.only("hidden_act", "silu", "swish", rule="is not SiLU")
    # Qwen2 always has biases on query, key and value; Mistral has none.
    has_bias = False
    if kind in ("llama", "qwen3"):
        has_bias = fields.take("attention_bias", False)
    biased = f'adds biases, which are not supported for model_type "{fields.model_type}"'
    if kind in ("mistral", "ministral"):
        fields.only("attention_bias", False, rule=biased)
    if kind != "llama":
        fields.only("mlp_bias", False, rule=biased)
    fields.ignore("attention_bias")
    for name, rule in (
        ("rope_interleaved", "rotates pairs of neighbouring features"),
        ("use_mrope", "rotates by several positions per token"),
    ):
        fields.only(name, False, rule=f"{rule}, which the family does not support")
    if kind != "glm4_moe":
        fields.only("partial_rotary_factor", 1, 1.0, rule="rotates only part of each head")
    fields.ignore(*FREE.values(), "is_llama_config")
    window, types = _windows(fields)
    shares = {"partial_rotary_factor": part} if kind == "glm4_moe" else {}
    return shares | {
        "family": "llama",
        "hidden_size": fields.take("hidden_size"),
        "num_hidden_layers": fields.take("num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": fields.take("intermediate_size"),
        "vocab_size": fields.take("vocab_size"),
        "max_position_embeddings": fields.take("max_position_embeddings", 2048),
        "rms_norm_eps": fields.take(
            "rms_norm_eps", 1e-5 if fields.model_type in _LARGE_EPS else 1e-6
        ),
        "rope_theta": base,
        "rope_scaling": scaling,
        "sliding_window": window,
        "layer_types": types,
        "tie_word_embeddings": fields.take("tie_word_embeddings", False),
        "attention_bias": kind == "qwen2" or has_bias,
        "attention_output_bias": has_bias,
        "mlp_bias": kind == "llama" and fields.take("mlp_bias", False),
        "qk_norm": kind == "qwen3",
    }


def _windows(fields: Fields) -> tuple[object, object]:
    """Return the window and the type of each layer, as transformers' class understands them."""
    kind = fields.model_type
    count = fields.take("num_hidden_layers", 0)
    first = fields.take("max_window_layers", 62 if kind == "dots1" else 28)
    types = fields.take("layer_types", None)
    # A missing field means the default of the class; null means no window.
    window = fields.take("sliding_window", None)
    if not fields.has("sliding_window") and kind in _WITH_WINDOW:
        window = 4096
    fields.ignore("use_sliding_window")
    if kind in _SWITCHED and not fields.take("use_sliding_window", False):
        window = None

    def slides(number: int) -> bool:
        """Return True if the class has a window in this layer, where the file does not say."""
        return kind not in ("qwen2", "qwen3", "dots1") or bool(number >= first)

    if types is None:
        windows = [slides(number) and window is not None for number in range(count)]
        types = [_SLIDING if has_window else "full_attention" for has_window in windows]
    elif not isinstance(types, list) or {*map(str, types)} - {"full_attention", _SLIDING}:
        fields.refuse("layer_types", "has layers that do not attend to all tokens or to a window")
        return None, None
    elif kind in _UNIFORM and types != [types[0] if window is None else _SLIDING] * count:
        rule = "is ignored by the class, which has the window in every layer or in none"
        fields.refuse("layer_types", rule, "remove it, or use another model_type")
    if _SLIDING not in types:
        return None, None
    if window is None or kind in ("llama", "olmoe"):
        fields.refuse("layer_types", "has layers with a window, but the class has none")
    return window, None if "full_attention" not in types else types


def _rope(fields: Fields) -> tuple[object, dict[str, object] | None, object]:
    """Return the base of the rotary frequencies, their scaling or None, and the rotated share."""
    part: object = 1.0
    where, kind, rope = fields.rope("rope_parameters", "rope_scaling")
    base = fields.take("rope_theta", _BASES.get(fields.model_type, 10_000.0))
    base = rope.pop("rope_theta", base)
    own = rope.pop("partial_rotary_factor", None)
    rope.pop("finetuned", None)  # says how the weights were made
    if fields.model_type == "glm4_moe":
        part = fields.take("partial_rotary_factor", 0.5)
        part = part if own is None else own
    elif own not in (1, None):
        fields.refuse(where, "rotates only part of each head")
    if kind == "default":
        return base, None, part
    if str(kind) not in SCALINGS:
        rule = f'has rope_type "{kind}", which the family does not support'
        fields.refuse(where, rule, f"use a model with {', '.join(SCALINGS)} or default")
        return base, None, part
    names = SCALINGS[kind]
    required = ["factor", *(names if kind == "llama3" else ())]
    entries = {name: value for name, value in rope.items() if value is not None}
    if kind == "yarn":
        longest = fields.take("max_position_embeddings", 2048)
        entries = {"original_max_position_embeddings": longest, **entries}
    missing = [name for name in required if name not in entries]
    unknown = sorted(entries.keys() - {"factor", *names})
    if missing:
        fields.refuse(where, f"has no {missing[0]}", "add it")
    if unknown:
        fields.refuse(where, f"has {unknown[0]}, which is unknown")
    return base, {"rope_type": kind, **entries}, part
