"""Any decoder of transformers as data: its own config, and what its modules consist of.

The config of the architecture is a block of its own; all sizes come from it.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from itertools import chain
from math import gcd
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, TypeAdapter, model_validator

from parallel3d.base.errors import ConfigError
from parallel3d.base.section import ABSENT, Problem
from parallel3d.model.measured_cost import MeasuredCost
from parallel3d.model.module_cost import RMS_NORM
from parallel3d.model.recompute import NONE, Recompute
from parallel3d.model.spec import LayerCost, LayerSpec, ParamSpec, Shape
from parallel3d.model.transformer_cost import EmbeddingCost, HeadCost
from parallel3d.models.common import ImportedSection, vocab_size
from parallel3d.models.transformers.facts import (
    ANY_VOCABULARY,
    Facts,
    Sizes,
    Sparse,
    Unsupported,
    asked,
    facts_of,
)


def _as_json(value: object) -> str:
    """Return the JSON of an object, with sorted keys: a config can be compared and hashed."""
    if isinstance(value, str):
        value = json.loads(value)
    if not isinstance(value, dict):
        raise ValueError("must be a block: the fields of a config.json; write {...}")
    return json.dumps(value, sort_keys=True)


Fields = Annotated[str, BeforeValidator(_as_json), PlainSerializer(json.loads)]


class Config(ImportedSection):
    """A decoder of transformers."""

    family: Literal["transformers"]
    """The model family: the name of a folder in models/."""
    config: Fields
    """The fields of the model's config.json; model_type names the architecture. A field that is
    missing has the default of the architecture."""
    vocab_size: Annotated[int, Field(gt=0)] | Literal["auto"] = "auto"
    """Rows of the embedding; "auto" takes the tokenizer's. If it is missing, that of `config`
    counts."""

    router_aux_loss: Literal["microbatch", "sequence", "pooled"] = "pooled"
    """The tokens over which the balance loss compares loads, where `config` has
    output_router_logits. "pooled": those of a microbatch in all layers together, as in
    transformers; it needs a pipeline of one stage. The others: layer by layer, as in family
    "moe"."""
    router_z_loss_coef: float = Field(default=0.0, ge=0)
    """Weight of the mean square of the scores' logsumexp (arXiv:2202.08906), summed over layers."""
    score_bias_rate: float = Field(default=0.0, ge=0)
    """The step of the biases of experts' scores towards equal loads (arXiv:2408.15664); 0 keeps
    them as they are, as transformers does."""

    @model_validator(mode="before")
    @classmethod
    def _take_vocabulary(cls, value: Any) -> Any:
        """Return the block with the vocabulary of its config.json, if it says none itself."""
        if not isinstance(value, dict) or "vocab_size" in value:
            return value
        fields = value.get("config")
        if not isinstance(fields, dict) or "vocab_size" not in fields:
            return value
        return value | {"vocab_size": fields["vocab_size"]}

    @property
    def can_recompute(self) -> tuple[str, ...]:
        """The parts of a layer that may be recomputed alone: attention is the library's own."""
        return ("core_attn",)

    @property
    def notes(self) -> tuple[str, ...]:
        """A line about the fields of the config.json that its class does not have."""
        if not self.facts.unknown:
            return ()
        kind = json.loads(self.config).get("model_type")
        return (
            f"parallel3d.model.config: unknown to transformers' class for {kind}, and handed to it "
            f"as they are: {', '.join(self.facts.unknown)}",
        )

    @property
    def json_of_model(self) -> str:
        """The fields of the config.json with the vocabulary, as JSON."""
        return self._json_with(vocab_size(self))

    @property
    def json_of_facts(self) -> str:
        """The fields of the config.json with any vocabulary, as the true one may not be known."""
        return self._json_with(ANY_VOCABULARY)

    @property
    def facts(self) -> Facts:
        """The parts of the model, but for the vocabulary."""
        return facts_of(self.json_of_facts)

    def _json_with(self, size: int) -> str:
        return json.dumps(json.loads(self.config) | {"vocab_size": size}, sort_keys=True)

    @property
    def sizes(self) -> Sizes:
        """The model's sizes."""
        return self.facts.sizes

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.sizes.hidden_size

    @property
    def num_hidden_layers(self) -> int:
        """Number of layers, without what is before and after them."""
        return self.sizes.num_hidden_layers

    @property
    def num_attention_heads(self) -> int:
        """Query heads per layer."""
        return self.sizes.num_attention_heads

    @property
    def num_key_value_heads(self) -> int:
        """The fewest key/value heads of a layer."""
        return self.sizes.num_key_value_heads

    @property
    def head_size(self) -> int:
        """Width of one head."""
        return self.sizes.head_size

    @property
    def inner_size(self) -> int:
        """Inner width of the MLP."""
        return self.sizes.inner_size

    @property
    def max_position_embeddings(self) -> int:
        """The longest sequence that the model is meant for."""
        return self.sizes.max_position_embeddings

    @property
    def initializer_range(self) -> float:
        """Standard deviation of most weights."""
        return self.sizes.initializer_range

    @property
    def tie_word_embeddings(self) -> bool:
        """True if the output projection is the table of tokens."""
        return bool(self.facts.tied)

    @property
    def share_cut(self) -> float:
        """The share of the layers' parameters that tensor parallelism cuts."""
        return self.facts.cut

    @property
    def isolates(self) -> bool:
        """True if documents can be kept apart, and a sample shared among ranks."""
        return self.facts.isolates

    @property
    def attention_dropout(self) -> float:
        """The probability of dropout of attention's scores."""
        return self.facts.attention_dropout

    @property
    def score_bias(self) -> bool:
        """True if a router has a bias of experts' scores, which has no gradient."""
        params = chain.from_iterable(self.facts.blocks)
        return any(param.role == "balance" for param in params)

    @property
    def num_experts(self) -> int:
        """Experts of each sparse layer; 0 if no layer has any that ranks can divide."""
        return gcd(*(own.experts for own in self.facts.sparse))

    @property
    def router_aux_loss_coef(self) -> float:
        """Weight of the balance loss; 0: the model adds none."""
        return self.facts.balance

    @property
    def side_losses(self) -> dict[str, float]:
        """The coefficients of the side losses of a sparse layer, by name."""
        return {"balance": self.router_aux_loss_coef, "z": self.router_z_loss_coef}

    def _problems(self) -> Iterator[Problem]:
        try:
            facts = self.facts
        except Unsupported as error:
            value = json.loads(self.config).get(error.field, ABSENT)
            yield Problem(f"config.{error.field}", value, str(error), error.remedy)
            return
        if self.router_z_loss_coef and not any(own.has_scores for own in facts.sparse):
            rule = "needs the scores of a router, and transformers records none of this model"
            yield Problem("router_z_loss_coef", self.router_z_loss_coef, rule, "use 0")
        if self.score_bias_rate and not (self.score_bias and self.num_experts):
            rule = "moves biases of experts' scores, and the model has none"
            yield Problem("score_bias_rate", self.score_bias_rate, rule, "use 0")


