"""Parts of specs and of parameter names that several families share (floor 0, no torch)."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from math import isqrt, sqrt
from typing import Annotated, Any, Literal

from pydantic import Field

from parallel3d.base.section import PathText, Problem, Section
from parallel3d.model.config import ModelConfig, TransformerConfig
from parallel3d.model.module_cost import AttentionCost
from parallel3d.model.parametrization import Parametrization, Rate, Role, Scales, parametrization_of
from parallel3d.model.spec import CostOf, CutOver, Init, LayerSpec, ParamSpec
from parallel3d.model.transformer_cost import EmbeddingCost, HeadCost

Positive = Annotated[int, Field(gt=0)]
Probability = Annotated[float, Field(ge=0, lt=1)]
ZEROS = Init()
ONES = Init(value=1.0)
TP_0 = ("tensor",)
TP_1 = (None, "tensor")
"""`ParamSpec.cut_over` of a parameter whose dim 0 or dim 1 tensor parallelism cuts."""


class Pretrained(Section):
    """The published model that a model's initial weights come from, as it was resolved."""

    folder: PathText = Field(min_length=1)
    """The folder, or the model's name on the hub."""
    weights: str | None = None
    """A fingerprint of the folder's weights."""
    revision: str | None = None
    """The commit on the hub; null for a folder."""


class ImportedSection(Section):
    """The settings of every family whose weights can be imported."""

    from_pretrained: Pretrained | str | None = None
    """The model whose weights training starts from: a transformers folder (config.json and
    safetensors), or a name on the Hugging Face hub ("owner/name", "owner/name@revision"). The sizes
    in this block then come from its config.json and may be omitted. A block: the resolved model."""


class ModelSection(ImportedSection):
    """The settings of every family that states its own sizes."""

    parametrization: Parametrization = Parametrization()
    """How initial sizes, multipliers and rates follow the model's width."""
    hidden_size: Positive
    """Width of the residual stream."""
    num_hidden_layers: Positive
    """Number of transformer blocks, without the embedding and the head."""
    vocab_size: Positive | Literal["auto"] = "auto"
    """Rows of the embedding; "auto" takes the tokenizer's."""
    initializer_range: float = Field(default=0.02, gt=0)
    """Standard deviation of weights, times 1/sqrt(2 x layers) for those that feed the residual."""


def pretrained_of(config: ModelConfig) -> Pretrained | str | None:
    """Return `from_pretrained`; None, too, if the family cannot be imported."""
    return config.from_pretrained if isinstance(config, ImportedSection) else None


