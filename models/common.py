"""What the specs and the names of several families share, as data (floor 0, no torch)."""

from collections.abc import Iterable, Mapping
from math import isqrt, sqrt
from typing import Any

from pydantic import Field

from parallel3d.model.spec import CostOf, Init, LayerSpec, ParamSpec
from parallel3d.section import PathText, Section


class Pretrained(Section):
    """The published model that the first weights are of, as it was found."""

    folder: PathText = Field(min_length=1)
    """The folder; of a model on the hub its name there."""
    weights: str | None = None
    """What tells the folder's weights from others."""
    revision: str | None = None
    """Which commit of the hub's; null of a folder."""


class ModelSection(Section):
    """What the settings of every family that can be imported have in common."""

    from_pretrained: Pretrained | str | None = None
    """A folder of transformers (config.json and safetensors), or a model's name on the Hugging Face
    hub ("owner/name", "owner/name@revision"), whose weights training starts from; the sizes in this
    block are then those of its config.json, and may be left out. A block: what was found."""


def divisor_below(number: int, limit: int) -> int:
    """The largest divisor of `number` below `limit`, of those that are found in milliseconds."""
    most = min(isqrt(number), 10**6)
    divisors = (n for d in range(1, most + 1) if number % d == 0 for n in (d, number // d))
    return max(n for n in divisors if n < limit)


def vocab_size(config: Any) -> int:
    """The number of rows of the embedding; raises ValueError while it is still "auto"."""
    if config.vocab_size == "auto":
        raise ValueError('vocab_size "auto" is not resolved; call RunConfig.with_vocab_size first')
    return int(config.vocab_size)


def weight_inits(config: Any) -> tuple[Init, Init]:
    """How a block's weights start: the normal ones, and those that feed the residual stream.

    Two projections of each block add to the residual stream (Radford et al. 2019, section 2.3).
    """
    std = config.initializer_range
    return Init(std=std), Init(std=std / sqrt(2 * config.num_hidden_layers))


def head(config: Any, norm: Iterable[ParamSpec], cost: CostOf) -> LayerSpec:
    """The last layer: a norm, and the output projection, tied to the embedding where it says so."""
    shape, normal = (vocab_size(config), config.hidden_size), Init(std=config.initializer_range)
    params = (*norm, ParamSpec("output.weight", shape, 0, normal, True))
    tied = (("output.weight", "embedding.token.weight"),) if config.tie_word_embeddings else ()
    return LayerSpec("head", params, cost, f"models.{config.family}.blocks:Head", config, tied)


def renamed(name: str, names: Mapping[str, str]) -> str:
    """A parameter's name with each part that `names` knows replaced, in the order given there."""
    for ours, theirs in names.items():
        name = name.replace(ours, theirs)
    return name


def class_named(wanted: str | None, *possible: str) -> str:
    """The class of transformers that is wanted, or the first that is possible; ValueError."""
    if wanted is not None and wanted not in possible:
        raise ValueError(f"this model cannot be a {wanted}; use {' or '.join(possible)}")
    return wanted or possible[0]
