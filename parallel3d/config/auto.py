"""Hugging Face's "auto": the values that replace it before anything else reads the file.

The rules are those of transformers' DeepSpeed integration with the defaults of TrainingArguments,
except for bf16.enabled. A test compares the two.
"""

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace

from parallel3d.base.reader import JsonObject, blocks_at, value_at
from parallel3d.base.section import ABSENT

AUTO = "auto"


@dataclass(frozen=True)
class Rule:
    """The value of "auto" at one path."""

    path: str
    words: str
    """The value, as the documentation states it."""
    value: Callable[[JsonObject], object]
    """The value for a file; ABSENT if the setting is removed and derived later."""
    warning: str = ""
    """A warning for the user, if the value is often wrong for pretraining."""


def _constant(path: str, value: object) -> Rule:
    words = f"{json.dumps(value)}, the default of TrainingArguments"
    return Rule(path, words, lambda raw: deepcopy(value))


def _batch_size(path: str, value: int) -> Rule:
    """Return the rule of a size that follows from the batch if that is set."""

    def follow(raw: JsonObject) -> object:
        paths = ("train_batch_size", "parallel3d.train.batch_schedule")
        is_set = any(value_at(raw, path) not in (ABSENT, None, AUTO, []) for path in paths)
        return ABSENT if is_set else value

    words = f"with train_batch_size the size that fits it, else {value}, as in TrainingArguments"
    return Rule(path, words, follow)


def _hidden(path: str, words: str, of_hidden_size: Callable[[int], int]) -> Rule:
    def value(raw: JsonObject) -> object:
        hidden = value_at(raw, "parallel3d.model.hidden_size")
        return of_hidden_size(hidden) if type(hidden) is int else ABSENT

    return Rule(f"zero_optimization.{path}", words, value)


_LR = "optimizer.params.lr"
# The order matters: a rule may read values that earlier rules have resolved.
RULES = (
    _batch_size("train_micro_batch_size_per_gpu", 8),
    _batch_size("gradient_accumulation_steps", 1),
    Rule("train_batch_size", "micro batch x accumulation x dp", lambda raw: ABSENT),
    _constant("gradient_clipping", 1.0),
    _constant("fp16.enabled", False),
    Rule(
        "bf16.enabled",
        "true unless fp16 is enabled (Hugging Face: false, which would train in fp32)",
        lambda raw: value_at(raw, "fp16.enabled") is not True,
    ),
    replace(
        _constant(_LR, 5e-5),
        warning="WARNING: optimizer.params.lr = 5e-05 is Hugging Face's default for fine-tuning, "
        "but this model trains from scratch; set a rate (1e-4 to 1e-3 for most sizes): "
        "--optimizer.params.lr 3e-4",
    ),
    _constant("optimizer.params.betas", [0.9, 0.999]),
    _constant("optimizer.params.eps", 1e-8),
    _constant("optimizer.params.weight_decay", 0.0),
    _hidden("reduce_bucket_size", "hidden_size squared", lambda h: h * h),
    _hidden("stage3_prefetch_bucket_size", "0.9 x hidden_size squared", lambda h: int(0.9 * h * h)),
    _hidden("stage3_param_persistence_threshold", "10 x hidden_size", lambda h: 10 * h),
    Rule("scheduler.params.warmup_min_lr", "0", lambda raw: 0.0),
    Rule("scheduler.params.warmup_max_lr", _LR, lambda raw: value_at(raw, _LR)),
    Rule("scheduler.params.warmup_num_steps", "1: TrainingArguments has no warm-up", lambda raw: 1),
)


def resolve(raw: JsonObject) -> list[str]:
    """Replace each "auto" that has a rule, in place; return a note on each, then warnings."""
    notes = []
    warnings = []
    blocks = blocks_at(raw, {rule.path.rpartition(".")[0] for rule in RULES})
    for rule in RULES:
        section, _, key = rule.path.rpartition(".")
        if (block := blocks[section]).get(key) != AUTO:
            continue
        value = rule.value(raw)
        if value is ABSENT:
            del block[key]
        else:
            block[key] = value
            notes.append(f"{rule.path}: auto = {json.dumps(value)} ({rule.words})")
            warnings += [rule.warning] if rule.warning else []
    return notes + warnings
