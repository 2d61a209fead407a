"""Converts config.json of GPT-NeoX and Pythia to the family's "model" block (floor 0)."""

from parallel3d.models.pretrained import Fields

MODEL_TYPES = {"gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXModel")}
FREE = {"initializer_range": "initializer_range"}
_TANH = "gelu_pytorch_tanh"  # another name for "gelu_new"


def model_block(fields: Fields) -> dict[str, object]:
    """Return the "model" block of a config.json; unsupported values are recorded in `fields`."""
    base, share = _rope(fields)
    activation = fields.take("hidden_act", "gelu")
    gelu = "is neither GELU nor its tanh approximation"
    fields.only("hidden_act", "gelu", "gelu_fast", "gelu_new", _TANH, rule=gelu)
    bare = "removes the biases of query, key, value and output, which the family always has"
    fields.only("attention_bias", True, rule=bare)
    for name in ("attention_dropout", "hidden_dropout"):
        fields.only(name, 0, 0.0, rule="adds dropout, which the family does not support")
    # Fields of classifiers, and of encoders; this model is always a decoder.
    fields.ignore(*FREE.values(), "classifier_dropout", "is_decoder")
    return {
        "family": "neox",
        "hidden_size": fields.take("hidden_size"),
        "num_hidden_layers": fields.take("num_hidden_layers"),
        "num_attention_heads": fields.take("num_attention_heads"),
        "intermediate_size": fields.take("intermediate_size"),
        "vocab_size": fields.take("vocab_size"),
        "max_position_embeddings": fields.take("max_position_embeddings", 2048),
        "activation": "gelu_new" if activation == _TANH else activation,
        "use_parallel_residual": fields.take("use_parallel_residual", True),
        "rotary_pct": share,
        "rotary_emb_base": base,
        "layer_norm_eps": fields.take("layer_norm_eps", 1e-5),
        "tie_word_embeddings": fields.take("tie_word_embeddings", False),
    }


def _rope(fields: Fields) -> tuple[object, object]:
    """Return the base of the rotary frequencies, and the share of each head that rotates."""
    base = fields.take("rotary_emb_base", 10_000.0)
    share = fields.take("rotary_pct", 0.25)
    where, kind, rope = fields.rope("rope_scaling", "rope_parameters")
    base = rope.pop("rope_theta", base)
    share = rope.pop("partial_rotary_factor", share)
    if kind != "default":
        rule = f'has rope_type "{kind}", which the family does not support'
        fields.refuse(where, rule, 'use a model with "default"')
    elif rope:
        fields.refuse(where, f"has {min(rope)}, which is unknown")
    return base, share
