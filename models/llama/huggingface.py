"""The Llama family in transformers: a reference model, and weights under its names.

The biases and norms of a config decide on the class (`_classes_with_switches`).
"""

import json
import re
from collections.abc import Mapping
from itertools import combinations
from typing import Any

from torch import Tensor, nn

from parallel3d.models.common import class_named, renamed
from parallel3d.models.llama.spec import Config
from parallel3d.models.pretrained import Part

NAMES = {
    "embedding.token.weight": "model.embed_tokens.weight",
    "blocks.*.norm1.weight": "model.layers.*.input_layernorm.weight",
    "blocks.*.attention.qkv.q_weight": "model.layers.*.self_attn.q_proj.weight",
    "blocks.*.attention.qkv.k_weight": "model.layers.*.self_attn.k_proj.weight",
    "blocks.*.attention.qkv.v_weight": "model.layers.*.self_attn.v_proj.weight",
    "blocks.*.attention.qkv.q_bias": "model.layers.*.self_attn.q_proj.bias",
    "blocks.*.attention.qkv.k_bias": "model.layers.*.self_attn.k_proj.bias",
    "blocks.*.attention.qkv.v_bias": "model.layers.*.self_attn.v_proj.bias",
    "blocks.*.attention.q_norm.weight": "model.layers.*.self_attn.q_norm.weight",
    "blocks.*.attention.k_norm.weight": "model.layers.*.self_attn.k_norm.weight",
    "blocks.*.attention.output.weight": "model.layers.*.self_attn.o_proj.weight",
    "blocks.*.attention.output.bias": "model.layers.*.self_attn.o_proj.bias",
    "blocks.*.norm2.weight": "model.layers.*.post_attention_layernorm.weight",
    "blocks.*.mlp.gate_up.weight[0]": "model.layers.*.mlp.gate_proj.weight",
    "blocks.*.mlp.gate_up.weight[1]": "model.layers.*.mlp.up_proj.weight",
    "blocks.*.mlp.gate_up.bias[0]": "model.layers.*.mlp.gate_proj.bias",
    "blocks.*.mlp.gate_up.bias[1]": "model.layers.*.mlp.up_proj.bias",
    "blocks.*.mlp.down.weight": "model.layers.*.mlp.down_proj.weight",
    "blocks.*.mlp.down.bias": "model.layers.*.mlp.down_proj.bias",
    "head.norm.weight": "model.norm.weight",
    "head.output.weight": "lm_head.weight",
}
"""Our names and those of transformers; "*" is the number of a block. A stacked parameter has one
name for each index of its first dim."""
_SWITCHES = ("attention_bias", "attention_output_bias", "mlp_bias", "qk_norm")
# Classes with a window in layers of choice, and in every layer or in none.
_BY_LAYER = (
    "MinistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Dots1ForCausalLM",
)
_UNIFORM = ("MistralForCausalLM", "MixtralForCausalLM", "Qwen3MoeForCausalLM")
# Folders of the model without its head omit this prefix.
PREFIX = "model."
# Frequencies that old versions of transformers saved with the weights.
BUFFERS = re.compile(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


def architecture(config: Config, end_of_text: int | None = None, name: str | None = None) -> Any:
    """Return the transformers config of the same architecture; its `architectures` names the class.

    - `end_of_text`: the id of the token between documents.
    - `name`: the requested class, if several are possible.

    Raises ValueError if no class of transformers has this architecture, or not the requested one.
    """
    chosen = class_named(name, *_possible_classes(config))
    if chosen == "LlamaForCausalLM" and config.hidden_size % config.num_attention_heads:
        raise ValueError(
            f"num_attention_heads = {config.num_attention_heads}: does not divide hidden_size="
            f"{config.hidden_size}, which LlamaForCausalLM requires; Qwen3ForCausalLM "
            "(qk_norm = true) does not"
        )
    return settings_of(config, chosen, end_of_text, **_own_settings(config, chosen))


def _possible_classes(config: Config) -> list[str]:
    """Return the classes of transformers with this architecture, the default first.

    Raises ValueError if there is none.
    """
    names = _classes_like(config)
    if names:
        return names
    on = {name: getattr(config, name) for name in (*_SWITCHES, "sliding_window")}
    on = {name: value for name, value in on.items() if value}
    texts = [f"{name} = {json.dumps(value)}" for name, value in on.items()]
    raise ValueError(
        f"{' with '.join(texts)}: no class of transformers has exactly these switches; train "
        f"without {', or without '.join(_fewest_to_turn_off(config, tuple(on)))}"
    )


def _fewest_to_turn_off(config: Config, on: tuple[str, ...]) -> list[str]:
    """Return the switches without which a class is like the config: each of the fewest, in words.

    - `on`: the switches that are on; without all of them LlamaForCausalLM is.
    """
    found = []
    for count in range(1, len(on) + 1):
        for names in combinations(on, count):
            changes: dict[str, object] = dict.fromkeys(names, False)
            if "sliding_window" in names:
                changes |= {"sliding_window": None, "layer_types": None}
            if _classes_like(config.model_copy(update=changes)):
                found.append(" and ".join(names))
        if found:
            break
    return found


def _classes_like(config: Config) -> list[str]:
    """Return the classes of transformers with the biases, norms and windows of a config."""
    return [name for name in _classes_with_switches(config) if not windows_unlike(config, name)]


def _classes_with_switches(config: Config) -> tuple[str, ...]:
    """Return the classes with exactly the biases and norms of a config."""
    has_biases = config.attention_bias or config.attention_output_bias
    biases_are_alike = config.attention_bias == config.attention_output_bias
    if config.attention_bias and not config.attention_output_bias:
        return () if config.qk_norm or config.mlp_bias else ("Qwen2ForCausalLM",)
    if not biases_are_alike:
        return ()
    if config.qk_norm:
        return () if config.mlp_bias else ("Qwen3ForCausalLM",)
    if has_biases or config.mlp_bias:
        return ("LlamaForCausalLM",)
    return ("LlamaForCausalLM", "MistralForCausalLM", "MinistralForCausalLM")


def _own_settings(config: Config, chosen: str) -> dict[str, object]:
    """Return the settings that a class has besides those of all classes."""
    biases: dict[str, object] = {"attention_bias": config.attention_output_bias}
    if chosen == "Qwen3ForCausalLM":
        return biases
    if chosen == "LlamaForCausalLM":
        return biases | {"mlp_bias": config.mlp_bias}
    return {}


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
    if name not in (*_BY_LAYER, *_UNIFORM):
        return {}
    fields: dict[str, object] = {"use_sliding_window": any(windows)}
    if name in _UNIFORM:
        return fields | {"sliding_window": windows[0]}
    types = ["full_attention" if window is None else "sliding_attention" for window in windows]
    return fields | {"sliding_window": config.sliding_window, "layer_types": types}


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
    return parts_in(NAMES, name, shape)


def parts_in(names: Mapping[str, str], name: str, shape: tuple[int, ...]) -> tuple[Part, ...]:
    """Return the tensors that hold a parameter, by a table of names."""
    order = tuple(range(len(shape)))
    if "gate_up" not in name:
        return (Part(renamed(name, names), shape, order),)
    gate = Part(renamed(f"{name}[0]", names), shape[1:], order[:-1], (0,))
    up = Part(renamed(f"{name}[1]", names), shape[1:], order[:-1], (1,))
    return gate, up


def rope_of(config: Config) -> dict[str, object]:
    """Return the rotation of a config, as transformers has it."""
    scaling = config.rope_scaling
    if scaling is None:
        return {"rope_type": "default", "rope_theta": config.rope_theta}
    entries = {name: x for name, x in scaling.model_dump().items() if x is not None}
    return {"rope_theta": config.rope_theta} | entries
