"""How linear layers are cut: transformers' own plans, and ours where it has none."""

from typing import Any

_HEADS = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
}
# By model_type. Phi-3's projections are fused: transformers gathers what they give, because its cut
# mixes gates with ups, and queries with keys. The other modules view their projections as
# [..., -1, head_size], so that a part of the heads passes through them.
_OURS = {
    "biogpt": _HEADS
    | {
        "layers.*.self_attn.out_proj": "rowwise",
        "layers.*.fc1": "colwise",
        "layers.*.fc2": "rowwise",
    },
    "gpt2": {
        "h.*.attn.c_attn": "packed_heads",
        "h.*.attn.c_proj": "rowwise",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
    },
    "hunyuan_v1_dense": _HEADS
    | {
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    },
    "lfm2": _HEADS
    | {
        "layers.*.self_attn.out_proj": "rowwise",
        "layers.*.feed_forward.w1": "colwise",
        "layers.*.feed_forward.w3": "colwise",
        "layers.*.feed_forward.w2": "rowwise",
    },
    "phi3": {
        "layers.*.self_attn.qkv_proj": "packed_heads",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_up_proj": "packed_colwise",
        "layers.*.mlp.down_proj": "rowwise",
    },
}


def plan_of(settings: Any) -> dict[str, str]:
    """Return the style of each linear layer under tensor parallelism, by name and pattern.

    - `settings`: the transformers config.
    """
    plan = _OURS.get(settings.model_type) or settings.base_model_tp_plan
    return dict(plan or {})
