"""The Llama family in transformers: a reference model, and weights by the names that it gives them.

Without biases and norms on the heads a config is a `LlamaForCausalLM`, or a `MistralForCausalLM`
where that is asked for; with the biases a `Qwen2ForCausalLM`, with the norms a `Qwen3ForCausalLM`.
"""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from parallel3d.models.common import class_named, renamed
from parallel3d.models.llama.spec import Config
from parallel3d.models.pretrained import Part

# Ours to theirs, in the order in which they are replaced.
_NAMES = {
    "embedding.token": "model.embed_tokens",
    "head.norm": "model.norm",
    "head.output": "lm_head",
    "blocks": "model.layers",
    "attention.qkv.": "self_attn.",
    "attention.output": "self_attn.o_proj",
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

# A folder of the model without its head has the names without it.
PREFIX = "model."
# Frequencies that old versions saved with the weights.
BUFFERS = re.compile(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


def architecture(config: Config, end_of_text: int | None = None, name: str | None = None) -> Any:
    """The config in transformers of the same architecture; its `architectures` names the class.

    `end_of_text`: the id that comes before and after each document. `name`: the class that is
    wanted where several would do. Raises ValueError for a config that no class of transformers can
    be, and for a name that it is not.
    """
    from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

    if config.attention_bias and config.qk_norm:
        raise ValueError(
            "attention_bias = true with qk_norm = true: no class of transformers has biases on "
            "query, key and value alone beside norms on the heads; turn one of the two off"
        )
    kind: Any = LlamaConfig
    if config.qk_norm:
        kind, chosen = Qwen3Config, class_named(name, "Qwen3ForCausalLM")
    elif config.attention_bias:
        kind, chosen = Qwen2Config, class_named(name, "Qwen2ForCausalLM")
    else:
        chosen = class_named(name, "LlamaForCausalLM", "MistralForCausalLM")
        if chosen == "MistralForCausalLM":
            kind = MistralConfig
        elif config.hidden_size % config.num_attention_heads:
            raise ValueError(
                f"num_attention_heads = {config.num_attention_heads}: does not divide hidden_size="
                f"{config.hidden_size}, which LlamaForCausalLM demands; qk_norm = true has no such "
                "rule"
            )
    window = {"sliding_window": None} if kind is MistralConfig else {}
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
        attention_dropout=0.0,
        bos_token_id=end_of_text,
        eos_token_id=end_of_text,
        pad_token_id=None,
        **window,
    )


def reference(config: Config) -> Any:
    """A model of transformers with the same architecture, in fp32 and with weights of its own.

    Raises ValueError as `architecture` does.
    """
    import transformers

    settings = architecture(config)
    settings._attn_implementation = "eager"
    model: Any = getattr(transformers, settings.architectures[0])
    return model(settings).float()


def to_huggingface(config: Config, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors under our global names -> the same under those of transformers.

    Each by itself: they may come one at a time. A tied output projection is named in neither.
    """
    found: dict[str, Tensor] = {}
    for name, value in weights.items():
        if name.endswith("gate_up.weight"):
            for part, their in zip(value, _gate_and_up(name), strict=True):
                found[their] = part
        else:
            found[renamed(name, _NAMES)] = value
    return found


def parts(config: Config, name: str, shape: tuple[int, ...]) -> tuple[Part, ...]:
    """Where transformers keeps one of our parameters, of this shape."""
    if name.endswith("gate_up.weight"):
        both = enumerate(_gate_and_up(name))
        return tuple(Part(their, shape[1:], (0, 1), index) for index, their in both)
    return (Part(renamed(name, _NAMES), shape, tuple(range(len(shape)))),)


def _gate_and_up(name: str) -> tuple[str, str]:
    their = renamed(name, _NAMES)
    return their.replace("gate_up", "gate_proj"), their.replace("gate_up", "up_proj")


def _rope(config: Config) -> dict[str, Any]:
    scaling = config.rope_scaling
    if scaling is None:
        return {"rope_type": "default", "rope_theta": config.rope_theta}
    return {"rope_theta": config.rope_theta} | scaling.model_dump()
