"""Converts any config.json of transformers to the "model" block of the family (floor 0, no torch).

It is for models that no hand-written family has, or with settings that it lacks.
"""

import json
from collections.abc import Iterator, Mapping

from parallel3d.base.section import ABSENT, Problem, Problems
from parallel3d.models.pretrained import NEUTRAL
from parallel3d.models.transformers.facts import ANY_VOCABULARY, Unsupported, facts_of

MODEL_TYPES: dict[str, tuple[str, ...]] = {}
FREE: dict[str, str] = {}
# Fields of the file, its tokenizer and how it is used, which an export has from elsewhere.
_NOT_OF_THE_MODEL = {*NEUTRAL, "auto_map"} - {"model_type"}


def model_block(config: Mapping[str, object]) -> dict[str, object]:
    """Return the "model" block of a config.json; raise Problems, whose paths are its fields."""
    problems = list(_problems(config))
    if problems:
        raise Problems(problems)
    fields = {}
    for name, value in config.items():
        if name not in _NOT_OF_THE_MODEL and name[:1] != "_":
            fields[name] = value
    try:
        facts_of(json.dumps(fields | {"vocab_size": ANY_VOCABULARY}, sort_keys=True))
    except Unsupported as error:
        if error.field == "model_type" and "architectures" in config:
            error = _named(error, config)
        value = config.get(error.field, ABSENT)
        raise Problems([Problem(error.field, value, str(error), error.remedy)]) from None
    return {"family": "transformers", "config": fields, "vocab_size": config["vocab_size"]}


def _named(error: Unsupported, config: Mapping[str, object]) -> Unsupported:
    """Return an error with the remedy that the file's "architectures" allow, if they do."""
    asks = {name: config[name] for name in ("model_type", "architectures")}
    try:
        facts_of(json.dumps(asks | {"vocab_size": ANY_VOCABULARY}, sort_keys=True))
    except Unsupported as own:
        return own if str(own) == str(error) else error
    return error


def _problems(config: Mapping[str, object]) -> Iterator[Problem]:
    inner = config.get("text_config")
    if isinstance(inner, dict):
        yield Problem(
            "model_type",
            config.get("model_type"),
            "reads more than text, which is not supported",
            f'use its language model, whose fields are text_config (model_type "'
            f'{inner.get("model_type")}"), in a folder of its own',
        )
    if config.get("quantization_config"):
        value = config["quantization_config"]
        rule = "quantizes the weights, which parallel3d does not support"
        yield Problem("quantization_config", value, rule, "use another model")
    size = config.get("vocab_size", ABSENT)
    if type(size) is not int or size < 1:
        yield Problem("vocab_size", size, "must be an integer above 0", "add it")
