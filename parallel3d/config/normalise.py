"""A file before it is checked: the command line is set in it, and only settings are left.

No "auto", old name or key without effect stays. A published model is completed first: an "auto"
may be a function of its sizes.
"""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from parallel3d.base import reader
from parallel3d.base.reader import at
from parallel3d.base.section import ABSENT
from parallel3d.config import auto, folders, pretrained
from parallel3d.config.deepspeed_keys import BY_SECTION, TOP_LEVEL
from parallel3d.config.monitors import SWITCHED
from parallel3d.config.parallel3d_block import Parallel3DConfig

# DeepSpeed reads the old name where the new one is not there: section, old, new, and what it means.
_OLD_NAMES = (
    ("", "bfloat16", "bf16", None),
    ("zero_optimization", "cpu_offload", "offload_optimizer", {"device": "cpu"}),
    ("zero_optimization", "cpu_offload_param", "offload_param", {"device": "cpu"}),
)
# Where null means what a missing key means: section and key.
_NULLABLE = (
    ("", "steps_per_print"),
    ("", "scheduler"),
    ("zero_optimization", "offload_optimizer"),
    ("zero_optimization", "offload_param"),
)


def normalise(raw: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A copy of a ds.json's object in which only settings are left, and notes on it."""
    raw, notes = _without_comments(raw), []
    if "zero_optimization" not in raw:
        notes.append("zero_optimization: not there = stage 0, DeepSpeed's default: no sharding")
    for section, name in _NULLABLE:
        block = _block(raw, section)
        if block.get(name, ABSENT) is None:
            del block[name]
    for name in SWITCHED:
        block = raw.get(name, ABSENT)
        if block is None or (isinstance(block, dict) and block.get("enabled", False) is False):
            del raw[name]
    for section, old, new, meaning in _OLD_NAMES:
        block = _block(raw, section)
        if old in block and new not in block and (meaning is None or block[old] is True):
            value = block.pop(old)
            block[new] = value if meaning is None else dict(meaning)
    for section, keys in BY_SECTION.items():
        block = _block(raw, section)
        for name in keys.keys() & block.keys():
            left = keys[name].refused(block.pop(name))
            if left is not ABSENT:
                block[name] = left
    folders.look_into(raw)
    notes += pretrained.fill(raw)
    return raw, [*notes, *auto.resolve(raw)]


def _without_comments(raw: dict[str, Any]) -> dict[str, Any]:
    """A copy without the keys that begin with "_", in all but the parallel3d block."""

    def copied(value: Any) -> Any:
        if isinstance(value, list):
            return [copied(item) for item in value]
        if not isinstance(value, dict):
            return value
        return {k: copied(v) for k, v in value.items() if not k.startswith("_")}

    ours = {k: deepcopy(v) for k, v in raw.items() if k == "parallel3d"}
    theirs: dict[str, Any] = copied({k: v for k, v in raw.items() if k not in ours})
    return theirs | ours


def _block(raw: dict[str, Any], path: str) -> dict[str, Any]:
    """The block at a dotted path of `raw`; an empty one of its own where there is none."""
    block = at(raw, path)
    return block if isinstance(block, dict) else {}


def apply_overrides(raw: dict[str, Any], overrides: Sequence[str]) -> list[str]:
    """Set `--a.b value` in `raw`, in place; return notes on what else of it changed.

    A model that `--parallel3d.model.from_pretrained` names takes the place of the one in `raw`, of
    which only what no config.json fixes is kept. Raises ConfigError where settings contradict it.
    """
    alone: dict[str, Any] = {}
    values = [(full_path(path), text) for path, text in reader.pairs(overrides)]
    reader.set_values(alone, values)
    named, beneath = at(alone, pretrained.PATH), at(raw, "parallel3d.model")
    if not isinstance(named, str) or not isinstance(beneath, dict):
        reader.set_values(raw, values)
        return []
    del raw["parallel3d"]["model"]
    reader.set_values(raw, values)
    folders.look_into(raw)  # a family of the user's own may be the model's
    return pretrained.fill(raw, beneath)


def full_path(path: str) -> str:
    """Return the path in the file that `path` on the command line means.

    `parallel3d.` may be left out where no key of DeepSpeed's has the path: `checkpoint.every` is
    parallel3d's, and `checkpoint.tag_validation` DeepSpeed's.
    """
    section, _, inside = path.partition(".")
    if section not in Parallel3DConfig.model_fields:
        return path
    theirs = TOP_LEVEL.get(section)
    if theirs and (not inside or inside.partition(".")[0] in theirs.items):
        return path
    return f"parallel3d.{path}"
