"""The family of experts in transformers: a reference model, and weights under its names in files.

Files have three matrices per expert, which transformers stacks in memory. The norms of queries and
keys and the router decide on the class (`_class_of`).
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import cycle, product
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
# Names in files, in the order of replacement, after those of llama.
_NAMES = {
    "mlp.router.score_bias": "mlp.gate.e_score_correction_bias",
    "mlp.router": "mlp.gate",
    "mlp.shared": "mlp.shared_experts",
}
_NAMES_OF_MIXTRAL = {"mlp": "block_sparse_moe", "gate_proj": "w1", "up_proj": "w3"}
_NAMES_OF_MIXTRAL["down_proj"] = "w2"


def architecture(config: Config, end_of_text: int | None = None, name: str | None = None) -> Any:
    """Return the transformers config of the same architecture; its `architectures` names the class.

    - end_of_text: the id of the token between documents.
    - name: the requested class.

    Raises ValueError if no class of transformers has this architecture, or not the requested one.
    """
    chosen = class_named(name, _class_of(config))
    if problems := list(_unlike(config, chosen)):
        raise ValueError("; ".join(problems))
    own: dict[str, dict[str, object]] = {
        _MIXTRAL: {"intermediate_size": config.expert_size},
        _OLMOE: {"intermediate_size": config.expert_size},
        _QWEN3: {
            "decoder_sparse_step": config.decoder_sparse_step,
            "mlp_only_layers": [*range(config.first_k_dense_replace)],
        },
        _GLM: {
            "use_qk_norm": config.qk_norm,
            "num_mtp_layers": 0,
            "rope_parameters": llama.rope_of(config)
            | {"partial_rotary_factor": config.partial_rotary_factor},
        },
        _DOTS1: {
            "first_k_dense_replace": config.first_k_dense_replace,
            "n_shared_experts": config.n_shared_experts,
            "routed_scaling_factor": config.routed_scaling_factor,
            "n_group": config.n_group,
            "topk_group": config.topk_group,
        },
    }
    own[_GLM] |= own[_DOTS1]
    if chosen in (_QWEN3, _DOTS1, _GLM):
        own[chosen]["moe_intermediate_size"] = config.expert_size
    if chosen != _MIXTRAL:
        own[chosen]["attention_bias"] = config.attention_bias
        own[chosen]["norm_topk_prob"] = _is_normed(config)
    settings = llama.settings_of(config, chosen, end_of_text, **own[chosen])
    settings.num_local_experts = config.num_experts
    settings.num_experts_per_tok = config.num_experts_per_tok
    return settings


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
    for layer in model.model.layers:
        if not hasattr(layer.mlp, "experts"):
            continue
        experts = layer.mlp.experts
        gate = layer.mlp.gate
        gate_up, down = (experts._parameters.pop(f"{name}_proj") for name in ("gate_up", "down"))
        for number in range(len(down)):
            matrices = (*gate_up[number].chunk(2), down[number])
            each = nn.Module()
            for name, value in zip(("gate_proj", "up_proj", "down_proj"), matrices, strict=True):
                projection = nn.Module()
                projection.weight = nn.Parameter(value.detach().clone())
                each.add_module(_NAMES_OF_MIXTRAL[name] if is_mixtral else name, projection)
            experts.add_module(str(number), each)
        experts.register_forward_pre_hook(_stack)
        if (bias := gate._buffers.pop("e_score_correction_bias", None)) is not None:
            gate.e_score_correction_bias = nn.Parameter(bias)
        if is_mixtral:
            layer.add_module("block_sparse_moe", layer._modules.pop("mlp"))
            object.__setattr__(layer, "mlp", layer.block_sparse_moe)  # its forward uses this name
    module: nn.Module = model
    return module


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
    found = llama.parts(config, name, shape)
    if ".experts." in name:
        path, *_ = found[0].name.rpartition(".")
        projections = ("down_proj",) if name.endswith("down") else ("gate_proj", "up_proj")
        indices = product(*map(range, shape[:-2]))  # [expert] or [expert, gate or up]
        found = tuple(
            Part(f"{path}.{index[0]}.{projection}.weight", shape[-2:], (0, 1), index)
            for index, projection in zip(indices, cycle(projections), strict=False)
        )
    names = _NAMES | (_NAMES_OF_MIXTRAL if _class_of(config) == _MIXTRAL else {})
    return tuple(replace(part, name=renamed(part.name, names)) for part in found)


def _class_of(config: Config) -> str:
    if config.router == "sigmoid":
        return _DOTS1 if config.qk_norm and config.partial_rotary_factor == 1 else _GLM
    if not config.qk_norm:
        return _MIXTRAL
    return _OLMOE if config.qk_norm_over == "width" else _QWEN3


def _is_normed(config: Config) -> bool:
    """True if the weights of a token's experts have the sum 1."""
    return config.norm_topk_prob or config.router == "topk_softmax"


def _unlike(config: Config, chosen: str) -> Iterator[str]:
    """Yield the settings that a class of transformers does not have."""
    own = config
    has_shared = chosen in (_DOTS1, _GLM)
    is_plain = chosen in (_MIXTRAL, _OLMOE)  # experts in every layer, without switches
    needed: dict[str, object] = {
        "no_rope_layer_interval": None,
        "attention_sinks": False,
        "attention_bias": own.attention_bias and chosen != _MIXTRAL,
        "attention_output_bias": own.attention_bias and chosen not in (_MIXTRAL, _GLM),
        "partial_rotary_factor": own.partial_rotary_factor if chosen == _GLM else 1.0,
        "qk_norm": own.qk_norm or chosen == _DOTS1,
        "qk_norm_over": "head" if has_shared else own.qk_norm_over,
        "norm_topk_prob": own.norm_topk_prob or (chosen == _MIXTRAL and not _is_normed(own)),
        "score_bias": has_shared,
        "n_shared_experts": max(1, own.n_shared_experts) if has_shared else 0,
        "n_group": own.n_group if has_shared else 1,
        "routed_scaling_factor": own.routed_scaling_factor if has_shared else 1.0,
        "decoder_sparse_step": own.decoder_sparse_step if chosen == _QWEN3 else 1,
        "first_k_dense_replace": 0 if is_plain else own.first_k_dense_replace,
        "head_size": own.hidden_size // own.num_attention_heads
        if chosen == _OLMOE
        else own.head_size,
    }
    if unlike := llama.windows_unlike(own, chosen):
        yield unlike
    for name, value in needed.items():
        if getattr(own, name) != value:
            yield f"{name} = {json.dumps(getattr(own, name))}: {chosen} has {json.dumps(value)}"


def _stack(experts: Any, args: object) -> None:
    matrices: dict[str, list[Tensor]] = {}
    for number in range(experts.num_experts):
        gate, up, down = (p.weight for p in experts._modules[str(number)].children())
        matrices.setdefault("gate_up_proj", []).append(torch.cat((gate, up)))
        matrices.setdefault("down_proj", []).append(down)
    for name, each in matrices.items():
        setattr(experts, name, torch.stack(each))
