"""The GPT-NeoX family in transformers: a reference model, and weights under the names in its files.

`GPTNeoXForCausalLM` keeps query, key and value of one head together: [heads x 3 x size, hidden].
In its files the output projection is embed_out, which newer versions call lm_head in memory.
"""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from parallel3d.models.common import class_named, renamed
from parallel3d.models.llama.huggingface import built
from parallel3d.models.neox.spec import Config
from parallel3d.models.pretrained import Part

# Our names and those of transformers; "*" is the number of a block.
_NAMES = {
    "embedding.token.weight": "gpt_neox.embed_in.weight",
    "blocks.*.norm1.weight": "gpt_neox.layers.*.input_layernorm.weight",
    "blocks.*.norm1.bias": "gpt_neox.layers.*.input_layernorm.bias",
    "blocks.*.attention.qkv.weight": "gpt_neox.layers.*.attention.query_key_value.weight",
    "blocks.*.attention.qkv.bias": "gpt_neox.layers.*.attention.query_key_value.bias",
    "blocks.*.attention.output.weight": "gpt_neox.layers.*.attention.dense.weight",
    "blocks.*.attention.output.bias": "gpt_neox.layers.*.attention.dense.bias",
    "blocks.*.norm2.weight": "gpt_neox.layers.*.post_attention_layernorm.weight",
    "blocks.*.norm2.bias": "gpt_neox.layers.*.post_attention_layernorm.bias",
    "blocks.*.mlp.up.weight": "gpt_neox.layers.*.mlp.dense_h_to_4h.weight",
    "blocks.*.mlp.up.bias": "gpt_neox.layers.*.mlp.dense_h_to_4h.bias",
    "blocks.*.mlp.down.weight": "gpt_neox.layers.*.mlp.dense_4h_to_h.weight",
    "blocks.*.mlp.down.bias": "gpt_neox.layers.*.mlp.dense_4h_to_h.bias",
    "head.norm.weight": "gpt_neox.final_layer_norm.weight",
    "head.norm.bias": "gpt_neox.final_layer_norm.bias",
    "head.output.weight": "embed_out.weight",
}

# Folders of the model without its head omit this prefix.
PREFIX = "gpt_neox."
# Names of tensors in memory in newer versions, and target names in files.
OTHER_NAMES = {"lm_head.weight": "embed_out.weight"}
# Masks and frequencies that old versions of transformers saved with the weights.
BUFFERS = re.compile(r"layers\.\d+\.attention\.((masked_)?bias|rotary_emb\.inv_freq)")


def architecture(config: Config, end_of_text: int | None = None, name: str | None = None) -> Any:
    """Return the `GPTNeoXConfig` of the same architecture; its `architectures` names the class.

    - `end_of_text`: the id of the token between documents.
    - `name`: the class that is requested; ValueError if this architecture is not of that class.
    """
    from transformers import GPTNeoXConfig

    return GPTNeoXConfig(
        architectures=[class_named(name, "GPTNeoXForCausalLM")],
        vocab_size=int(config.vocab_size),
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        intermediate_size=config.inner_size,
        hidden_act=config.activation,
        max_position_embeddings=config.max_position_embeddings,
        layer_norm_eps=config.layer_norm_eps,
        initializer_range=config.initializer_range,
        use_parallel_residual=config.use_parallel_residual,
        tie_word_embeddings=config.tie_word_embeddings,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": config.rotary_emb_base,
            "partial_rotary_factor": config.rotary_pct,
        },
        attention_bias=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bos_token_id=end_of_text,
        eos_token_id=end_of_text,
    )


def reference(config: Config) -> nn.Module:
    """Return a `GPTNeoXForCausalLM` of the same architecture, in fp32, randomly initialised.

    Its parameters have the names that they have in files.
    """
    return named_as_in_files(built(architecture(config)))


def named_as_in_files(model: nn.Module) -> nn.Module:
    """Return a `GPTNeoXForCausalLM` with its parameters renamed as in its files."""
    if "lm_head" in model._modules:
        model.add_module("embed_out", model._modules.pop("lm_head"))
        object.__setattr__(model, "lm_head", model.embed_out)  # the forward uses this name
    return model


def to_huggingface(config: Config, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return full tensors under target transformers names, from those under our global names.

    Tensors are independent, so they may come one at a time. Neither side names a tied projection.
    """
    heads = config.num_attention_heads
    renamed_weights = {}
    for name, value in weights.items():
        if "qkv" in name:  # [3, heads x size, ...] -> [heads x 3 x size, ...]
            value = value.unflatten(1, (heads, -1)).transpose(0, 1).flatten(0, 2)
        renamed_weights[renamed(name, _NAMES)] = value
    return renamed_weights


def parts(config: Config, name: str, shape: tuple[int, ...]) -> tuple[Part, ...]:
    """Return the tensors of transformers that hold one of our parameters, of this shape."""
    target = renamed(name, _NAMES)
    if "qkv" in name:  # [3, heads x size, ...] of [heads x 3 x size, ...]
        three, _, *rest = shape
        dims = (config.num_attention_heads, three, config.head_size, *rest)
        return (Part(target, dims, (1, 0, *range(2, len(dims)))),)
    return (Part(target, shape, tuple(range(len(shape)))),)
