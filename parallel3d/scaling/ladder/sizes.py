"""Choose the width and depth of the model for each size of a ladder."""

import math
from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from parallel3d import models
from parallel3d.base import explain
from parallel3d.base.section import ABSENT, Problem, Problems
from parallel3d.scaling.ladder.ladder_file import LadderConfig, SizeConfig
from parallel3d.scaling.runs import count

_INNER = ("intermediate_size", "moe_intermediate_size")  # the latter is the former where null
SHAPE = ("num_hidden_layers", "hidden_size", "num_attention_heads", *_INNER)
_MOST_WIDTHS = 4096  # largest number of heads to try
_MOST_LAYERS = 20_000


def model_of(ladder: LadderConfig, size: SizeConfig, base: Mapping[str, Any], path: str) -> Any:
    """Return the model of one size.

    base: model settings that all sizes share. path: place of the size in the ladder's file, for
    messages. Raises ConfigError if the settings are wrong or no width comes near `size.params`.
    """
    own = dict(size.model)
    for name in _INNER:
        if ladder.mlp_ratio is None and base.get(name) is not None:
            raise Problems([Problem(
                f"base.parallel3d.model.{name}", base[name], "would be the same at every size",
                "remove it, and set mlp_ratio",
            )])  # fmt: skip
    shared = {key: value for key, value in base.items() if key not in SHAPE}
    if size.params is not None:
        if clash := sorted(own.keys() & set(SHAPE[:3])):
            raise Problems([Problem(
                f"{path}.model.{clash[0]}", own[clash[0]],
                "conflicts with params, which determines it", "remove one of the two",
            )])  # fmt: skip
        return _nearest(ladder, size.params, {**shared, **own}, path)
    if missing := [key for key in SHAPE[:2] if key not in own]:
        raise Problems([Problem(
            f"{path}.model.{missing[0]}", ABSENT, "is missing",
            "set it, or params in place of the model",
        )])  # fmt: skip
    width, head = own["hidden_size"], ladder.head_size
    if "num_attention_heads" not in own and isinstance(width, int) and width > 0:
        if width % head:
            below = max(1, width // head) * head
            raise Problems([Problem(
                f"{path}.model.hidden_size", width, f"is not a multiple of head_size={head}",
                f"use {below} or {below + head}, or set num_attention_heads",
            )])  # fmt: skip
        own["num_attention_heads"] = width // head
    return _checked({**shared, **_inner(ladder, width), **own}, path)


def _nearest(ladder: LadderConfig, target: float, shared: dict[str, object], path: str) -> Any:
    """Return the model nearest to `target` active parameters in its blocks.

    Its width is a multiple of head_size, and its depth follows from aspect_ratio.
    """

    def shaped(heads: int) -> Any:
        width = heads * ladder.head_size
        layers = max(1, round(width / ladder.aspect_ratio))
        shape = dict(zip(SHAPE, (layers, width, heads), strict=False))
        if layers > _MOST_LAYERS:
            return None
        return _checked({**shared, **shape, **_inner(ladder, width)}, path)

    def blocks(heads: int) -> float:
        model = shaped(heads)
        return math.inf if model is None else count(model).active

    end = 1  # counting wide models is slow, so double the width only up to the target
    while end < _MOST_WIDTHS and blocks(end) < target:
        end *= 2
    above = 1 + bisect_left(range(1, end), target, key=blocks, lo=max(0, end // 2 - 1))
    off, best = min(
        (abs(math.log(blocks(heads) / target)), heads)
        for heads in (above - 1, above)
        if 0 < heads < _MOST_WIDTHS
    )
    if off > math.log(2):
        rule = f"the nearest model with this aspect_ratio and head_size={ladder.head_size} has "
        rule += f"{blocks(best):,}" if off < math.inf else f"more than {_MOST_LAYERS:,} layers"
        remedy = "use that, a smaller head_size, or model in place of params"
        raise Problems([Problem(f"{path}.params", target, rule, remedy)])
    return shaped(best)


def _inner(ladder: LadderConfig, width: object) -> dict[str, object]:
    """Return {"intermediate_size": ...} by mlp_ratio; {} without mlp_ratio or an integer width."""
    ratio = ladder.mlp_ratio
    if ratio is None or isinstance(width, bool) or not isinstance(width, int):
        return {}
    return {"intermediate_size": max(1, round(ratio * width))}


def _checked(raw: dict[str, object], path: str) -> Any:
    family = raw.get("family")
    if family not in models.families():
        raise Problems([Problem(
            "base.parallel3d.model.family", ABSENT if family is None else family,
            "is not a model family", f"use one of: {', '.join(models.families())}",
        )])  # fmt: skip
    kind = models.config_class(family)
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        problems = explain.problems_in(error, raw, kind)
        raise Problems(
            [problem.under(f"{path}.model") for problem in problems], "the ladder"
        ) from None
