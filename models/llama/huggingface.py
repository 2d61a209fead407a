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

_POST_NORMS = {"norm1": "post_attention_layernorm", "norm2": "post_feedforward_layernorm"}
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
    ("qk_norm", "qk_norm_over", "post_norm"): ("Olmo2ForCausalLM",),
    (*_ATTENTION, "qk_norm", "qk_norm_over", "post_norm"): ("Olmo2ForCausalLM",),
    ("no_rope_layer_interval",): ("SmolLM3ForCausalLM",),
}
_CLASSES |= {
    (*attention, *mlp, *rope, "attention_sinks"): ("GraniteSWAForCausalLM",)
    for attention, mlp, rope in product(
        ((), _ATTENTION), ((), ("mlp_bias",)), ((), ("no_rope_layer_interval",))
    )
}
# Classes with a window in layers of choice, and in every layer or in none.
_BY_LAYER = {
    f"{name}ForCausalLM"
    for name in ("Ministral", "Qwen2", "Qwen3", "SmolLM3", "GraniteSWA", "Dots1")
}
_UNIFORM = {f"{name}ForCausalLM" for name in ("Mistral", "Mixtral", "Qwen3Moe")}
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
    names = [*_ATTENTION, "mlp_bias", "qk_norm", "qk_norm_over", "post_norm"]
    names += ["no_rope_layer_interval", "attention_sinks"]
    switches = tuple(n for n in names if getattr(config, n) not in (None, False, "head"))
    switches += ("partial_rotary_factor",) * (config.partial_rotary_factor < 1)
    possible = [n for n in _CLASSES.get(switches, ()) if not windows_unlike(config, n)]
    if not possible:
        turned = (*switches, *["sliding_window"] * (config.sliding_window is not None))
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
    biases: dict[str, object] = {"attention_bias": config.attention_output_bias}
    rotates = [config.rotates(number) for number in range(config.num_hidden_layers)]
    own: dict[str, dict[str, object]] = {
        "LlamaForCausalLM": {**biases, "mlp_bias": config.mlp_bias},
        "Qwen3ForCausalLM": biases,
        "Olmo2ForCausalLM": biases,
        "SmolLM3ForCausalLM": {
            "no_rope_layer_interval": config.no_rope_layer_interval,
            "no_rope_layers": [*map(int, rotates)],
        },
        "GraniteSWAForCausalLM": {
            **biases,
            "mlp_bias": config.mlp_bias,
            "attention_multiplier": config.head_size**-0.5,
            "layer_rope_theta": [config.rope_theta * turns for turns in rotates],
        },
    }
    return settings_of(config, chosen, end_of_text, **own.get(chosen, {}))


def settings_of(config: Config, chosen: str, end_of_text: int | None, **own: object) -> Any:
    """Return the transformers config of a class: what all classes have, and the class's own."""
    import transformers

    kind = getattr(transformers, chosen.replace("ForCausalLM", "Config"))
    shared = dict(
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
        rope_parameters=rope_of(config),
        initializer_range=config.initializer_range,
        tie_word_embeddings=config.tie_word_embeddings,
        hidden_act="silu",
        attention_dropout=config.attn_pdrop,
        bos_token_id=end_of_text,
        eos_token_id=end_of_text,
        pad_token_id=None,
    )
    return kind(**shared | _sliding(config, chosen) | own)


def windows_unlike(config: Config, name: str) -> str:
    """Return how a class's windows differ from the model's; "" if it can have them."""
    windows = {config.window(number) for number in range(config.num_hidden_layers)}
    if name in _BY_LAYER or windows == {None} or (name in _UNIFORM and len(windows) == 1):
        return ""
    where = "the same in every layer" if name in _UNIFORM else "none"
    return f"sliding_window = {config.sliding_window}: {name} has {where}"


def _sliding(config: Config, name: str) -> dict[str, object]:
    """Return the fields of a class for windows; one without a switch ignores the switch."""
    windows = [config.window(number) for number in range(config.num_hidden_layers)]
    unused = 128 if name == "GraniteSWAForCausalLM" else None  # it needs a window for no layer
    if name not in (*_BY_LAYER, *_UNIFORM):
        return {}
    fields: dict[str, object] = {"use_sliding_window": any(windows)}
    if name in _UNIFORM:
        return fields | {"sliding_window": windows[0]}
    types = ["full_attention" if window is None else "sliding_attention" for window in windows]
    return fields | {"sliding_window": config.sliding_window or unused, "layer_types": types}


def reference(config: Config) -> nn.Module:
    """Return a transformers model of the same architecture, in fp32, randomly initialised.

    Raises ValueError as `architecture` does.
    """
    return built(architecture(config))


def built(settings: Any) -> nn.Module:
    """Return the model of a transformers config in fp32, randomly initialised."""
    import transformers

    settings._attn_implementation = settings._experts_implementation = "eager"
    model: nn.Module = getattr(transformers, settings.architectures[0])(settings).float()
    return model


def to_huggingface(config: Config, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return full tensors under target transformers names, from those under our global names.

    Tensors are independent, so they may come one at a time. Neither side names a tied projection.
    """
    return {
        part.name: value[part.index]
        for name, value in weights.items()
        for part in parts(config, name, tuple(value.shape))
    }


def parts(config: Config, name: str, shape: tuple[int, ...]) -> tuple[Part, ...]:
    """Return the tensors of transformers that hold one of our parameters, of this shape."""
    names = _NAMES | (_POST_NORMS if config.post_norm else {})
    target = renamed(name, names)
    order = tuple(range(len(shape)))
    if "gate_up" in name:
        both = (target.replace("gate_up", part) for part in ("gate_proj", "up_proj"))
        return tuple(Part(t, shape[1:], order[:-1], (index,)) for index, t in enumerate(both))
    return (Part(target, shape, order),)


def rope_of(config: Config) -> dict[str, object]:
    scaling = config.rope_scaling
    if scaling is None:
        return {"rope_type": "default", "rope_theta": config.rope_theta}
    entries = {name: x for name, x in scaling.model_dump().items() if x is not None}
    return {"rope_theta": config.rope_theta} | entries
