"""The GPT-2 family as data: its settings, its layers' parameters, and their costs.

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners". Sizes have the general
names of the Hugging Face `GPT2Config`; blocks.py has the modules.
"""

from dataclasses import replace
from typing import Literal

from pydantic import Field

from parallel3d.model.module_cost import LAYER_NORM, MlpCost
from parallel3d.model.spec import LayerSpec
from parallel3d.model.transformer_cost import BlockCost, EmbeddingCost
from parallel3d.models.common import (
    TP_0,
    BiasedConfig,
    Positive,
    Probability,
    biased_layers,
    fused_attention,
    table,
    vocab_size,
)


class Config(BiasedConfig):
    """The settings of one GPT model."""

    family: Literal["gpt"]
    """The model family: the name of a folder in models/."""
    max_position_embeddings: Positive = 1024
    """Number of learned positions: the longest possible sequence."""
    activation: Literal["gelu_new"] = "gelu_new"
    """The MLP's non-linearity: the tanh approximation of GELU, as in GPT-2."""
    layer_norm_epsilon: float = Field(default=1e-5, gt=0)
    """Added to the variance in every LayerNorm."""
    tie_word_embeddings: bool = True
    """Share the weight of the output projection with the token embedding."""
    embd_pdrop: Probability = 0.0
    """Dropout after the embedding. GPT-2 had 0.1; pretraining for a single epoch needs none."""
    resid_pdrop: Probability = 0.0
    """Dropout on the outputs of attention and MLP."""
    attn_pdrop: Probability = 0.0
    """Dropout on the attention weights."""


def layers(config: Config) -> list[LayerSpec]:
    """Return embedding, blocks and head; raise ValueError if vocab_size is "auto"."""
    modules = (
        replace(fused_attention(config), dropout=config.attn_pdrop > 0),
        MlpCost(config.inner_size, bias=True),
    )
    dropout = config.resid_pdrop > 0
    block = BlockCost(config.hidden_size, LAYER_NORM, modules, dropout=dropout)
    return biased_layers(config, _embedding(config), block)


def _embedding(config: Config) -> LayerSpec:
    params = (
        table(config, "token.weight", vocab_size(config), TP_0),
        table(config, "position.weight", config.max_position_embeddings, ()),
    )
    cost = EmbeddingCost(config.hidden_size, positions=True, dropout=config.embd_pdrop > 0)
    return LayerSpec("embedding", params, cost, "parallel3d.models.gpt.blocks:Embedding", config)
