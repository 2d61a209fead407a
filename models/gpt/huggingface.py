"""The GPT-2 family in transformers: a reference model, and weights under its names.

`GPT2LMHeadModel` keeps its linear weights as [in, out], and query, key and value as one.
"""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from parallel3d.models.common import class_named, renamed
from parallel3d.models.gpt.spec import Config
from parallel3d.models.llama.huggingface import built
from parallel3d.models.pretrained import Part

# Our names and those of transformers; "*" is the number of a block.
_NAMES = {
    "embedding.token.weight": "transformer.wte.weight",
    "embedding.position.weight": "transformer.wpe.weight",
    "blocks.*.norm1.weight": "transformer.h.*.ln_1.weight",
    "blocks.*.norm1.bias": "transformer.h.*.ln_1.bias",
    "blocks.*.attention.qkv.weight": "transformer.h.*.attn.c_attn.weight",
    "blocks.*.attention.qkv.bias": "transformer.h.*.attn.c_attn.bias",
    "blocks.*.attention.output.weight": "transformer.h.*.attn.c_proj.weight",
    "blocks.*.attention.output.bias": "transformer.h.*.attn.c_proj.bias",
    "blocks.*.norm2.weight": "transformer.h.*.ln_2.weight",
    "blocks.*.norm2.bias": "transformer.h.*.ln_2.bias",
    "blocks.*.mlp.up.weight": "transformer.h.*.mlp.c_fc.weight",
    "blocks.*.mlp.up.bias": "transformer.h.*.mlp.c_fc.bias",
    "blocks.*.mlp.down.weight": "transformer.h.*.mlp.c_proj.weight",
    "blocks.*.mlp.down.bias": "transformer.h.*.mlp.c_proj.bias",
    "head.norm.weight": "transformer.ln_f.weight",
    "head.norm.bias": "transformer.ln_f.bias",
    "head.output.weight": "lm_head.weight",
}

# Folders of the model without its head omit this prefix.
PREFIX = "transformer."
# Masks that old versions of transformers saved with the weights.
BUFFERS = re.compile(r"h\.\d+\.attn\.(masked_)?bias")


def architecture(config: Config, end_of_text: int | None = None, name: str | None = None) -> Any:
    """Return the `GPT2Config` of the same architecture; its `architectures` names the class.

    - `end_of_text`: the id of the token between documents.
    - `name`: the class that is requested; ValueError if this architecture is not of that class.
    """
    from transformers import GPT2Config

    return GPT2Config(
        architectures=[class_named(name, "GPT2LMHeadModel")],
        vocab_size=int(config.vocab_size),
        n_positions=config.max_position_embeddings,
        n_embd=config.hidden_size,
        n_layer=config.num_hidden_layers,
        n_head=config.num_attention_heads,
        n_inner=config.inner_size,
        activation_function=config.activation,
        layer_norm_epsilon=config.layer_norm_epsilon,
        initializer_range=config.initializer_range,
        resid_pdrop=config.resid_pdrop,
        embd_pdrop=config.embd_pdrop,
        attn_pdrop=config.attn_pdrop,
        tie_word_embeddings=config.tie_word_embeddings,
        bos_token_id=end_of_text,
        eos_token_id=end_of_text,
    )


def reference(config: Config) -> nn.Module:
    """Return a `GPT2LMHeadModel` of the same architecture, in fp32, randomly initialised."""
    return built(architecture(config))


def to_huggingface(config: Config, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return full tensors under target transformers names, from those under our global names.

    Tensors are independent, so they may come one at a time. Neither side names a tied projection.
    """
    renamed_weights: dict[str, Tensor] = {}
    for name, value in weights.items():
        if "qkv" in name:
            value = value.flatten(0, 1)  # [3, hidden, ...] -> [3 x hidden, ...]
        renamed_weights[renamed(name, _NAMES)] = value.t() if _is_linear(name) else value
    return renamed_weights


def parts(config: Config, name: str, shape: tuple[int, ...]) -> tuple[Part, ...]:
    """Return the tensors of transformers that hold one of our parameters, of this shape."""
    target = renamed(name, _NAMES)
    if "qkv" in name and _is_linear(name):
        three, out, inner = shape
        return (Part(target, (inner, three, out), (1, 2, 0)),)
    if _is_linear(name):
        return (Part(target, (shape[1], shape[0]), (1, 0)),)
    return (Part(target, shape, tuple(range(len(shape)))),)


def _is_linear(name: str) -> bool:
    return name.endswith("weight") and ("attention" in name or "mlp" in name)