def divisor_below(number: int, limit: int) -> int:
    """Return the largest divisor of `number` below `limit` that is found in milliseconds."""
    largest = 1
    for divisor in range(1, min(isqrt(number), 10**6) + 1):
        if number % divisor:
            continue
        for candidate in (divisor, number // divisor):
            if candidate < limit:
                largest = max(largest, candidate)
    return largest


class BiasedConfig(ModelSection):
    """The settings that families of `biased_layers` share."""

    num_attention_heads: Positive
    """Attention heads per block; must divide hidden_size, and tp must divide it."""
    intermediate_size: Positive | None = None
    """Inner width of the MLP; null means 4 x hidden_size."""

    @property
    def inner_size(self) -> int:
        """Inner width of the MLP, resolved."""
        return self.intermediate_size or 4 * self.hidden_size

    @property
    def head_size(self) -> int:
        """Width of one head."""
        return self.hidden_size // self.num_attention_heads

    def _problems(self) -> Iterator[Problem]:
        return uneven_heads(self.num_attention_heads, self.hidden_size)


def uneven_heads(heads: int, hidden: int) -> Iterator[Problem]:
    """Yield a problem unless num_attention_heads divides hidden_size."""
    if hidden % heads:
        yield Problem(
            "num_attention_heads",
            heads,
            f"does not divide hidden_size={hidden}",
            f"use {divisor_below(hidden, heads)} heads, or a hidden_size that is a multiple of "
            f"{heads}",
        )


def vocab_size(config: ModelConfig) -> int:
    """Return the number of rows of the embedding; raise ValueError while it is "auto"."""
    if config.vocab_size == "auto":
        raise ValueError('vocab_size "auto" is not resolved; call RunConfig.with_vocab_size first')
    return int(config.vocab_size)


def head_size_of(config: ModelConfig) -> int:
    """Return the width of one head; a family whose heads may be wider has `head_size`."""
    return int(getattr(config, "head_size", config.hidden_size // config.num_attention_heads))


def weight_inits(config: TransformerConfig) -> tuple[Init, Init]:
    """Return the initial values of a block's weights: the normal ones, and the residual ones.

    Two projections of each block add to the residual stream (Radford et al. 2019, section 2.3).
    """
    scales = scales_of(config)
    std = config.initializer_range * scales.hidden_std
    # If rates transfer over depth, the branch multiplier accounts for it, not the initial values.
    depth = scales.base_depth or config.num_hidden_layers
    return Init(std=std), Init(std=std / sqrt(2 * depth))


@lru_cache(maxsize=64)
def scales_of(config: ModelConfig) -> Scales:
    """Return the muP factors of a model of any family."""
    return Scales.of(config, head_size_of(config))


def rates_of(config: ModelConfig, params: Section) -> dict[Role | None, Rate]:
    """Return the factors of each role's rates, with an optimizer's parameters."""
    # None is refused with muP, and has no effect without it.
    return scales_of(config).rates(getattr(params, "width_power", 1.0) or 0.0)


def role_lrs(config: ModelConfig, params: Any) -> dict[Role, float]:
    """Return each role's peak learning rate over `params.lr`; {} without muP.

    A router's is that of AdamW's matrices.
    """
    if parametrization_of(config).type == "standard":
        return {}
    own_lr = getattr(params, "own_lr", lambda role: params.lr)
    rates = rates_of(config, params)
    shown = [role for role in rates if role is not None and role not in ("router", "balance")]
    return {role: rates[role].lr * own_lr(role) / params.lr for role in shown}


def folded(
    config: TransformerConfig,
    params: Iterable[ParamSpec],
    *,
    query: str,
    branches: tuple[str, ...],
    fused: int = 1,
) -> tuple[ParamSpec, ...]:
    """Return a block's parameters with their factors at export.

    - `query`: prefix of the parameters that compute queries; with `fused` parts in one parameter,
      the first part.
    - `branches`: prefixes of the parameters whose results are added to the residual stream.
    """
    scales = scales_of(config)
    specs = []
    for p in params:
        factors = _unless_one(scales.branch) if p.name.startswith(branches) else ()
        if p.name.startswith(query) and scales.query != 1:
            factors = (scales.query, *[1.0] * (fused - 1))
        specs.append(replace(p, folded=factors))
    return tuple(specs)


def layer_norm(name: str, size: int) -> Iterable[ParamSpec]:
    """Yield the weight and the bias of a LayerNorm."""
    yield ParamSpec(f"{name}.weight", (size,), (), ONES, False, role="vector")
    yield ParamSpec(f"{name}.bias", (size,), (), ZEROS, False, role="vector")


def fused_attention(config: ModelConfig) -> AttentionCost:
    """Return the cost of models/blocks.py's `FusedAttention`, without rotation and dropout."""
    heads = config.num_attention_heads
    size = config.hidden_size // heads
    return AttentionCost(heads, heads, size, fused_qkv=True, bias=True)


def biased_layers(config: TransformerConfig, first: LayerSpec, cost: CostOf) -> list[LayerSpec]:
    """Return the layers of a model with LayerNorms, whose blocks have biases everywhere.

    A block has two norms, fused q, k, v and an MLP.

    - `first`: the embedding.
    - `cost`: of a block.
    """
    build = f"parallel3d.models.{config.family}.blocks:Block"
    params = _biased_params(config)
    numbers = range(config.num_hidden_layers)
    blocks = [LayerSpec(f"blocks.{number}", params, cost, build, config) for number in numbers]
    head_cost = HeadCost(config.hidden_size, vocab_size(config))
    return [first, *blocks, head(config, layer_norm("norm", config.hidden_size), head_cost)]


@lru_cache(maxsize=64)
def _biased_params(config: TransformerConfig) -> tuple[ParamSpec, ...]:
    """Return the parameters of each block of `biased_layers`."""
    hidden = config.hidden_size
    inner = config.inner_size
    normal, residual = weight_inits(config)
    fused = (3, hidden, hidden)
    heads = config.num_attention_heads
    params = (
        *layer_norm("norm1", hidden),
        ParamSpec("attention.qkv.weight", fused, TP_1, normal, True, units=heads, role="hidden"),
        ParamSpec("attention.qkv.bias", (3, hidden), TP_1, ZEROS, False, role="vector"),
        ParamSpec("attention.output.weight", (hidden, hidden), TP_1, residual, True, role="hidden"),
        ParamSpec("attention.output.bias", (hidden,), (), ZEROS, False, role="vector"),
        *layer_norm("norm2", hidden),
        ParamSpec("mlp.up.weight", (inner, hidden), TP_0, normal, True, role="hidden"),
        ParamSpec("mlp.up.bias", (inner,), TP_0, ZEROS, False, role="vector"),
        ParamSpec("mlp.down.weight", (hidden, inner), TP_1, residual, True, role="hidden"),
        ParamSpec("mlp.down.bias", (hidden,), (), ZEROS, False, role="vector"),
    )
    branches = "attention.output.", "mlp.down."
    return folded(config, params, query="attention.qkv.", branches=branches, fused=3)


def table(config: TransformerConfig, name: str, rows: int, cut_over: CutOver) -> ParamSpec:
    """Return a table of the embedding: one vector of the model's width per row."""
    init = Init(std=config.initializer_range)
    shape = (rows, config.hidden_size)
    factors = _unless_one(scales_of(config).input)
    return ParamSpec(name, shape, cut_over, init, True, role="input", folded=factors)


def token_embedding(config: TransformerConfig) -> LayerSpec:
    """Return the first layer of a model whose positions enter in the attention."""
    params = (table(config, "token.weight", vocab_size(config), TP_0),)
    cost = EmbeddingCost(config.hidden_size)
    return LayerSpec("embedding", params, cost, "parallel3d.models.blocks:TokenEmbedding", config)


def _unless_one(factor: float) -> tuple[float, ...]:
    return (factor,) if factor != 1 else ()


def head(config: TransformerConfig, norm: Iterable[ParamSpec], cost: CostOf) -> LayerSpec:
    """Return the last layer: a norm and the output projection, which may be tied to the embedding.

    The multiplier of the logits is folded into the norm, because a tied weight is also the input's.
    """
    shape = (vocab_size(config), config.hidden_size)
    normal = Init(std=config.initializer_range)
    scales = scales_of(config)
    factor = scales.output / (scales.input if config.tie_word_embeddings else 1)
    params = (
        *(replace(p, folded=_unless_one(factor)) for p in norm),
        ParamSpec("output.weight", shape, TP_0, normal, True, role="output"),
    )
    tied = (("output.weight", "embedding.token.weight"),) if config.tie_word_embeddings else ()
    return LayerSpec(
        "head", params, cost, f"parallel3d.models.{config.family}.blocks:Head", config, tied
    )


def renamed(name: str, names: Mapping[str, str]) -> str:
    """Return the name that a table has for a parameter; KeyError if it has none.

    In the table "*" is the number of a block: "blocks.*.norm1.weight" is a norm of each block.
    """
    block = re.match(r"blocks\.(\d+)\.", name)
    if block is None:
        return names[name]
    inner = name.removeprefix(block[0])
    return names[f"blocks.*.{inner}"].replace("*", block[1], 1)


def class_named(requested: str | None, *possible: str) -> str:
    """Return the requested class of transformers, else the first possible one.

    Raises ValueError if the requested class is not possible.
    """
    if requested is not None and requested not in possible:
        raise ValueError(f"this model cannot be a {requested}; use {' or '.join(possible)}")
    return requested or possible[0]
