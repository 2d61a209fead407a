"""Makes of a DeepSpeed file one that holds settings alone: no "auto", nothing neutral, no old name.

What it leaves is checked strictly, so what is not accepted here is refused there, by name.
"""

from copy import deepcopy
from typing import Any

from parallel3d.config import auto
from parallel3d.config.deepspeed_keys import BY_SECTION
from parallel3d.section import ABSENT

# DeepSpeed reads the old name where the new one is not there: section, old, new, and what it means.
_OLD_NAMES = (
    ("", "bfloat16", "bf16", None),
    ("zero_optimization", "cpu_offload", "offload_optimizer", {"device": "cpu"}),
    ("zero_optimization", "cpu_offload_param", "offload_param", {"device": "cpu"}),
)
# DeepSpeed writes null for "none".
_NULLABLE = ("offload_optimizer", "offload_param")


def normalise(raw: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A copy of the object of a ds.json in which only settings are left, and notes on "auto"."""
    raw = deepcopy(raw)
    zero = raw.get("zero_optimization")
    if isinstance(zero, dict):
        for name in _NULLABLE:
            if name in zero and zero[name] is None:
                del zero[name]
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
    return raw, auto.resolve(raw)


def _block(raw: dict[str, Any], path: str) -> dict[str, Any] | None:
    block: Any = raw
    for name in path.split(".") if path else []:
        block = block.get(name) if isinstance(block, dict) else None
    return block if isinstance(block, dict) else None
