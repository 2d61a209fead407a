"""The Llama family as data: its settings, its layers' parameters, and their costs.

Touvron et al., arXiv:2302.13971 and 2307.09288; with biases on query, key and value it is Qwen2's
architecture, with norms on query and key Qwen3's. Settings have the names of the Hugging Face
`LlamaConfig`; blocks.py has the modules.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import log
from typing import Annotated, Any, Literal

from pydantic import Field, Strict, model_serializer

from parallel3d.base.section import Problem, Section
from parallel3d.model.module_cost import RMS_NORM, AttentionCost, MlpCost
from parallel3d.model.spec import Init, LayerSpec, ParamSpec
from parallel3d.model.transformer_cost import BlockCost, HeadCost, ModuleCost
from parallel3d.models.common import (
    ONES,
    TP_0,
    TP_1,
    ZEROS,
    ModelSection,
    Positive,
    Probability,
    divisor_below,
    folded,
    head,
    token_embedding,
    vocab_size,
    weight_inits,
)

LayerTypes = Annotated[tuple[Literal["full_attention", "sliding_attention"], ...], Strict(False)]
BRANCHES = "attention.output.", "mlp.down.", "mlp.experts.down", "mlp.shared.down."


# The settings of each type of scaling, besides its factor.
SCALINGS: dict[str, tuple[str, ...]] = {
    "llama3": ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "linear": (),
    "dynamic": (),
    "yarn": (
        "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor",
    ),
}  # fmt: skip


class RopeScaling(Section):
    """Scaling of rotary positions beyond the length of the first pretraining."""

    rope_type: Literal["llama3", "linear", "dynamic", "yarn"] = "llama3"
    """"llama3" and "yarn": slow rotations are slowed by `factor`, fast ones stay, those between are
    interpolated; "yarn" also scales queries and keys. "linear": all are slowed. "dynamic": only
    sequences beyond max_position_embeddings change, so training does not; exported models keep
    it."""
    factor: float = Field(ge=1)
    """How many times slower the slow rotations become; 8 in Llama 3.1."""
    low_freq_factor: float = Field(default=1.0, gt=0)
    """For "llama3": rotations with fewer turns than this over the original length count as slow."""
    high_freq_factor: float = Field(default=4.0, gt=0)
    """For "llama3": rotations with more turns than this over the original length count as fast."""
    original_max_position_embeddings: Positive = 8192
    """For "llama3" and "yarn": the original length, in tokens."""
    beta_fast: float = Field(default=32.0, gt=0)
    """For "yarn": as high_freq_factor."""
    beta_slow: float = Field(default=1.0, gt=0)
    """For "yarn": as low_freq_factor."""
    attention_factor: float | None = Field(default=None, gt=0)
    """For "yarn": the factor of rotated queries and keys; null: 0.1 ln(factor) + 1."""

    @property
    def rotation_factor(self) -> float:
        """The factor of "yarn" for rotated queries and keys, resolved (arXiv:2309.00071, 3.4)."""
        return self.attention_factor or 0.1 * log(self.factor) + 1

    @model_serializer
    def _of_type(self) -> dict[str, object]:
        names = "rope_type", "factor", *SCALINGS[self.rope_type]
        return {name: getattr(self, name) for name in names}

    def _problems(self) -> Iterator[Problem]:
        low = self.low_freq_factor
        high = self.high_freq_factor
        slow = self.beta_slow
        others = type(self).model_fields.keys() - self._of_type().keys()
        kind = f'is not a setting of rope_type "{self.rope_type}"'
        for name in others:
            value = getattr(self, name)
            if value != type(self).model_fields[name].default:
                yield Problem(name, value, kind, "remove it")
        if high <= low:
            yield Problem(
                "high_freq_factor",
                high,
                f"is not above low_freq_factor={low}",
                f"use more than {low}",
            )
        if self.beta_fast < slow:
            yield Problem(
                "beta_fast",
                self.beta_fast,
                f"is below beta_slow={slow}",
                f"use {slow} or more",
            )


class Config(ModelSection):
    """The settings of one Llama-like model."""

    family: Literal["llama"]
    """The model family: the name of a folder in models/."""
    num_attention_heads: Positive
    """Query heads per block; tp must divide it."""
    num_key_value_heads: Positive | None = None
    """Key/value heads; must divide num_attention_heads. null means one per query head."""
    head_dim: Positive | None = None
    """Width of one head; null means hidden_size / num_attention_heads."""
    intermediate_size: Positive | None = None
    """Inner width of the MLP; null means 8/3 x hidden_size, rounded up to a multiple of 256."""
    max_position_embeddings: Positive = 2048
    """The longest sequence that the model is meant for; it adds no parameters."""
    rms_norm_eps: float = Field(default=1e-5, gt=0)
    """Added to the mean square in every RMSNorm."""
    rope_theta: float = Field(default=10_000.0, gt=1)
    """Base of the rotary frequencies; Llama 3 has 500000, Qwen 1000000."""
    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary frequencies for long sequences; null means none."""
    sliding_window: Positive | None = None
    """How many tokens a query sees, itself included, in layers with a window; null: all before it,
    in every layer."""
    layer_types: LayerTypes | None = None
    """For each layer, "sliding_attention" (with the window) or "full_attention" (without). null
    means that all have the window."""
    tie_word_embeddings: bool = False
    """Share the weight of the output projection with the token embedding."""
    attention_bias: bool = False
    """Biases on query, key and value, as in Qwen2."""
    attention_output_bias: bool = False
    """A bias on the attention's output projection; the attention_bias of transformers' Llama and
    Qwen3 is this and attention_bias."""
    mlp_bias: bool = False
    """Biases on the MLP's three projections."""
    qk_norm: bool = False
    """RMSNorm over each head of query and key before their rotation, as in Qwen3."""
    attn_pdrop: Probability = 0.0
    """Dropout on the attention weights."""

    @property
    def kv_heads(self) -> int:
        """Key/value heads, resolved."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        """Width of one head, resolved."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def rotary_size(self) -> int:
        """Rotated features of each head."""
        return self.head_size

    @property
    def norms_width(self) -> bool:
        """True if qk_norm norms the features of all heads together."""
        return False

    @property
    def inner_size(self) -> int:
        """Inner width of the MLP, resolved."""
        # arXiv:2302.13971, section 2.2: two thirds of 4 x hidden, because there are three matrices.
        return self.intermediate_size or -(-8 * self.hidden_size // (3 * 256)) * 256

    def window(self, number: int) -> int | None:
        """The window of the block of this number, from 0; None if it sees all tokens before."""
        types = self.layer_types
        return None if types and types[number] == "full_attention" else self.sliding_window

    def _problems(self) -> Iterator[Problem]:
        heads = self.num_attention_heads
        hidden = self.hidden_size
        kv_heads = self.kv_heads
        size = self.head_size
        types = self.layer_types or ()
        is_even = self.head_dim is not None or hidden % heads == 0
        if not is_even:
            yield Problem(
                "num_attention_heads",
                heads,
                f"does not divide hidden_size={hidden}",
                f"use {divisor_below(hidden, heads)} heads, or set head_dim",
            )
        if is_even and size % 2:
            yield Problem(
                "head_dim",
                self.head_dim,
                f"makes heads of {size} features; the number must be even",
                f"use an even number, such as {size + 1}",
            )
        if types and len(types) != self.num_hidden_layers:
            yield Problem(
                "layer_types",
                types,
                f"has {len(types)} entries for num_hidden_layers={self.num_hidden_layers}",
                f"list {self.num_hidden_layers}",
            )
        if "sliding_attention" in types and self.sliding_window is None:
            yield Problem(
                "sliding_window",
                None,
                "is needed for sliding_attention in layer_types",
                "set it, in tokens",
            )
        if heads % kv_heads:
            yield Problem(
                "num_key_value_heads",
                kv_heads,
                f"does not divide num_attention_heads={heads}",
                f"use {divisor_below(heads, kv_heads)}",
            )


def layers(
    config: Config, block_of: Callable[[Any, int], LayerSpec] | None = None
) -> list[LayerSpec]:
    """Return embedding, blocks and head; raise ValueError if vocab_size is "auto".

    A family that differs in its blocks alone passes `block_of`, which maps a config and a block's
    number to the block.
    """
    blocks = [(block_of or dense_block)(config, i) for i in range(config.num_hidden_layers)]
    cost = HeadCost(config.hidden_size, vocab_size(config), RMS_NORM)
    return [
        token_embedding(config),
        *blocks,
        head(config, [norm("norm", config.hidden_size)], cost),
    ]


def small(config: Config, tp: Sequence[int], sizes: Mapping[str, object]) -> dict[str, object]:
    """Return a scaling of rotary positions, and windows, that act if small."""
    longest = config.max_position_embeddings
    window = config.sliding_window
    scaling = config.rope_scaling and config.rope_scaling.model_dump(mode="json")
    if scaling and "original_max_position_embeddings" in scaling:
        scaling["original_max_position_embeddings"] = longest // 2
    types = config.layer_types and sorted({*config.layer_types}) * config.num_hidden_layers
    settings = {
        "rope_scaling": scaling,
        "sliding_window": window and min(window, longest // 4),
        "layer_types": types and types[: config.num_hidden_layers],
    }
    return {name: value for name, value in settings.items() if value is not None}


def dense_block(config: Config, number: int) -> LayerSpec:
    """Return a block whose MLP is a SwiGLU."""
    cost = MlpCost(config.inner_size, gated=True, bias=config.mlp_bias)
    return block(config, number, swiglu(config, "mlp", config.inner_size), cost)


def swiglu(config: Config, name: str, inner: int) -> Iterator[ParamSpec]:
    """Yield the parameters of a SwiGLU of this inner width."""
    hidden = config.hidden_size
    normal, residual = weight_inits(config)
    gate_up = (2, inner, hidden)
    yield ParamSpec(f"{name}.gate_up.weight", gate_up, TP_1, normal, True, role="hidden")
    yield from _bias(config.mlp_bias, f"{name}.gate_up", 2, inner)
    down = (hidden, inner)
    yield ParamSpec(f"{name}.down.weight", down, TP_1, residual, True, role="hidden")
    yield from _bias(config.mlp_bias, f"{name}.down", hidden)


def block(config: Config, number: int, mlp: Iterable[ParamSpec], mlp_cost: ModuleCost) -> LayerSpec:
    """Return the block of a Llama-like family, with its own MLP."""
    hidden = config.hidden_size
    queries = config.num_attention_heads * config.head_size
    normal, residual = weight_inits(config)
    params = (
        norm("norm1", hidden),
        *_qkv(config, normal),
        *_qk_norms(config),
        ParamSpec(
            "attention.output.weight", (hidden, queries), TP_1, residual, True, role="hidden"
        ),
        *_bias(config.attention_output_bias, "attention.output", hidden),
        norm("norm2", hidden),
        *mlp,
    )
    # A norm on the heads cancels factors before it, so the factor goes into the norm.
    query = "attention.q_norm." if config.qk_norm else "attention.qkv.q_"
    params = folded(config, params, query=query, branches=BRANCHES)
    attention = AttentionCost(
        config.num_attention_heads,
        config.kv_heads,
        config.head_size,
        qkv_bias=config.attention_bias,
        output_bias=config.attention_output_bias,
        qk_norm=RMS_NORM if config.qk_norm else None,
        rotary=config.rotary_size,
        dropout=config.attn_pdrop > 0,
        window=config.window(number),
    )
    cost = BlockCost(hidden, RMS_NORM, (attention, mlp_cost))
    build = f"parallel3d.models.{config.family}.blocks:Block"
    return LayerSpec(f"blocks.{number}", params, cost, build, config)


def _qkv(config: Config, normal: Init) -> Iterator[ParamSpec]:
    heads = {"q": config.num_attention_heads, "k": config.kv_heads, "v": config.kv_heads}
    for name, count in heads.items():
        rows = count * config.head_size
        path = f"attention.qkv.{name}"
        shape = (rows, config.hidden_size)
        yield ParamSpec(f"{path}_weight", shape, TP_0, normal, True, units=count, role="hidden")
        if config.attention_bias:
            yield ParamSpec(f"{path}_bias", (rows,), TP_0, ZEROS, False, units=count, role="vector")


def _bias(exists: bool, name: str, *shape: int) -> Iterator[ParamSpec]:
    """Yield the bias of a product: that of two fused ones [2, rows] is cut, [rows] is not."""
    if exists:
        cut_over = TP_1 if len(shape) > 1 else ()
        yield ParamSpec(f"{name}.bias", shape, cut_over, ZEROS, False, role="vector")


def _qk_norms(config: Config) -> Iterator[ParamSpec]:
    for name, heads in (("q_norm", config.num_attention_heads), ("k_norm", config.kv_heads)):
        weight = f"attention.{name}.weight"
        shape = (heads * config.head_size,)
        if config.qk_norm and config.norms_width:
            yield ParamSpec(weight, shape, TP_0, ONES, False, units=heads, role="vector")
        elif config.qk_norm:
            # Each tp rank normalises its own heads, so it has only part of the gradient.
            yield norm(f"attention.{name}", config.head_size, partial=True)


def norm(name: str, size: int, partial: bool = False) -> ParamSpec:
    """Return the weight of an RMSNorm."""
    return ParamSpec(f"{name}.weight", (size,), (), ONES, False, partial=partial, role="vector")
