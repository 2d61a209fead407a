"""The Llama family in transformers: a reference model, and weights under its names.

`_CLASSES` lists the classes by the biases and norms of a config.
"""

import json
import re
from collections.abc import Mapping
from itertools import product
from typing import Any

from torch import Tensor, nn

from parallel3d.models.common import class_named, renamed
from parallel3d.models.llama.spec import Config
from parallel3d.models.pretrained import Part

# Our names and those of transformers, in the order of replacement.
_NAMES = {
    "embedding.token": "model.embed_tokens",
    "head.norm": "model.norm",
    "head.output": "lm_head",
    "blocks": "model.layers",
    "attention.qkv.": "self_attn.",
    "attention.output": "self_attn.o_proj",
    "attention.core": "self_attn",
    "attention": "self_attn",
    "q_weight": "q_proj.weight",
    "k_weight": "k_proj.weight",
    "v_weight": "v_proj.weight",
    "q_bias": "q_proj.bias",
    "k_bias": "k_proj.bias",
    "v_bias": "v_proj.bias",
    "down": "down_proj",
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
}

_ATTENTION = ("attention_bias", "attention_output_bias")
# The possible classes of a config with these switches on; the first is the default.
_CLASSES = {
    (): ("LlamaForCausalLM", "MistralForCausalLM", "MinistralForCausalLM"),
    ("mlp_bias",): ("LlamaForCausalLM",),
    _ATTENTION: ("LlamaForCausalLM",),
    (*_ATTENTION, "mlp_bias"): ("LlamaForCausalLM",),
    ("attention_bias",): ("Qwen2ForCausalLM",),
    ("qk_norm",): ("Qwen3ForCausalLM",),
    (*_ATTENTION, "qk_norm"): ("Qwen3ForCausalLM",),
    ("no_rope_layer_interval",): ("SmolLM3ForCausalLM",),
}
_CLASSES |= {
    (*attention, *mlp, *rope, "attention_sinks"): ("GraniteSWAForCausalLM",)
    for attention, mlp, rope in product(
        ((), _ATTENTION), ((), ("mlp_bias",)), ((), ("no_rope_layer_interval",))
    )
}
# Folders of the model without its head omit this prefix.
PREFIX = "model."
# Frequencies that old versions of transformers saved with the weights.
BUFFERS = re.compile(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


def architecture(config: Config, end_of_text: int | None = None, name: str | None = None) -> Any:
    """Return the transformers config of the same architecture; its `architectures` names the class.

    - end_of_text: the id of the token between documents.
    - name: the requested class, if several are possible.

    Raises ValueError if no class of transformers has this architecture, or not the requested one.
    """
    import transformers

    names = (*_ATTENTION, "mlp_bias", "qk_norm", "no_rope_layer_interval", "attention_sinks")
    switches = tuple(n for n in names if getattr(config, n))
    numbers = range(config.num_hidden_layers)
    windows = [config.window(number) for number in numbers]
    unfit = {"LlamaForCausalLM"} if any(windows) else set()
    if len({*windows}) > 1:
        unfit.add("MistralForCausalLM")
    possible = [n for n in _CLASSES.get(switches, ()) if n not in unfit]
    if not possible:
        turned = (*switches, *["sliding_window"] * any(windows))
        texts = (f"{n} = {json.dumps(getattr(config, n))}" for n in turned)
        raise ValueError(
            f"{' with '.join(texts)}: no class of transformers has exactly these switches; turn "
            "one of them off, or set attention_bias and attention_output_bias alike"
        )
    chosen = class_named(name, *possible)
    if chosen == "LlamaForCausalLM" and config.hidden_size % config.num_attention_heads:
        raise ValueError(
            f"num_attention_heads = {config.num_attention_heads}: does not divide hidden_size="
            f"{config.hidden_size}, which LlamaForCausalLM requires; Qwen3ForCausalLM "
            "(qk_norm = true) does not"
        )
    kind = getattr(transformers, chosen.replace("ForCausalLM", "Config"))
    biases = {"attention_bias": config.attention_output_bias}
    types = ["full_attention" if window is None else "sliding_attention" for window in windows]
    sliding = {"sliding_window": config.sliding_window, "layer_types": types}
    switched = sliding | {"use_sliding_window": any(windows)}
    rotates = [config.rotates(number) for number in numbers]
    own: dict[str, dict[str, object]] = {
        "LlamaForCausalLM": {**biases, "mlp_bias": config.mlp_bias},
        "MistralForCausalLM": {"sliding_window": windows[0]},
        "MinistralForCausalLM": sliding,
        "Qwen2ForCausalLM": switched,
        "Qwen3ForCausalLM": {**biases, **switched},
        "SmolLM3ForCausalLM": {
            "no_rope_layer_interval": config.no_rope_layer_interval,
            "no_rope_layers": [*map(int, rotates)],
            **switched,
        },
        "GraniteSWAForCausalLM": {
            **biases,
            "mlp_bias": config.mlp_bias,
            "attention_multiplier": config.head_size**-0.5,
            "layer_rope_theta": [config.rope_theta * turns for turns in rotates],
            **sliding,
            "sliding_window": config.sliding_window or 128,  # it needs one, even if no layer has it
        },
    }
    return kind(
        architectures=[chosen],
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_size,
        intermediate_size=config.inner_size,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters=_rope(config),
        initializer_range=config.initializer_range,
        tie_word_embeddings=config.tie_word_embeddings,
        hidden_act="silu",
        attention_dropout=config.attn_pdrop,
        bos_token_id=end_of_text,
        eos_token_id=end_of_text,
        pad_token_id=None,
        **own.get(chosen, {}),
    )


def reference(config: Config) -> nn.Module:
    """Return a transformers model of the same architecture, in fp32, randomly initialised.

    Raises ValueError as `architecture` does.
    """
    import transformers

    settings = architecture(config)
    settings._attn_implementation = "eager"
    model: nn.Module = getattr(transformers, settings.architectures[0])(settings).float()
    return model


def to_huggingface(config: Config, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return full tensors under target transformers names, from those under our global names.

    Tensors are independent, so they may come one at a time. Neither side names a tied projection.
    """
    renamed_weights: dict[str, Tensor] = {}
    for name, value in weights.items():
        if "gate_up" in name:
            for part, target in zip(value, _gate_and_up(name), strict=True):
                renamed_weights[target] = part
        else:
            renamed_weights[renamed(name, _NAMES)] = value
    return renamed_weights


def parts(config: Config, name: str, shape: tuple[int, ...]) -> tuple[Part, ...]:
    """Return the tensors of transformers that hold one of our parameters, of this shape."""
    if "gate_up" in name:
        both, order = enumerate(_gate_and_up(name)), tuple(range(len(shape) - 1))
        return tuple(Part(target, shape[1:], order, index) for index, target in both)
    return (Part(renamed(name, _NAMES), shape, tuple(range(len(shape)))),)


def _gate_and_up(name: str) -> tuple[str, str]:
    target = renamed(name, _NAMES)
    return target.replace("gate_up", "gate_proj"), target.replace("gate_up", "up_proj")


def _rope(config: Config) -> dict[str, object]:
    scaling = config.rope_scaling
    if scaling is None:
        return {"rope_type": "default", "rope_theta": config.rope_theta}
    entries = {name: x for name, x in scaling.model_dump().items() if x is not None}
    return {"rope_theta": config.rope_theta} | entries
