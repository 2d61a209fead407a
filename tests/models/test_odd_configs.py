"""Settings that published config.json files have, and that change what a model computes."""

import pytest

from tests.models.every_decoder import BOUND, case_of, errors_on_ranks
from tests.models.test_any_decoder import STD, switched

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
YARN_OF_MINISTRAL = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 4,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 6.0}
THREE_TO_ONE = ["sliding_attention"] * 3 + ["full_attention"]
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


PAIR = (1, 1, 2)
OF_LAYERS = [
    ("gemma3_text", {"torch_dtype": "bfloat16", "tie_word_embeddings": False}),
    ("gemma3_text", {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    ("mixtral", {"sliding_window": 5, "head_dim": None}),
    ("olmo2", {"head_dim": None, "attention_bias": True, "tie_word_embeddings": True}),
    ("deepseek_v3", {"first_k_dense_replace": 3, "v_head_dim": 16, "rope_interleave": False}),
    ("qwen2_moe", {"mlp_only_layers": [3], "decoder_sparse_step": 2, "norm_topk_prob": False}),
    ("qwen3_moe", {"sliding_window": 4, "max_window_layers": 2, "num_experts_per_tok": 3}),
    ("olmoe", {"clip_qkv": 0.05, "norm_topk_prob": True}),
    ("granitemoehybrid", {"position_embedding_type": "nope", "num_local_experts": 0}),
    ("granitemoeshared", {"shared_intermediate_size": 0}),
    ("falcon", {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1}),
    ("glm4_moe", {"first_k_dense_replace": 0, "use_qk_norm": False, "head_dim": 12}),
    ("ernie4_5_moe", {"moe_layer_start_index": 1, "moe_layer_end_index": 2, "use_bias": True}),
    ("hunyuan_v1_moe", {"moe_topk": [2] * 4, "moe_intermediate_size": [64] * 4}),
    ("mimo_v2_flash", {"swa_num_attention_heads": 4, "sliding_window_size": 4}),
    ("dots1", {"sliding_window": 5, "max_window_layers": 2, "n_shared_experts": 2}),
    ("solar_open", {"first_k_dense_replace": 2, "head_dim": 12, "n_shared_experts": 2}),
    ("lfm2", {"layer_types": None, "full_attn_idxs": [1, 3], "block_auto_adjust_ff_dim": True}),
    ("mamba", {"use_bias": True, "use_conv_bias": False, "conv_kernel": 3}),
    ("qwen2", {"layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": 3}),
]
OF_FILES = [
    ("opt", {"word_embed_proj_dim": 16, "do_layer_norm_before": False}),
    ("opt", {"enable_bias": False, "layer_norm_elementwise_affine": False}),
    ("gpt_neo", {"attention_types": [[["local"], 2], [["global", "local"], 1]]}),
    ("gpt_neox", {"rotary_pct": 0.25, "rotary_emb_base": 10000, "attention_bias": False}),
    ("bloom", {"n_embed": 32, "offset_alibi": 100, "pretraining_tp": 4}),
    ("mpt", {"attn_config": {"alibi": True, "clip_qkv": 0.05}, "no_bias": True}),
    ("phi", {"qk_layernorm": True, "num_key_value_heads": 4}),
    ("persimmon", {"qk_layernorm": False, "hidden_act": "relu2"}),
    ("biogpt", {"scale_embedding": False, "tie_word_embeddings": False}),
    ("internlm3", {"bias": True, "qkv_bias": True, "rope_scaling": DYNAMIC, "head_dim": 12}),
    ("qwen3", {"head_dim": 12, "num_key_value_heads": 1, "rope_scaling": YARN}),
    ("ministral3", {"rope_parameters": YARN_OF_MINISTRAL}),
    (
        "olmo3",
        {"rope_scaling": YARN, "layer_types": THREE_TO_ONE},
    ),
    ("gpt_oss", {"rope_scaling": YARN | {"truncate": False}, "initializer_range": 0.15}),
    ("apertus", {"rope_scaling": LLAMA3, "attention_bias": True}),
    ("seed_oss", {"attention_out_bias": True, "mlp_bias": True, "head_dim": 16}),
    ("starcoder2", {"sliding_window": 5, "tie_word_embeddings": False}),
    ("cohere", {"use_qk_norm": False, "attention_bias": True, "tie_word_embeddings": False}),
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("settings", "mesh"),
    [
        (ROTATION, MESH),
        (ATTENTION, MESH),
        (OTHERS, MESH),
        (OF_LAYERS, PAIR),
        (OF_FILES, PAIR),
    ],
)
def test_settings_are_equal_to_one_process(settings, mesh):
    cases = [switched(case_of(kind, STD, mesh), own) for kind, own in settings]
    measured = errors_on_ranks(cases)
    for (kind, own), errors in zip(settings, measured, strict=True):
        print(kind, own, errors)
    for (kind, own), errors in zip(settings, measured, strict=True):
        assert max(errors.loss, errors.grad_norm, errors.weight) < BOUND, (kind, own, errors)
