"""How linear layers are cut: transformers' own plans, and ours where it has none."""

from collections.abc import Sequence, Set
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

COLUMN = "colwise"
ROW = "rowwise"
GATHERED = "colwise_gather_output"
SPLIT = "rowwise_split_input"
EXPERTS = "moe_tp_experts"
PACKED = "packed_colwise"
HEADS = "packed_heads"
"""Rows of all queries, then those of all keys, then those of all values."""
_TURNED = "packed_rowwise"
"""Gates and ups of experts whose matrices are [in, out]: rows there are columns of a linear layer,
and their other matrix is "colwise"."""
UNCUT = ("replicated_with_grad_allreduce", "mla_kv_a_proj", "local_params", "replicate", "")
"""Inside a region these are not cut, so their gradients are parts."""

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
    # Gate and up alternate, so that a part of the columns has as many of both.
    "gpt_oss": _HEADS
    | {
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.self_attn.sinks": "colwise",
        "layers.*.mlp.experts": "moe_tp_experts",
        "layers.*.mlp.experts.gate_up_proj": "colwise",
        "layers.*.mlp.experts.gate_up_proj_bias": "colwise",
        "layers.*.mlp.experts.down_proj": "rowwise",
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
    plan = dict(_OURS.get(settings.model_type) or settings.base_model_tp_plan or {})
    for name, style in list(plan.items()):
        if style == _TURNED:
            plan[name] = PACKED
            plan[name.replace("gate_up_proj", "down_proj")] = ROW
    return plan


def planned(plan: dict[str, str], name: str) -> str:
    """Return the style of a module or parameter of the base model; "" if the plan has none."""
    parts = ["*" if part.isdigit() else part for part in name.split(".")]
    return plan.get(".".join(parts), "")


def gathered(
    plan: dict[str, str], layers: Sequence[nn.Module], at: str, plain: Set[str], heads: int
) -> frozenset[str]:
    """Return the linear layers to cut beside those of a plan that cuts less than half.

    Each rank computes a part of their output, and gathers all of it, which is right whatever the
    model does with it. Those of regions and of experts are left out: they work on parts already.

    - `at`: the name of the list of layers in the base model.
    - `plain`: the modules whose weight nothing else reads, by their names from there.
    - `heads`: an output that is cut has a multiple of so many features.
    """
    total = 0
    cut = 0
    found = set()
    for number, layer in enumerate(layers):
        modules = {f"{at}.{number}.{name}": child for name, child in layer.named_modules()}
        for name, parameter in layer.named_parameters():
            path = f"{at}.{number}.{name}"
            total += parameter.numel()
            style = planned(plan, path) or planned(plan, path.rpartition(".")[0])
            cut += 0 if style in UNCUT else parameter.numel()
        busy = []
        for name, module in modules.items():
            style = planned(plan, name)
            if style == EXPERTS:
                busy.append(f"{name}.")
            elif style == ROW and isinstance(module, nn.Linear | Conv1D):
                busy.append(f"{name.rpartition('.')[0]}.")
        for name, module in modules.items():
            is_free = name in plain and not planned(plan, name)
            if is_free and not name.startswith(tuple(busy)) and _is_product(module, heads):
                found.add(name)
    return frozenset(found) if cut < total / 2 else frozenset()


def _is_product(module: Any, heads: int) -> bool:
    """Return True for a linear layer of so many features that ranks can share them."""
    if isinstance(module, Conv1D):  # GPT-2's linear layer
        return bool(module.nf % heads == 0)
    return isinstance(module, nn.Linear) and module.out_features % heads == 0
