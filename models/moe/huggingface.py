"""The family of experts in transformers: a reference model, and weights under its names in files.

Files have three matrices per expert, which transformers stacks in memory. The norms of queries and
keys and the router decide on the class (`_class_of`).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from parallel3d.models.common import class_named, renamed
from parallel3d.models.llama import huggingface as llama
from parallel3d.models.moe.spec import Config
from parallel3d.models.pretrained import Part

PREFIX = llama.PREFIX
BUFFERS = llama.BUFFERS
_MIXTRAL = "MixtralForCausalLM"
_OLMOE = "OlmoeForCausalLM"
_QWEN3 = "Qwen3MoeForCausalLM"
_DOTS1 = "Dots1ForCausalLM"
_GLM = "Glm4MoeForCausalLM"
# Our names and those in files, besides Llama's. The last "*" is the number of an expert.
_NAMES = {
    "blocks.*.mlp.router.weight": "model.layers.*.mlp.gate.weight",
    "blocks.*.mlp.router.score_bias": "model.layers.*.mlp.gate.e_score_correction_bias",
    "blocks.*.mlp.experts.gate_up[0]": "model.layers.*.mlp.experts.*.gate_proj.weight",
    "blocks.*.mlp.experts.gate_up[1]": "model.layers.*.mlp.experts.*.up_proj.weight",
    "blocks.*.mlp.experts.down": "model.layers.*.mlp.experts.*.down_proj.weight",
    "blocks.*.mlp.shared.gate_up.weight[0]": "model.layers.*.mlp.shared_experts.gate_proj.weight",
    "blocks.*.mlp.shared.gate_up.weight[1]": "model.layers.*.mlp.shared_experts.up_proj.weight",
    "blocks.*.mlp.shared.down.weight": "model.layers.*.mlp.shared_experts.down_proj.weight",
}
_NAMES_OF_MIXTRAL = {
    "blocks.*.mlp.router.weight": "model.layers.*.block_sparse_moe.gate.weight",
    "blocks.*.mlp.experts.gate_up[0]": "model.layers.*.block_sparse_moe.experts.*.w1.weight",
    "blocks.*.mlp.experts.gate_up[1]": "model.layers.*.block_sparse_moe.experts.*.w3.weight",
    "blocks.*.mlp.experts.down": "model.layers.*.block_sparse_moe.experts.*.w2.weight",
}
# An expert's matrices, gate, up and down, in the order of its product.
_MATRICES = ("gate_proj", "up_proj", "down_proj")
_MATRICES_OF_MIXTRAL = ("w1", "w3", "w2")


def architecture(config: Config, end_of_text: int | None = None, name: str | None = None) -> Any:
    """Return the transformers config of the same architecture; its `architectures` names the class.

    - `end_of_text`: the id of the token between documents.
    - `name`: the requested class.

    Raises ValueError if no class of transformers has this architecture, or not the requested one.
    """
    chosen = class_named(name, _class_of(config))
    problems = list(_unlike(config, chosen))
    if problems:
        raise ValueError("; ".join(problems))
    own = _own_settings(config, chosen)
    settings = llama.settings_of(config, chosen, end_of_text, **own)
    settings.num_local_experts = config.num_experts
    settings.num_experts_per_tok = config.num_experts_per_tok
    return settings


def _own_settings(config: Config, chosen: str) -> dict[str, object]:
    """Return the settings that a class has besides Llama's."""
    if chosen == _MIXTRAL:
        return {"intermediate_size": config.expert_size}
    own: dict[str, object] = {
        "attention_bias": config.attention_bias,
        "norm_topk_prob": config.divides_weights,
    }
    if chosen == _OLMOE:
        return own | {"intermediate_size": config.expert_size}
    own["moe_intermediate_size"] = config.expert_size
    if chosen == _QWEN3:
        return own | {
            "decoder_sparse_step": config.decoder_sparse_step,
            "mlp_only_layers": [*range(config.first_k_dense_replace)],
        }
    own |= {
        "first_k_dense_replace": config.first_k_dense_replace,
        "n_shared_experts": config.n_shared_experts,
        "routed_scaling_factor": config.routed_scaling_factor,
        "n_group": config.n_group,
        "topk_group": config.topk_group,
    }
    if chosen == _GLM:
        own |= {
            "use_qk_norm": config.qk_norm,
            "num_mtp_layers": 0,
            "rope_parameters": llama.rope_of(config)
            | {"partial_rotary_factor": config.partial_rotary_factor},
        }
    return own


def reference(config: Config) -> nn.Module:
    """Return a transformers model of the same architecture, in fp32, randomly initialised.

    Its parameters have the names that they have in files. Raises ValueError as `architecture` does.
    """
    return named_as_in_files(llama.built(architecture(config)))


