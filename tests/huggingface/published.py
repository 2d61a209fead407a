"""Small models of every class that can be imported, as transformers saves them; nothing is ours."""

import torch
import transformers

from tests.cases import ADAM

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 61,
    "intermediate_size": 56,
    "max_position_embeddings": 64,
}
GROUPED = SIZES | {"num_key_value_heads": 2}
GPT2 = {
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "vocab_size": 61,
    "n_positions": 64,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 50_000.0,
    "factor": 4.0,
    "low_freq_factor": 0.1,
    "high_freq_factor": 1.0,
    "original_max_position_embeddings": 16,
}
EPSILON = {"layer_norm_epsilon": 1e-3}  # no default: who does not read it has other logits
NO_IDS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic"}
BIASES = {"attention_bias": True, "mlp_bias": True}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "beta_fast": 2.0,
    "original_max_position_embeddings": 16,
}
WINDOWS = {"sliding_window": 9, "use_sliding_window": True}
ALTERNATING = {
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
ROPE = {"rope_type": "default", "rope_theta": 20_000.0, "partial_rotary_factor": 0.5}
GLM = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "head_dim": 16,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "num_mtp_layers": 0,
}
# Each class of config with the settings of one model.
MODELS = {
    "gpt2": ("GPT2Config", GPT2),
    "gpt2 untied": ("GPT2Config", GPT2 | {"tie_word_embeddings": False, "n_inner": 72, **EPSILON}),
    "llama2": ("LlamaConfig", SIZES),
    "llama3": ("LlamaConfig", GROUPED | {"rope_parameters": LLAMA3}),
    "llama, linear": ("LlamaConfig", GROUPED | {"rope_parameters": LINEAR}),
    "llama, dynamic": ("LlamaConfig", GROUPED | {"rope_parameters": LINEAR | DYNAMIC}),
    "llama, biases": ("LlamaConfig", GROUPED | BIASES),
    "llama, biases, yarn": ("LlamaConfig", GROUPED | BIASES | {"rope_parameters": YARN}),
    "qwen3, biases": ("Qwen3Config", GROUPED | {"attention_bias": True}),
    "qwen3, yarn": ("Qwen3Config", GROUPED | {"head_dim": 32, "rope_parameters": YARN}),
    "mistral": ("MistralConfig", GROUPED | {"head_dim": 16, "sliding_window": 32}),
    "qwen2": ("Qwen2Config", GROUPED | {"rms_norm_eps": 1e-3}),
    "qwen3": ("Qwen3Config", GROUPED | {"head_dim": 16, "tie_word_embeddings": True}),
    "mistral, window": ("MistralConfig", GROUPED | {"head_dim": 16, "sliding_window": 9}),
    "ministral, layers alternate": ("MinistralConfig", GROUPED | {"head_dim": 8, **ALTERNATING}),
    "qwen2, windows": ("Qwen2Config", GROUPED | {**WINDOWS, "max_window_layers": 1}),
    "qwen3, windows": ("Qwen3Config", GROUPED | {**WINDOWS, **ALTERNATING}),
    "mixtral": ("MixtralConfig", GROUPED | {"num_local_experts": 4}),
    "qwen3_moe, dense layers": (
        "Qwen3MoeConfig",
        GROUPED
        | {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
        | {"moe_intermediate_size": 24, "decoder_sparse_step": 2},
    ),
    "olmoe": ("OlmoeConfig", SIZES | {"num_experts": 8, "num_experts_per_tok": 3, **NO_IDS}),
    "dots1, groups": (
        "Dots1Config",
        GROUPED
        | {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2, "n_group": 4}
        | {"topk_group": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5}
        | {"moe_intermediate_size": 24, "norm_topk_prob": True, "sliding_window": None},
    ),
    "glm4_moe, part of a head": ("Glm4MoeConfig", GROUPED | GLM | {"attention_bias": True}),
    "glm4_moe, norms": ("Glm4MoeConfig", GROUPED | GLM | {"use_qk_norm": True}),
    "smollm2": ("LlamaConfig", GROUPED | {"tie_word_embeddings": True}),
    "pythia": ("GPTNeoXConfig", SIZES),
    "neox one after the other": (
        "GPTNeoXConfig",
        SIZES
        | {
            "use_parallel_residual": False,
            "tie_word_embeddings": True,
            "rope_parameters": ROPE,
            "hidden_act": "gelu_new",
            "layer_norm_eps": 1e-3,
        },
    ),
}


def save(name, folder, dtype=torch.float32, **how):
    """Write one of MODELS with random weights, far from their start: biases and norms act."""
    kind, settings = MODELS[name]
    config = getattr(transformers, kind)(**settings)
    model = transformers.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for path, parameter in model.state_dict().items():  # with biases of scores, buffers
            is_scale = parameter.ndim == 1 and path.endswith("weight")
            noise = torch.randn(parameter.shape, generator=generator) * 0.1
            noise += 1e-3 * noise.sign()  # a tiny step changes the bits of a tiny weight alone
            parameter.copy_(noise + float(is_scale))
    model.to(dtype).save_pretrained(folder, **how)
    return folder


def run_config(folder, **changes):
    """The object of a ds.json that trains on from a folder."""
    block = {
        "model": {"from_pretrained": str(folder)},
        "data": {"sequence_length": 16, "tokenizer": "somebody's"},
        "train": {"steps": 5},
    }
    raw = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        # Of a bias on keys, whose gradient is 0, Adam sees rounding alone: it is to stay below eps.
        "gradient_clipping": 0.02,
        "optimizer": {"type": "AdamW", "params": dict(ADAM)},
        "zero_optimization": {"stage": 3},
        "parallel3d": block,
    }
    for path, value in changes.items():
        *sections, key = path.split(".")
        place = raw
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = value
    return raw
