"""The models of a ladder's sizes, and the settings that they share."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from math import log
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from parallel3d import models
from parallel3d.base import explain, reader
from parallel3d.base.reader import JsonObject
from parallel3d.base.section import ABSENT, Problem, Problems, raise_if_any
from parallel3d.extras.scaling.ladder.ladder_file import LadderConfig, SizeConfig
from parallel3d.extras.scaling.runs import count

# If the latter is null, it is the former.
_INNER = ("intermediate_size", "moe_intermediate_size")
SHAPE = ("num_hidden_layers", "hidden_size", "num_attention_heads", *_INNER)
# Blocks of the base that the ladder writes to.
_BLOCKS = (
    "parallel3d.train",
    "parallel3d.checkpoint",
    "parallel3d.run",
    "parallel3d.mesh",
    "optimizer",
    "optimizer.params",
)
# Keys of train that the ladder sets.
OWN = ("steps", "max_tokens", "epochs", "lr_schedule", "batch_schedule", "stop_after")


def settings_of(model: Mapping[str, Any]) -> JsonObject:
    """Return the settings of a model: the fields of its config.json, if it has them in a block."""
    inner = model.get("config")
    return inner if isinstance(inner, dict) else dict(model)


def with_settings(model: Mapping[str, Any], settings: JsonObject) -> JsonObject:
    """Return a model with these in place of its settings, where `settings_of` has them."""
    has_block = isinstance(model.get("config"), dict)
    return {**model, "config": settings} if has_block else settings


def model_of(ladder: LadderConfig, size: SizeConfig, base: Mapping[str, Any], path: str) -> Any:
    """Return the model of one size.

    - `base`: model settings that all sizes share.
    - `path`: place of the size in the ladder's file, for messages.

    Raises ConfigError if the settings are wrong or no width comes near `size.params`.
    """
    own = dict(size.model)
    head = ladder.head_size
    raise_if_any(_size_problems(ladder, size, base, path))
    settings = {key: value for key, value in settings_of(base).items() if key not in SHAPE}
    shared = with_settings(base, settings)
    if size.params is not None:
        return _nearest(ladder, size.params, _with(shared, own), path)
    width = own["hidden_size"]
    if "num_attention_heads" not in own:
        below = max(1, width // head) * head
        if width % head:
            raise Problem(
                f"{path}.model.hidden_size",
                width,
                f"is not a multiple of head_size={head}",
                f"use {below} or {below + head}, or set num_attention_heads",
            ).error()
        own["num_attention_heads"] = width // head
    return _checked(_with(shared, {**_inner(ladder, width), **own}), path)


def _with(model: JsonObject, settings: JsonObject) -> JsonObject:
    """Return a model with some settings changed."""
    return with_settings(model, {**settings_of(model), **settings})


def _size_problems(
    ladder: LadderConfig, size: SizeConfig, base: Mapping[str, object], path: str
) -> Iterator[Problem]:
    """Yield the problems of one size: what the base fixes for all sizes, and what is missing."""
    settings = settings_of(base)
    block = "model.config" if "config" in base else "model"
    for name in _INNER:
        if ladder.mlp_ratio is None and settings.get(name) is not None:
            yield Problem(
                f"base.parallel3d.{block}.{name}",
                settings.get(name),
                "would be the same at every size",
                "remove it, and set mlp_ratio",
            )
    if ladder.mlp_ratio is None and "config" in base and _INNER[0] not in size.model:
        yield Problem(
            "mlp_ratio",
            None,
            "would leave every size the inner width that the architecture has by default",
            "set it",
        )
    if size.params is None:
        for name in SHAPE[:2]:
            if not isinstance(size.model.get(name), int):
                yield Problem(
                    f"{path}.model.{name}",
                    size.model.get(name, ABSENT),
                    "must be an integer",
                    "set it, or params in place of the model",
                )
        return
    for name in SHAPE[:3]:
        if name in size.model:
            yield Problem(
                f"{path}.model.{name}",
                size.model[name],
                "conflicts with params, which determines it",
                "remove one of the two",
            )


def _nearest(ladder: LadderConfig, target: float, shared: JsonObject, path: str) -> Any:
    """Return the model nearest to `target` active parameters in its blocks.

    Its width is a multiple of head_size, and its depth follows from aspect_ratio.
    """

    def shaped(heads: int) -> Any:
        width = heads * ladder.head_size
        layers = max(1, round(width / ladder.aspect_ratio))
        shape = dict(zip(SHAPE, (layers, width, heads), strict=False))
        return _checked(_with(shared, {**shape, **_inner(ladder, width)}), path)

    def blocks(heads: int) -> int:
        return count(shaped(heads)).active

    end = 1  # counting wide models is slow, so double the width only up to the target
    while blocks(end) < target:
        end *= 2
    above = 1 + bisect_left(range(1, end), target, key=blocks, lo=max(0, end // 2 - 1))
    off, best = min(
        (abs(log(blocks(heads) / target)), heads) for heads in (above - 1, above) if heads
    )
    if off > log(2):
        raise Problem(
            f"{path}.params",
            target,
            f"the nearest model with this aspect_ratio and head_size={ladder.head_size} has "
            f"{blocks(best):,}",
            "use that, a smaller head_size, or model in place of params",
        ).error()
    return shaped(best)


def _inner(ladder: LadderConfig, width: int) -> JsonObject:
    """Return {"intermediate_size": ...} by mlp_ratio; {} without it."""
    ratio = ladder.mlp_ratio
    return {} if ratio is None else {"intermediate_size": max(1, round(ratio * width))}


def _checked(raw: JsonObject, path: str) -> Any:
    kind = models.config_class(str(raw["family"]))
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        problems = explain.problems_in(error, raw, kind)
        raise Problems(
            [problem.under(f"{path}.model") for problem in problems], "the ladder"
        ) from None


def shared_model(base: Mapping[str, object], source: Path) -> JsonObject:
    """Return the model settings that all sizes share, with the vocabulary size as a number.

    - `source`: the ladder's file, for messages.

    Raises ConfigError if the base lacks a model or a sequence length, sets what the ladder sets,
    or has a value in place of a block that the ladder writes to.
    """
    model = reader.block_at(base, "parallel3d.model")
    fields = settings_of(model)
    data = reader.block_at(base, "parallel3d.data")
    vocab = model.get("vocab_size", fields.get("vocab_size", "auto"))
    if vocab == "auto" and data.get("tokenizer", "train") in ("train", "none"):
        vocab = data.get("vocab_size", 4096)  # the trained tokenizer's default
    raise_if_any(_base_problems(base, vocab), str(source))
    return {**model, "vocab_size": vocab}


def _base_problems(base: Mapping[str, object], vocab: object) -> Iterator[Problem]:
    """Yield the problems of a base; `vocab` is the size of its vocabulary, if that is known."""
    for path in _BLOCKS:
        value = reader.value_at(base, path)
        is_plan = path == "parallel3d.mesh" and value == "plan"
        if not isinstance(value, dict) and value is not ABSENT and not is_plan:
            yield Problem(f"base.{path}", value, "must be an object", "write {...}, or remove it")
    train = reader.block_at(base, "parallel3d.train")
    for name in OWN:
        if name in train:
            yield Problem(
                f"base.parallel3d.train.{name}",
                train[name],
                "is set by the ladder",
                "remove it, and use budgets and schedule",
            )
    family = reader.block_at(base, "parallel3d.model").get("family", ABSENT)
    if family not in models.families():
        yield Problem(
            "base.parallel3d.model.family",
            family,
            "is not a model family",
            f"use one of: {', '.join(models.families())}",
        )
    length = reader.block_at(base, "parallel3d.data").get("sequence_length")
    if not isinstance(length, int) or length < 1:
        yield Problem(
            "base.parallel3d.data.sequence_length", length, "must be a number of tokens", "set it"
        )
    if not isinstance(vocab, int):
        yield Problem(
            "base.parallel3d.model.vocab_size",
            vocab,
            "must be a number, which all sizes share",
            "set it",
        )