@dataclass(frozen=True)
class MeasuredLayer:
    """The cost of a layer, measured when it is asked for the first time: a `CostOf`."""

    model: str
    """The section of the config, as JSON."""
    layer: str
    """The name of the first layer that costs the same."""

    def __call__(
        self,
        shape: Shape,
        tp: int = 1,
        sequence_parallel: bool = False,
        recompute: Recompute = NONE,
    ) -> LayerCost:
        """Return the cost of one microbatch."""
        cost = costs_of(self.model, tp)[self.layer]
        return cost(shape, tp, sequence_parallel, recompute)


@lru_cache(maxsize=64)
def costs_of(model: str, tp: int) -> dict[str, MeasuredCost]:
    """Return the measured costs of a model's layers on one rank and on `tp`, by name.

    - `model`: the section of its config, as JSON.
    """
    section = json.loads(model)
    tps = [tp] if tp > 1 else []
    request = {"model": section, "ranks": tps, "recompute": ["core_attn", "full"]}
    kind = section["config"].get("model_type")
    purpose = f"measuring the layers of {kind} at tp {tp} on the meta device (once)"
    try:
        text = asked(METER, json.dumps(request, sort_keys=True), purpose)
    except Unsupported as error:
        raise ConfigError(
            f"parallel3d.model.config: the costs of {kind} cannot be measured ({error}); use "
            "another model, or another mesh.tp"
        ) from None
    return TypeAdapter(dict[str, MeasuredCost]).validate_json(text)


def _with_rows(spec: ParamSpec, rows: int, has_words: bool) -> ParamSpec:
    """Return a parameter, with so many rows if it has one for each word."""
    return replace(spec, shape=(rows, *spec.shape[1:])) if has_words else spec


METER = "parallel3d.models.transformers.meter"


@lru_cache(maxsize=16)
def layers(config: Config) -> list[LayerSpec]:
    """Return what is before the layers, the layers, and the head."""
    facts = config.facts
    vocab = vocab_size(config)
    embedding = [_with_rows(p, vocab, p.name.endswith(".table.weight")) for p in facts.embedding]
    output = [_with_rows(p, vocab, p.name.startswith("output.")) for p in facts.head]
    known = {"family", "config", "vocab_size"}  # costs depend on no other setting
    model = json.dumps(config.model_dump(mode="json", include=known), sort_keys=True)

    hidden = config.hidden_size
    build = "parallel3d.models.transformers.blocks:"
    blocks = []
    for number, params in enumerate(facts.blocks):
        cost = MeasuredLayer(model, f"blocks.{facts.kinds[number]}")
        block = LayerSpec(f"blocks.{number}", params, cost, f"{build}Block", config)
        blocks.append(_with_experts(block, facts.sparse[number]))
    first = EmbeddingCost(hidden)
    last = HeadCost(hidden, vocab, RMS_NORM)
    return [
        LayerSpec("embedding", tuple(embedding), first, f"{build}Embedding", config),
        *blocks,
        LayerSpec("head", tuple(output), last, f"{build}Head", config, facts.tied),
    ]


def _with_experts(block: LayerSpec, own: Sparse) -> LayerSpec:
    """Return a layer with what it says about its experts, if it has any."""
    if not own.experts:
        return block
    names = [param.name for param in block.params if "experts" in param.cut_over]
    losses = block.config.side_losses if own.has_scores else {}  # type: ignore[attr-defined]
    return replace(
        block,
        active=tuple((name, own.choices / own.experts) for name in names),
        side_losses=tuple(name for name, coefficient in losses.items() if coefficient),
        num_experts=own.experts,
        shares_samples=True,
    )


def small(config: Config, tp: Sequence[int], sizes: Mapping[str, object]) -> dict[str, object]:
    """Return the config of a small model of the same architecture."""
    shrunk = import_module("parallel3d.models.transformers.small").shrunk
    fields = shrunk(json.loads(config.config), sizes)
    if "output_router_logits" in fields:
        fields["output_router_logits"] = False
    # The reference is a model of transformers, which neither moves biases nor has a z-loss.
    return {"config": fields, "router_z_loss_coef": 0.0, "score_bias_rate": 0.0}
