"""A published model's config.json as the "model" block of a family (floor 0, no torch).

A family that can be one brings `models/<family>/pretrained.py`: `MODEL_TYPES`, the classes of
transformers by the model_type that names them, and `model_block(fields)`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from parallel3d import models
from parallel3d.base.section import ABSENT, Problem, Problems

# Fields that change nothing in the model: names, ids, generation, how it was saved or trained.
_NEUTRAL = {
    *("model_type", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id"),
    *("task_specific_params", "return_dict", "id2label", "label2id", "problem_type", "prefix"),
    *("torchscript", "keys_to_ignore_at_inference", "max_length", "min_length", "do_sample"),
    *("temperature", "top_k", "top_p", "typical_p", "num_beams", "num_return_sequences"),
    *("repetition_penalty", "length_penalty", "diversity_penalty", "early_stopping"),
    *("num_beam_groups", "chunk_size_feed_forward", "tie_encoder_decoder", "pretraining_tp"),
    *("attn_implementation", "transformers.js_config", "unsloth_version", "unsloth_fixed"),
}
# Features of other models that no family here has: refused by name, not as unknown.
_FOREIGN = {
    "auto_map": "names code of its own, which is never run",
    "quantization_config": "holds weights that are not plain numbers",
    "attn_logit_softcapping": "caps the scores of attention",
    "final_logit_softcapping": "caps the logits",
    "logits_soft_cap": "caps the logits",
    "num_experts": "makes a mixture of experts",
    "num_local_experts": "makes a mixture of experts",
    "n_routed_experts": "makes a mixture of experts",
    "moe_intermediate_size": "makes a mixture of experts",
    "sliding_window": "makes attention see a window alone",
    "attention_sinks": "gives attention a sink",
    "is_encoder_decoder": "makes an encoder and a decoder",
    "add_cross_attention": "lets it attend to another model",
}
_REMEDY = "use another model"
_UNKNOWN = (
    "is unknown here, and may change what the model computes",
    "if it does not, remove it in a copy of the folder; else use another model",
)


@dataclass(frozen=True)
class Part:
    """A tensor of transformers that is one of our parameters, or that at `index` of its first dim.

    Viewed as `shape`, with its dims in `order`, it has our elements in our order; a dim of ours may
    be several of these.
    """

    name: str
    shape: tuple[int, ...]
    order: tuple[int, ...]
    index: int | None = None


class Fields:
    """The fields of one config.json, each taken by code that knows it; `finish` refuses the rest.

    `length`: the tokens of the samples that are to be trained on, where that is known.
    """

    def __init__(self, config: Mapping[str, Any], length: int | None = None) -> None:
        self._config, self.length = config, length
        self._asked = set(_NEUTRAL)
        self._problems: list[Problem] = []

    @property
    def model_type(self) -> str:
        """The field "model_type": which model the config.json is of."""
        return str(self._config.get("model_type"))

    def has(self, name: str) -> bool:
        """True if a field is there, even if null."""
        return name in self._config

    def take(self, name: str, default: Any = ABSENT) -> Any:
        """A field's value; `default` where it is missing or null, and refused without a default."""
        self._asked.add(name)
        value = self._config.get(name)
        if value is None and default is ABSENT:
            self.refuse(name, "is missing", "add it", ABSENT)
            return None
        return default if value is None else value

    def only(self, name: str, *allowed: Any, rule: str, remedy: str = _REMEDY) -> None:
        """Refuse a field that is there with another value than those allowed; null always is."""
        self._asked.add(name)
        value = self._config.get(name)
        if value is not None and not any(value == x and type(value) is type(x) for x in allowed):
            self.refuse(name, rule, remedy)

    def rope(self, *places: str) -> tuple[str, str, dict[str, Any]]:
        """The block of the rotation: which field it is, its rule, and what else it says.

        The first of the `places` that is there counts, as in transformers.
        """
        where = next((place for place in places if self.take(place, None)), places[-1])
        self.ignore(*places)
        block = self.take(where, {})
        if not isinstance(block, dict):
            self.refuse(where, "is no block")
            block = {}
        block = dict(block)
        kinds = block.pop("rope_type", None), block.pop("type", None)
        return where, kinds[0] or kinds[1] or "default", block

    def ignore(self, *names: str) -> None:
        """Take fields that change nothing."""
        self._asked.update(names)

    def refuse(self, name: str, rule: str, remedy: str = _REMEDY, value: Any = None) -> None:
        """Note that the value of a field cannot be had."""
        shown = self._config.get(name, ABSENT) if value is None else value
        self._problems.append(Problem(name, shown, rule, remedy))

    def finish(self) -> None:
        """Raise Problems for what was refused, and for what nobody has asked for and may matter."""
        for name, value in self._config.items():
            if name in self._asked or name.startswith("_") or not value:
                continue
            rule = _FOREIGN.get(name)
            words = (f"{rule}, which parallel3d's families do not", _REMEDY) if rule else _UNKNOWN
            self._problems.append(Problem(name, value, *words))
        if self._problems:
            raise Problems(self._problems)


def model_block(config: Mapping[str, Any], length: int | None = None) -> dict[str, Any]:
    """The "model" block of a config.json; raises Problems, whose paths are its fields.

    `length`: the tokens of the samples that are to be trained on, where that is known.
    """
    fields = Fields(config, length)
    kinds = {name: module for module in _families() for name in module.MODEL_TYPES}
    family = kinds.get(fields.model_type)
    if family is None:
        value = config.get("model_type", ABSENT)
        remedy = f"use a model of one of the types {', '.join(sorted(kinds))}"
        fields.refuse("model_type", "is none of those that can be trained here", remedy, value)
        fields.ignore(*(name for name in config if name not in _FOREIGN))
        fields.finish()
        raise AssertionError("it was refused")
    classes: Sequence[str] = family.MODEL_TYPES[fields.model_type]
    named = config.get("architectures") or [classes[0]]
    if not isinstance(named, list) or named[0] not in classes or len(named) > 1:
        fields.refuse("architectures", "is no language model of its type", f"use {classes[0]}")
    block: dict[str, Any] = family.model_block(fields)
    fields.finish()
    return block


def class_of(config: Mapping[str, Any]) -> str:
    """The language model of transformers that a config.json which can be trained here is of."""
    kind = str(config["model_type"])
    return next(str(m.MODEL_TYPES[kind][0]) for m in _families() if kind in m.MODEL_TYPES)


def free_settings(family: str) -> Mapping[str, str]:
    """Which settings of a family stay the user's, and by which field a config.json has them."""
    module = _family(family)
    found: Mapping[str, str] = module.FREE if module else {}
    return found


def _families() -> list[ModuleType]:
    return [module for family in models.families() if (module := _family(family))]


def _family(name: str) -> ModuleType | None:
    path = f"parallel3d.models.{name}.pretrained"
    return import_module(path) if find_spec(path) else None
