"""Converts config.json of models with experts to the "model" block (floor 0).

Missing fields have the default of the class, where it does not depend on transformers' version.
"""

from parallel3d.models.llama import pretrained as llama
from parallel3d.models.pretrained import Fields

MODEL_TYPES = {
    "mixtral": ("MixtralForCausalLM", "MixtralModel"),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeModel"),
    "olmoe": ("OlmoeForCausalLM", "OlmoeModel"),
    "dots1": ("Dots1ForCausalLM", "Dots1Model"),
    "glm4_moe": ("Glm4MoeForCausalLM", "Glm4MoeModel"),
}
FREE = llama.FREE | {
    "router_aux_loss_coef": "router_aux_loss_coef",
    "router_aux_loss": "",
    "router_z_loss_coef": "",
    "score_bias_rate": "",
    "capacity_factor": "",
}
# The model_type with the same attention.
_ATTENTION = {"mixtral": "mistral", "qwen3_moe": "qwen3", "olmoe": "llama", "dots1": "qwen3"}
_GLM = "glm4_moe"
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_COPY = "set it to 0 in a copy of the folder"


def model_block(fields: Fields) -> dict[str, object]:
    """Return the "model" block of a config.json; unsupported values are recorded in `fields`."""
    kind = fields.model_type
    block = llama.model_block(fields, _ATTENTION.get(kind))
    fields.ignore("router_aux_loss_coef", "output_router_logits")
    block |= {
        "family": "moe",
        "num_experts": _num_experts(fields),
        "num_experts_per_tok": fields.take("num_experts_per_tok"),
        "norm_topk_prob": kind == "mixtral" or fields.take("norm_topk_prob", kind == _GLM),
    }
    if kind not in ("mixtral", "olmoe"):
        block["moe_intermediate_size"] = fields.take("moe_intermediate_size")
    if kind == "mixtral":
        rule = "adds noise to the router's input in training, which the family does not support"
        fields.only("router_jitter_noise", 0, 0.0, rule=rule, remedy=_COPY)
    elif kind == "qwen3_moe":
        dense = fields.take("mlp_only_layers", [])
        block["first_k_dense_replace"] = first = len(dense) if isinstance(dense, list) else 0
        rule = "has layers without experts behind the first ones, which is not supported"
        fields.only("mlp_only_layers", [*range(first)], rule=rule)
        block["decoder_sparse_step"] = fields.take("decoder_sparse_step", 1)
    elif kind == "olmoe":
        fields.only("clip_qkv", rule="clips queries, keys and values")
        block |= {"qk_norm": True, "qk_norm_over": "width"}
    else:
        block |= _deepseek_routing(fields)
    if kind == _GLM:
        block |= {
            "attention_bias": fields.take("attention_bias", False),
            "qk_norm": fields.take("use_qk_norm", False),
        }
        # The layers behind the last one predict further tokens; transformers leaves them out, too.
        fields.ignore("num_nextn_predict_layers", "num_mtp_layers")
    return block


def _num_experts(fields: Fields) -> object:
    """Return the number of experts, which has three names."""
    fields.ignore(*_COUNTS)
    return fields.take(next((name for name in _COUNTS if fields.take(name, None)), _COUNTS[0]))


def _deepseek_routing(fields: Fields) -> dict[str, object]:
    """Return the settings of sigmoid scores with a bias for the choice, and of shared experts."""
    for name, value in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        fields.only(name, value, rule="is not the routing of DeepSeek-V3")
    return {
        "router": "sigmoid",
        "score_bias": True,
        "routed_scaling_factor": fields.take("routed_scaling_factor", 1.0),
        "n_group": fields.take("n_group", 1),
        "topk_group": fields.take("topk_group", 1),
        "n_shared_experts": fields.take("n_shared_experts"),
        "first_k_dense_replace": fields.take(
            "first_k_dense_replace", int(fields.model_type == _GLM)
        ),
    }
