"""Converts a published model's config.json to the "model" block of a family (floor 0, no torch).

A family that supports this has `models/<family>/pretrained.py`: `MODEL_TYPES` (the transformers
classes by model_type), `FREE`, and `model_block(fields)`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from parallel3d import models
from parallel3d.base.errors import ConfigError
from parallel3d.base.section import ABSENT, Problem, Problems

# Fields that do not affect the model: names, ids, generation, how it was saved or trained.
NEUTRAL = {
    "model_type",
    "architectures",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "tokenizer_class",
    "max_sequence_length",
    "use_cache",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "sep_token_id",
    "decoder_start_token_id",
    "task_specific_params",
    "return_dict",
    "id2label",
    "label2id",
    "problem_type",
    "prefix",
    "torchscript",
    "keys_to_ignore_at_inference",
    "max_length",
    "min_length",
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
    "num_beams",
    "num_return_sequences",
    "repetition_penalty",
    "length_penalty",
    "diversity_penalty",
    "early_stopping",
    "num_beam_groups",
    "chunk_size_feed_forward",
    "tie_encoder_decoder",
    "pretraining_tp",
    "attn_implementation",
    "transformers.js_config",
    "unsloth_version",
    "unsloth_fixed",
}
# Features that no family supports; refused by name, not as unknown.
_FOREIGN = {
    "auto_map": "names custom code",
    "quantization_config": "quantizes the weights",
    "attn_logit_softcapping": "caps the attention scores",
    "final_logit_softcapping": "caps the logits",
    "logits_soft_cap": "caps the logits",
    "shared_expert_intermediate_size": "adds a shared expert with a gate",
    "kv_lora_rank": "compresses keys and values (multi-head latent attention)",
    "sliding_window": "restricts attention to a window",
    "attention_sinks": "adds attention sinks",
    "is_encoder_decoder": "makes an encoder-decoder model",
    "add_cross_attention": "adds cross-attention",
}
GENERIC = "transformers"
"""The family of any decoder."""
_REMEDY = "use another model"
_NO_LANGUAGE_MODEL = "is not the language model of its type"
_UNKNOWN = (
    "is unknown and may change what the model computes",
    "if it does not, remove it in a copy of the folder; else use another model",
)


@dataclass(frozen=True)
class Part:
    """A tensor of transformers that holds one of our parameters, or at `index` of its first dims.

    Viewed as `shape`, with its dims in `order`, it has our elements in our order; one of our dims
    may be several of its dims. With `blocks` it has as many blocks of rows in another order: block
    `blocks[i]` of the tensor is our block i.
    """

    name: str
    shape: tuple[int, ...]
    order: tuple[int, ...]
    index: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()


class Fields:
    """The fields of a config.json; code takes those it knows, and `finish` refuses the rest."""

    def __init__(self, config: Mapping[str, object]) -> None:
        self._config = config
        self._known = set(NEUTRAL)
        self._problems: list[Problem] = []

    @property
    def model_type(self) -> str:
        """The field "model_type"."""
        return str(self._config.get("model_type"))

    def has(self, name: str) -> bool:
        """True if a field is present, even if null."""
        return name in self._config

    def take(self, name: str, default: Any = ABSENT) -> Any:
        """Return a field's value, or `default` if it is missing or null; refuse it without one.

        Any, because a file may hold anything: `model_block` reports values of a wrong kind.
        """
        self._known.add(name)
        value = self._config.get(name)
        if value is None and default is ABSENT:
            self.refuse(name, "is missing", "add it", ABSENT)
            return None
        return default if value is None else value

    def only(self, name: str, *allowed: object, rule: str, remedy: str = _REMEDY) -> None:
        """Refuse a field whose value is not one of `allowed`; missing and null are accepted."""
        self._known.add(name)
        value = self._config.get(name)
        if value is not None and not any(value == x and type(value) is type(x) for x in allowed):
            self.refuse(name, rule, remedy)

    def rope(self, *places: str) -> tuple[str, str, dict[str, object]]:
        """Return the block of the rotation: its field's name, its type, and its other entries.

        The first of `places` that is present counts, as in transformers.
        """
        where = next((place for place in places if self.take(place, None)), places[-1])
        self.ignore(*places)
        block = dict(self.take(where, {}))
        kind = block.pop("rope_type", None)
        old_kind = block.pop("type", None)
        return where, kind or old_kind or "default", block

    def ignore(self, *names: str) -> None:
        """Accept fields that change nothing."""
        self._known.update(names)

    def refuse(self, name: str, rule: str, remedy: str = _REMEDY, value: object = None) -> None:
        """Record that the value of a field is not supported."""
        if value is None:
            value = self._config.get(name, ABSENT)
        self._problems.append(Problem(name, value, rule, remedy))

    def finish(self) -> None:
        """Raise Problems for refused fields, and for unknown ones that may matter."""
        for name, value in self._config.items():
            if name in self._known or name.startswith("_") or not value:
                continue
            rule, remedy = _UNKNOWN
            if name in _FOREIGN:
                rule = f"{_FOREIGN[name]}, which parallel3d does not support"
                remedy = _REMEDY
            self._problems.append(Problem(name, value, rule, remedy))
        if self._problems:
            raise Problems(self._problems)


def model_block(config: Mapping[str, object], family: object = None) -> dict[str, object]:
    """Return the "model" block of a config.json; raise Problems, whose paths are its fields.

    A hand-written family has the model where it fits, and else the family of any decoder.

    - `family`: the name of the only family to ask; None for those that fit.
    """
    kind = config.get("model_type", ABSENT)
    own = _own_family(config)
    generic = models.find_part(GENERIC, "pretrained")
    assert generic is not None, GENERIC
    problems: list[Problem] = []
    if own is not None and family != GENERIC:
        try:
            return _block_of(own, config)
        except Problems as error:
            problems += error.problems
        if family == own.__name__.split(".")[-2] or not all(map(_is_of_the_family, problems)):
            raise Problems(problems)
    if kind is ABSENT:
        raise Problems([Problem("model_type", kind, "is missing", "add it")])
    if not isinstance(kind, str):
        known = ", ".join(sorted(_families()))
        raise Problems([Problem("model_type", kind, "is not supported", f"use one of {known}")])
    try:
        block: dict[str, object] = generic.model_block(config)
    except Problems as error:
        raise Problems([*problems, *error.problems]) from None
    return block


def _block_of(family: ModuleType, config: Mapping[str, object]) -> dict[str, object]:
    """Return the block that a hand-written family makes of a config.json; raise Problems."""
    fields = Fields(config)
    classes: Sequence[str] = family.MODEL_TYPES[fields.model_type]
    named = config.get("architectures") or [classes[0]]
    if not isinstance(named, list) or named[0] not in classes or len(named) > 1:
        fields.refuse("architectures", _NO_LANGUAGE_MODEL, f"use {classes[0]}")
    try:
        block: dict[str, object] = family.model_block(fields)
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"has a field that cannot be read ({error}); mend it, or download it again"
        ) from None
    fields.finish()
    return block


def _is_of_the_family(problem: Problem) -> bool:
    """Return True if another family may have what a problem says that a family lacks."""
    return (
        problem.path not in ("architectures", "auto_map", "quantization_config")
        and problem.value is not ABSENT
        and problem.rule != _UNKNOWN[0]
    )


def why_any(config: Mapping[str, object]) -> str:
    """Return why a config.json has the family of any decoder."""
    own = _own_family(config)
    if own is None:
        return f'no family is written for "{config["model_type"]}"'
    try:
        _block_of(own, config)
    except Problems as error:
        return f"{own.__name__.split('.')[-2]} lacks {error.problems[0].path}"
    return "as asked"


def class_of(config: Mapping[str, object]) -> str | None:
    """Return the class of a config.json in transformers; None if no hand-written family has it."""
    own = _own_family(config)
    return None if own is None else str(own.MODEL_TYPES[str(config["model_type"])][0])


def free_settings(family: str) -> Mapping[str, str]:
    """Return the settings that stay the user's, with their fields in config.json."""
    module = models.find_part(family, "pretrained")
    free: Mapping[str, str] = module.FREE if module else {}
    return free


def _own_family(config: Mapping[str, object]) -> ModuleType | None:
    """Return the `pretrained` module of the hand-written family of a config.json's type."""
    return _families().get(str(config.get("model_type")))


def _families() -> dict[str, ModuleType]:
    """Return by model_type the `pretrained` module of the family that supports it."""
    by_type: dict[str, ModuleType] = {}
    for family in models.families():
        module = models.find_part(family, "pretrained")
        if module:
            by_type |= dict.fromkeys(module.MODEL_TYPES, module)
    return by_type
