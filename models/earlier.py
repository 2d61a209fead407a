"""Models of earlier versions: their settings in today's families, their parameters' places.

The family `neox` is now `transformers` with the model_type "gpt_neox" (floor 0, no torch).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

from parallel3d import models
from parallel3d.base.section import ABSENT, Problem, raise_if_any

_NEOX = "neox"
_GPT_NEOX = "gpt_neox"
_GENERIC = "transformers"
FIELDS = {
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "max_position_embeddings": "max_position_embeddings",
    "initializer_range": "initializer_range",
    "activation": "hidden_act",
    "use_parallel_residual": "use_parallel_residual",
    "rotary_pct": "rotary_pct",
    "rotary_emb_base": "rotary_emb_base",
    "layer_norm_eps": "layer_norm_eps",
    "tie_word_embeddings": "tie_word_embeddings",
}
"""The settings of the family "neox", and their names in a config.json."""
_REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads")
_SHARED = ("family", "config", "vocab_size", "from_pretrained")
_MODEL = "parallel3d.model"
_TABLE = "embedding.embed_in.table.weight"
# Settings that families had, at their defaults.
_OF_BOTH: dict[str, object] = {
    "attention_sinks": False,
    "no_rope_layer_interval": None,
    "post_norm": False,
}
_DROPPED: dict[object, dict[str, object]] = {
    "llama": _OF_BOTH | {"qk_norm_over": "head", "partial_rotary_factor": 1.0},
    "moe": _OF_BOTH,
}
# Our names of a layer's parts, and those of the family "neox".
_PARTS = {
    "embed_in.table": "token",
    "layer.input_layernorm": "norm1",
    "layer.attention.query_key_value": "attention.qkv",
    "layer.attention.dense": "attention.output",
    "layer.post_attention_layernorm": "norm2",
    "layer.mlp.dense_h_to_4h": "mlp.up",
    "layer.mlp.dense_4h_to_h": "mlp.down",
    "tail.final_layer_norm": "norm",
    "output": "output",
}


def translated(block: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a "model" block of any version as today's, and notes on what changed.

    Raises Problems, whose paths are those of the ds.json.
    """
    family = block.get("family")
    config = block.get("config", {})
    old = {name: block[name] for name in FIELDS if name in block}
    if family == _NEOX and _NEOX not in models.families():
        return _of_neox(block, old)
    if family == _GENERIC and isinstance(config, dict) and config.get("model_type") == _GPT_NEOX:
        rest = {name: value for name, value in block.items() if name not in old}
        fields = {FIELDS[name]: value for name, value in old.items()}
        return rest | {"config": config | fields}, []
    dropped = _DROPPED.get(family, {})
    kept = {k: v for k, v in block.items() if k not in dropped or v != dropped[k]}
    return kept, []


def _of_neox(block: Mapping[str, Any], old: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a block of the family "neox", whose settings are `old`, as today's."""
    raise_if_any(_problems(block, old))
    shared = {name: block[name] for name in _SHARED if name in block} | {"family": _GENERIC}
    note = (
        f'{_MODEL}.family: "{_NEOX}" is now "{_GENERIC}" with the model_type "{_GPT_NEOX}" '
        "(docs/any-decoder.md)"
    )
    if isinstance(block.get("from_pretrained"), str):  # a config.json has the fields
        return shared, [note]
    fields: dict[str, Any] = {"model_type": _GPT_NEOX}
    fields |= {FIELDS[name]: value for name, value in old.items()}
    hidden = old.get("hidden_size")
    if fields.get("intermediate_size") is None and isinstance(hidden, int | float):
        fields["intermediate_size"] = 4 * int(hidden)
    return shared | {"config": fields | shared.get("config", {})}, [note]


def _problems(block: Mapping[str, Any], old: Mapping[str, Any]) -> Iterator[Problem]:
    kind = block.get("parametrization") or {}
    kind = kind.get("type", "standard") if isinstance(kind, dict) else kind
    if kind != "standard":
        yield Problem(
            f"{_MODEL}.parametrization.type",
            kind,
            f'is not there for GPT-NeoX any more: the family "{_NEOX}" has become "{_GENERIC}", '
            "which has no multipliers",
            'use "standard", the family "gpt" or "llama", or version 0.2.0',
        )
    for name in block.keys() - {*FIELDS, *_SHARED, "parametrization"}:
        names = ", ".join(FIELDS)
        yield Problem(f"{_MODEL}.{name}", block[name], "is not a setting", f"use {names}")
    config = block.get("config", {})
    if not isinstance(config, dict):
        yield Problem(f"{_MODEL}.config", config, "must be a block of settings", "write {...}")
        return
    given = old.keys() | config.keys()
    is_published = isinstance(block.get("from_pretrained"), str)
    for name in _REQUIRED:
        if not is_published and name not in given:
            yield Problem(f"{_MODEL}.{name}", ABSENT, "is required", "add it")
    for name in old.keys() - {"initializer_range"}:
        if is_published:
            rule = "is beside from_pretrained, whose config.json has it"
            yield Problem(f"{_MODEL}.{name}", old[name], rule, "remove it")


@dataclass(frozen=True)
class Stored:
    """The tensor of a checkpoint that holds a parameter.

    - `heads`: if above 0, our rows are the query, key and value of each head in turn; the tensor is
      [3, heads x size, ...].
    """

    name: str
    shape: tuple[int, ...]
    heads: int = 0

    def boxes(
        self, offsets: Sequence[int], shape: Sequence[int]
    ) -> Iterator[tuple[slice | EllipsisType, tuple[int, ...], tuple[int, ...]]]:
        """Yield the boxes of the tensor that hold a box of our parameter.

        Each is the rows in our box that it fills, and its own offsets and shape.
        """
        if not self.heads:
            yield ..., tuple(offsets), tuple(shape)
            return
        size = self.shape[1] // self.heads
        first = offsets[0]
        end = first + shape[0]
        at = first
        while at < end:
            head, inner = divmod(at, 3 * size)
            part, row = divmod(inner, size)
            count = min(size - row, end - at)
            place = (part, head * size + row, *offsets[1:])
            yield slice(at - first, at - first + count), place, (1, count, *shape[1:])
            at += count


def stored_in(model: object, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Stored]:
    """Return the tensors of a checkpoint that hold a model's parameters, by our names.

    - `model`: the "model" block of the config with which it was written.
    - `shapes`: those of our parameters.
    """
    is_old = isinstance(model, dict) and model.get("family") == _NEOX and _TABLE in shapes
    if not isinstance(model, dict) or not is_old:
        return {name: Stored(name, shape) for name, shape in shapes.items()}
    heads = int(model.get("num_attention_heads") or 1)
    stored = {}
    for name, shape in shapes.items():
        layer, own = _layer_of(name)
        part, _, leaf = own.rpartition(".")
        old = f"{layer}.{_PARTS.get(part, part)}.{leaf}"
        if part.endswith("query_key_value"):
            stored[name] = Stored(old, (3, shape[0] // 3, *shape[1:]), heads)
        else:
            stored[name] = Stored(old, shape)
    return stored


def _layer_of(name: str) -> tuple[str, str]:
    """Return a parameter's layer, and its name in it."""
    words = name.split(".")
    count = 2 if words[0] == "blocks" else 1
    return ".".join(words[:count]), ".".join(words[count:])
