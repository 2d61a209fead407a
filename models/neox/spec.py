"""The GPT-NeoX family as data: its settings, its layers' parameters, and their costs.

Black et al., arXiv:2204.06745 (GPT-NeoX-20B), and Biderman et al., arXiv:2304.01373 (Pythia).
Settings have the names of the two models' configs on the hub; blocks.py has the modules.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import ceil
from typing import Literal

from pydantic import Field

from parallel3d.base.section import Problem
from parallel3d.model.module_cost import LAYER_NORM, MlpCost
from parallel3d.model.spec import LayerSpec
from parallel3d.model.transformer_cost import BlockCost
from parallel3d.models.common import (
    BiasedConfig,
    Positive,
    biased_layers,
    fused_attention,
    token_embedding,
)


class Config(BiasedConfig):
    """The settings of one GPT-NeoX model."""

    family: Literal["neox"]
    """The model family: the name of a folder in models/."""
    max_position_embeddings: Positive = 2048
    """The longest sequence that the model is meant for; it adds no parameters."""
    activation: Literal["gelu", "gelu_fast", "gelu_new"] = "gelu"
    """The MLP's non-linearity: exact GELU ("gelu") or its tanh approximation (the others)."""
    use_parallel_residual: bool = True
    """If true, the MLP reads the block's input, as the attention does; else the sum of both."""
    rotary_pct: float = Field(default=0.25, gt=0, le=1)
    """The share of each head's features that rotate, counted from the first."""
    rotary_emb_base: float = Field(default=10_000.0, gt=0)
    """Base of the rotary frequencies."""
    layer_norm_eps: float = Field(default=1e-5, gt=0)
    """Added to the variance in every LayerNorm."""
    tie_word_embeddings: bool = False
    """Share the weight of the output projection with the token embedding."""

    @property
    def rotary_size(self) -> int:
        """Features of each head that rotate, rounded down as in transformers."""
        return int(self.head_size * self.rotary_pct)

    def _problems(self) -> Iterator[Problem]:
        yield from super()._problems()
        size = self.head_size
        turning = self.rotary_size
        pairs = turning // 2 + 1 if turning < size else turning // 2
        if turning % 2 or not turning:
            yield Problem(
                "rotary_pct",
                self.rotary_pct,
                f"rotates {turning} of a head's {size} features, but features rotate in pairs",
                f"use {ceil(2 * pairs / max(1, size) * 10**4) / 10**4:g}",
            )


def layers(config: Config) -> list[LayerSpec]:
    """Return embedding, blocks and head; raise ValueError if vocab_size is "auto"."""
    modules = (
        replace(fused_attention(config), rotary=config.rotary_size),
        MlpCost(config.inner_size, bias=True),
    )
    parallel = config.use_parallel_residual
    block = BlockCost(config.hidden_size, LAYER_NORM, modules, parallel=parallel)
    return biased_layers(config, token_embedding(config), block)
