"""Converts GPT-2's config.json to the "model" block of the family (floor 0)."""

from parallel3d.models.pretrained import Fields

MODEL_TYPES = {"gpt2": ("GPT2LMHeadModel", "GPT2Model")}
# Settings that training may change, and their names in config.json.
FREE = {
    "embd_pdrop": "embd_pdrop",
    "resid_pdrop": "resid_pdrop",
    "attn_pdrop": "attn_pdrop",
    "initializer_range": "initializer_range",
}
_ACTIVATIONS = ("gelu_new", "gelu_pytorch_tanh")  # two names of one function


def model_block(fields: Fields) -> dict[str, object]:
    """Return the "model" block of a config.json; unsupported values are recorded in `fields`."""
    hidden = fields.take("n_embd")
    fields.only("activation_function", *_ACTIVATIONS, rule="is not the tanh approximation of GELU")
    for name, value in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("reorder_and_upcast_attn", False),
        ("add_cross_attention", False),
    ):
        fields.only(name, value, rule=f"is not {str(value).lower()}, as in GPT-2")
    summaries = ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")
    fields.ignore("n_ctx", *FREE.values(), *(f"summary_{name}" for name in summaries))
    return {
        "family": "gpt",
        "hidden_size": hidden,
        "num_hidden_layers": fields.take("n_layer"),
        "num_attention_heads": fields.take("n_head"),
        "vocab_size": fields.take("vocab_size"),
        "max_position_embeddings": fields.take("n_positions", 1024),
        "intermediate_size": fields.take("n_inner", None),
        "activation": "gelu_new",
        "layer_norm_epsilon": fields.take("layer_norm_epsilon", 1e-5),
        "tie_word_embeddings": fields.take("tie_word_embeddings", True),
    }
