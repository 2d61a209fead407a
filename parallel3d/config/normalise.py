"""A DeepSpeed file reduced to settings: no "auto", no old names, no keys without effect.

A model that is published is completed first: an "auto" may be a function of its sizes.

What it leaves is checked strictly, so what is not accepted here is refused there, by name.
"""

from copy import deepcopy
from typing import Any

from parallel3d.base.section import ABSENT
from parallel3d.config import auto, folders, pretrained
from parallel3d.config.deepspeed_keys import BY_SECTION
from parallel3d.config.monitors import SWITCHED

# DeepSpeed reads the old name where the new one is not there: section, old, new, and what it means.
_OLD_NAMES = (
    ("", "bfloat16", "bf16", None),
    ("zero_optimization", "cpu_offload", "offload_optimizer", {"device": "cpu"}),
    ("zero_optimization", "cpu_offload_param", "offload_param", {"device": "cpu"}),
)
# DeepSpeed writes null for "none".
_NULLABLE = ("offload_optimizer", "offload_param")


def normalise(raw: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A copy of a ds.json's object in which only settings are left, and notes on it."""
    raw, notes = _without_comments(raw), []
    if "zero_optimization" not in raw:
        notes.append("zero_optimization: not there = stage 0, DeepSpeed's default: no sharding")
    zero = raw.get("zero_optimization")
    if isinstance(zero, dict):
        for name in _NULLABLE:
            if name in zero and zero[name] is None:
                del zero[name]
    for name in SWITCHED:
        block = raw.get(name, ABSENT)
        if block is None or (isinstance(block, dict) and block.get("enabled", False) is False):
            del raw[name]
    if "steps_per_print" in raw and raw["steps_per_print"] is None:
        del raw["steps_per_print"]
    for path, old, new, meaning in _OLD_NAMES:
        block = _block(raw, path)
        if block is not None and old in block and new not in block:
            if meaning is None:
                block[new] = block.pop(old)
            elif block[old] is True:
                block[new] = dict(meaning)
                del block[old]
    for path, keys in BY_SECTION.items():
        block = _block(raw, path)
        for name in keys.keys() & (block or {}).keys():
            assert block is not None
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


def _block(raw: dict[str, Any], path: str) -> dict[str, Any] | None:
    block: Any = raw
    for name in path.split(".") if path else []:
        block = block.get(name) if isinstance(block, dict) else None
    return block if isinstance(block, dict) else None
