"""Settings that published config.json files have, and that change what a model computes."""

import pytest

from tests.models.every_decoder import BOUND, errors_on_ranks
from tests.models.test_any_decoder import switched

pytestmark = [pytest.mark.gloo, pytest.mark.slow]

MESH = (2, 1, 2)
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "finetuned": True}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN_OF_DEEPSEEK = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 16,
}
BIASES = {"attention_bias": True, "mlp_bias": True}
GROUPS = {"n_group": 2, "topk_group": 1, "n_routed_experts": 8, "num_experts_per_tok": 2}
ROTATION = [
    ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 50.0}),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
    ("llama", {"rope_scaling": YARN}),
    ("llama", {"rope_scaling": LLAMA3, "rope_theta": 50.0}),
    ("deepseek_v3", {"rope_scaling": YARN_OF_DEEPSEEK, "q_lora_rank": None} | GROUPS),
    ("gemma3_text", {"sliding_window_pattern": 2, "rope_local_base_freq": 10.0}),
    ("smollm3", {"no_rope_layers": [1, 0, 1, 0], "num_key_value_heads": 1}),
    ("phi3", {"partial_rotary_factor": 0.5, "tie_word_embeddings": True}),
    ("nemotron", {"partial_rotary_factor": 0.25}),
    ("hunyuan_v1_dense", {"rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}}),
    ("gptj", {"tie_word_embeddings": True}),
]
ATTENTION = [
    ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True} | BIASES),
    ("llama", {"head_dim": 12, "hidden_size": 40}),
    ("mistral", {"sliding_window": 5, "head_dim": 16}),
    ("qwen2", {"max_window_layers": 2, "sliding_window": 5, "use_sliding_window": True}),
    ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    ("gemma2", {"query_pre_attn_scalar": 5, "attn_logit_softcapping": 1.0}),
    ("cohere2", {"sliding_window_pattern": 2, "logit_scale": 0.25}),
    ("olmo", {"clip_qkv": 0.05}),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    ("gpt2", {"n_inner": None, "scale_attn_weights": False}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    ("falcon", {"alibi": True, "bias": True, "parallel_attn": False}),
    ("stablelm", {"qk_layernorm": True, "use_parallel_residual": True, "use_qkv_bias": True}),
    ("exaone4", {"sliding_window_pattern": 2}),
    ("gpt_bigcode", {"multi_query": False}),
    ("llama4_text", {"attention_chunk_size": None, "num_key_value_heads": 1}),
    ("llama4_text", {"attn_temperature_tuning": False, "no_rope_layers": [1, 1, 0, 0]}),
]
OTHERS = [
    ("granite", {"attention_multiplier": 0.3, "residual_multiplier": 0.22} | BIASES),
    ("granite", {"embedding_multiplier": 12.0, "logits_scaling": 8.0}),
    ("qwen3_moe", {"mlp_only_layers": [1], "norm_topk_prob": True, "decoder_sparse_step": 1}),
    ("deepseek_v2", {"topk_method": "group_limited_greedy", "q_lora_rank": None} | GROUPS),
    ("glm4_moe", {"use_qk_norm": True, "attention_bias": True} | GROUPS),
    ("mixtral", {"num_experts_per_tok": 1, "num_key_value_heads": 1}),
    ("llama4_text", {"moe_layers": [0], "num_experts_per_tok": 1, "use_qk_norm": False}),
    ("minicpm3", {"scale_emb": 12, "scale_depth": 1.4}),
    ("starcoder2", {"use_bias": False, "tie_word_embeddings": False}),
    ("bloom", {"apply_residual_connection_post_layernorm": True}),
    ("opt", {"do_layer_norm_before": False}),
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("settings", [ROTATION, ATTENTION, OTHERS])
def test_settings_are_equal_to_one_process(settings):
    cases = [switched(kind, own, mesh=MESH) for kind, own in settings]
    measured = errors_on_ranks(cases)
    for (kind, own), errors in zip(settings, measured, strict=True):
        print(kind, own, errors)
    for (kind, own), errors in zip(settings, measured, strict=True):
        assert max(errors.loss, errors.grad_norm, errors.weight) < BOUND, (kind, own, errors)