def named_as_in_files(model: Any) -> nn.Module:
    """Return a model with one parameter per matrix of an expert, under its name in files.

    Before each forward they are stacked, as the class's own code expects.
    """
    model.set_experts_implementation("eager")
    is_mixtral = type(model).__name__ == _MIXTRAL
    names = _MATRICES_OF_MIXTRAL if is_mixtral else _MATRICES
    for layer in model.model.layers:
        if not hasattr(layer.mlp, "experts"):
            continue
        _unstack(layer.mlp.experts, names)
        gate = layer.mlp.gate
        bias = gate._buffers.pop("e_score_correction_bias", None)
        if bias is not None:
            gate.e_score_correction_bias = nn.Parameter(bias)
        if is_mixtral:
            layer.add_module("block_sparse_moe", layer._modules.pop("mlp"))
            object.__setattr__(layer, "mlp", layer.block_sparse_moe)  # the forward uses this name
    module: nn.Module = model
    return module


def _unstack(experts: Any, names: Sequence[str]) -> None:
    """Give each expert its own three matrices under `names`, to be stacked before a forward."""
    gate_up = experts._parameters.pop("gate_up_proj")
    down = experts._parameters.pop("down_proj")
    for number in range(len(down)):
        expert = nn.Module()
        for name, value in zip(names, (*gate_up[number].chunk(2), down[number]), strict=True):
            projection = nn.Module()
            projection.weight = nn.Parameter(value.detach().clone())
            expert.add_module(name, projection)
        experts.add_module(str(number), expert)
    experts.register_forward_pre_hook(_stack)


def to_huggingface(config: Config, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return full tensors under their names in files, from those under our global names.

    Tensors are independent, so they may come one at a time. Neither side names a tied projection.
    """
    return {
        part.name: value[part.index]
        for name, value in weights.items()
        for part in parts(config, name, tuple(value.shape))
    }


def parts(config: Config, name: str, shape: tuple[int, ...]) -> tuple[Part, ...]:
    """Return the tensors in files that hold one of our parameters, of this shape."""
    names = llama.NAMES | _NAMES
    if _class_of(config) == _MIXTRAL:
        names |= _NAMES_OF_MIXTRAL
    if ".experts." not in name:
        return llama.parts_in(names, name, shape)
    matrices = []
    for index in product(*map(range, shape[:-2])):  # (expert,) or (expert, gate or up)
        expert, *half = index
        target = renamed(f"{name}[{half[0]}]" if half else name, names)
        matrices.append(Part(target.replace("*", str(expert)), shape[-2:], (0, 1), index))
    return tuple(matrices)


def _class_of(config: Config) -> str:
    if config.router == "sigmoid":
        return _DOTS1 if config.qk_norm and config.partial_rotary_factor == 1 else _GLM
    if not config.qk_norm:
        return _MIXTRAL
    return _OLMOE if config.qk_norm_over == "width" else _QWEN3


def _unlike(config: Config, chosen: str) -> Iterator[str]:
    """Yield the settings that a class of transformers does not have."""
    has_shared = chosen in (_DOTS1, _GLM)
    is_plain = chosen in (_MIXTRAL, _OLMOE)  # experts in every layer, without switches
    head_size = config.head_size
    if chosen == _OLMOE:
        head_size = config.hidden_size // config.num_attention_heads
    is_normed = config.norm_topk_prob
    if chosen == _MIXTRAL and not config.divides_weights:
        is_normed = True
    needed: dict[str, object] = {
        "attention_bias": config.attention_bias and chosen != _MIXTRAL,
        "attention_output_bias": config.attention_bias and chosen not in (_MIXTRAL, _GLM),
        "partial_rotary_factor": config.partial_rotary_factor if chosen == _GLM else 1.0,
        "qk_norm": config.qk_norm or chosen == _DOTS1,
        "qk_norm_over": "head" if has_shared else config.qk_norm_over,
        "norm_topk_prob": is_normed,
        "score_bias": has_shared,
        "n_shared_experts": max(1, config.n_shared_experts) if has_shared else 0,
        "n_group": config.n_group if has_shared else 1,
        "routed_scaling_factor": config.routed_scaling_factor if has_shared else 1.0,
        "decoder_sparse_step": config.decoder_sparse_step if chosen == _QWEN3 else 1,
        "first_k_dense_replace": 0 if is_plain else config.first_k_dense_replace,
        "head_size": head_size,
    }
    other_windows = llama.windows_unlike(config, chosen)
    if other_windows:
        yield other_windows
    for name, value in needed.items():
        own = getattr(config, name)
        if own != value:
            yield f"{name} = {json.dumps(own)}: {chosen} has {json.dumps(value)}"


def _stack(experts: Any, args: object) -> None:
    """Stack the experts' matrices, as the class's own code expects them."""
    gate_up: list[Tensor] = []
    down: list[Tensor] = []
    for number in range(experts.num_experts):
        gate, up, last = (p.weight for p in experts._modules[str(number)].children())
        gate_up.append(torch.cat((gate, up)))
        down.append(last)
    experts.gate_up_proj = torch.stack(gate_up)
    experts.down_proj = torch.stack(down)
