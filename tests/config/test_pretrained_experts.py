"""model.from_pretrained of models with experts: the block of a config.json, and what is refused."""

import pytest

from parallel3d import models
from tests.config.test_pretrained import (
    BIASED,
    LLAMA,
    MISTRAL,
    QWEN3,
    config_of,
    published,
    refused,
)

pytestmark = pytest.mark.pure

MIXTRAL = MISTRAL | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "sliding_window": None,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.02,
    "output_router_logits": False,
    "router_jitter_noise": 0.0,
    "is_llama_config": None,
}
QWEN3_MOE = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [0],
    "router_aux_loss_coef": 0.001,
    "output_router_logits": False,
}
OLMOE = LLAMA | {
    "architectures": ["OlmoeForCausalLM"],
    "model_type": "olmoe",
    "num_experts": 16,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
    "clip_qkv": None,
    "pad_token_id": 1,
    "router_aux_loss_coef": 0.01,
    "output_router_logits": False,
    "is_llama_config": None,
}
DOTS1 = QWEN3 | {
    "architectures": ["Dots1ForCausalLM"],
    "model_type": "dots1",
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_shared_experts": 2,
    "moe_intermediate_size": 48,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "sliding_window": None,
    "first_k_dense_replace": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
GLM = DOTS1 | {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "head_dim": 8,
    "partial_rotary_factor": 0.5,
    "num_nextn_predict_layers": 1,
    "use_qk_norm": False,
    "attention_bias": True,
    "layer_types": None,
    "first_k_dense_replace": None,
}


@pytest.mark.parametrize(
    ("config", "fixed"),
    [
        (MIXTRAL, {"norm_topk_prob": True, "num_experts": 8, "expert_size": 256, "qk_norm": False}),
        (MIXTRAL | {"rope_theta": None, "rms_norm_eps": None}, {"rope_theta": 1e6}),
        (MIXTRAL | {"rms_norm_eps": None}, {"rms_norm_eps": 1e-5, "router_aux_loss_coef": 0.0}),
        (QWEN3_MOE, {"expert_size": 48, "qk_norm_over": "head", "first_k_dense_replace": 1}),
        (
            QWEN3_MOE | {"num_experts": None, "num_local_experts": 8},
            {"num_experts": 8, "norm_topk_prob": True},
        ),
        (QWEN3_MOE | {"num_local_experts": 16, "norm_topk_prob": None}, {"norm_topk_prob": False}),
        (QWEN3_MOE | {"head_dim": None}, {"head_size": 6, "rms_norm_eps": 1e-5}),
        (OLMOE, {"qk_norm": True, "qk_norm_over": "width", "norm_topk_prob": False}),
        (OLMOE | {"attention_bias": True, "rms_norm_eps": None}, BIASED | {"rms_norm_eps": 1e-5}),
        (DOTS1, {"router": "sigmoid", "score_bias": True, "n_shared_experts": 2, "n_group": 4}),
        (GLM, {"rotary_size": 4, "attention_bias": True, "attention_output_bias": False}),
        (GLM, {"qk_norm": False, "first_k_dense_replace": 1, "score_bias": True}),
        (GLM | {"partial_rotary_factor": None, "use_qk_norm": True}, {"rotary_size": 4}),
        (GLM | {"rope_parameters": {"partial_rotary_factor": 0.25}}, {"rotary_size": 2}),
    ],
)
def test_config_json_determines_the_model_block(config, fixed, tmp_path):
    model = config_of(published(tmp_path / "model", config)).model
    assert {name: getattr(model, name) for name in fixed} == fixed
    assert model.family == "moe" and model.num_hidden_layers == 4
    assert models.num_params(model) > models.num_params(model, active=True) > 0


REFUSED = [
    (DOTS1 | {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5: rotates only part"),
    (GLM | {"partial_rotary_factor": 0.4}, "0.4: rotates 3 of 8 features; use an even number"),
    (MIXTRAL | {"num_experts_per_tok": 9}, "num_experts_per_tok = 9: is more than num_experts=8"),
    (MIXTRAL | {"num_local_experts": None}, "num_experts: is missing; add it"),
    (MIXTRAL | {"sliding_window": "a"}, 'sliding_window = "a": must be'),
    (MIXTRAL | {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1: adds noise to the"),
    (MIXTRAL | {"attention_bias": True}, 'which are not supported for model_type "mixtral"'),
    (MIXTRAL | {"moe_intermediate_size": 4}, "moe_intermediate_size = 4: is unknown and may"),
    (QWEN3_MOE | {"layer_types": ["sliding_attention"] * 4},
     "has layers with a window, but the class has"),
    (QWEN3_MOE | {"mlp_only_layers": [1]}, "mlp_only_layers = [1]: has layers without experts"),
    (QWEN3_MOE | {"shared_expert_intermediate_size": 8}, "adds a shared expert with a gate"),
    (OLMOE | {"clip_qkv": 8.0}, "clip_qkv = 8.0: clips queries, keys and values"),
    (OLMOE | {"mlp_bias": True}, "mlp_bias = true: must be false"),
    (DOTS1 | {"scoring_func": "softmax"}, 'scoring_func = "softmax": is not the routing of'),
    (DOTS1 | {"layer_types": ["sliding_attention"] * 4, "sliding_window": None},
     "has layers with a window"),
    (DOTS1 | {"n_group": 3}, "n_group = 3: does not divide num_experts=16"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "expected"), REFUSED)
def test_unsupported_feature_is_refused_by_its_field(config, expected, tmp_path):
    message = refused(published(tmp_path / "model", config), family="moe")
    assert expected in message, message
