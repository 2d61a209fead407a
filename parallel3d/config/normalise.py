"""Turn the object of a ds.json into settings only, before it is checked.

Comments, old names and keys without effect are removed and "auto" is resolved. A model that
from_pretrained names is completed first, because "auto" may depend on its sizes.
"""

import json
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from parallel3d.base import explain, reader
from parallel3d.base.counts import read_count
from parallel3d.base.reader import JsonObject, block_at, blocks_at, value_at
from parallel3d.base.section import ABSENT
from parallel3d.config import arithmetic, auto, folders, pretrained
from parallel3d.config.deepspeed import DEFAULT_LR
from parallel3d.config.deepspeed_keys import TOP_LEVEL, UNUSED
from parallel3d.config.monitors import SWITCHED
from parallel3d.config.parallel3d_block import Parallel3DConfig
from parallel3d.config.run_settings import RunSettings
from parallel3d.models import earlier

_NO_LIMIT = 10**12  # elements of a sub-group, more than a rank has
# Section and key of settings where null means the same as a missing key.
_NULLABLE = (
    ("", "steps_per_print"),
    ("", "scheduler"),
    ("zero_optimization", "offload_optimizer"),
    ("zero_optimization", "offload_param"),
)


def normalise(raw: JsonObject) -> tuple[JsonObject, list[str]]:
    """Return a copy of a ds.json's object with settings only, and notes on what was resolved."""
    raw = _without_comments(raw)
    notes = []
    if "optimizer" not in raw:  # many training scripts create it
        raw["optimizer"] = {"params": {"lr": DEFAULT_LR}}
        notes.append(
            f"optimizer: not set; AdamW with DeepSpeed's defaults, learning rate {DEFAULT_LR}; "
            "to change it, set --optimizer.params.lr 3e-4"
        )
    blocks = blocks_at(raw, ("", "zero_optimization", "parallel3d.data"))
    # The config.json of earlier runs has it.
    if blocks["parallel3d.data"].pop("remote_cache_bytes", None) is not None:
        notes.append(
            "parallel3d.data.remote_cache_bytes: removed, has no effect; only streams read URLs"
        )
    # DeepSpeed 0.19.8 would update each parameter by itself; in other releases, and in published
    # files, 0 means no limit. Results are the same.
    zero = blocks["zero_optimization"]
    if value_at(zero, "sub_group_size") == 0 and type(zero["sub_group_size"]) is not bool:
        zero["sub_group_size"] = _NO_LIMIT
        notes.append(f"zero_optimization.sub_group_size: 0 means no limit, {_NO_LIMIT} elements")
    for section, name in _NULLABLE:
        if blocks[section].get(name, ABSENT) is None:
            del blocks[section][name]
    for name in SWITCHED:
        if raw.get(name, ABSENT) is None:
            del raw[name]
    if "bfloat16" in raw and "bf16" not in raw:
        raw["bf16"] = raw.pop("bfloat16")
    for section, block in blocks_at(raw, UNUSED).items():
        if section in SWITCHED and block:
            block.setdefault("enabled", ABSENT)  # must be there beside any key
        for name in UNUSED[section].keys() & block.keys():
            if not any(UNUSED[section][name].problems(name, block[name])):
                del block[name]
    folders.register(raw)
    model = value_at(raw, "parallel3d.model")
    if isinstance(model, dict):
        block_at(raw, "parallel3d")["model"], changes = earlier.translated(model)
        notes += changes
    notes += pretrained.fill(raw)
    return raw, [*notes, *auto.resolve(raw)]


def _without_comments(value: Any) -> Any:
    """Return a copy without keys that start with "_", except in the parallel3d block."""
    if isinstance(value, list):
        return [_without_comments(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        k: deepcopy(v) if k == "parallel3d" else _without_comments(v)
        for k, v in value.items()
        if not k.startswith("_")
    }


def apply_overrides(raw: JsonObject, overrides: Sequence[str]) -> list[str]:
    """Set `--a.b value` pairs in `raw`, in place; return notes on other changes.

    A model from `--parallel3d.model.from_pretrained` replaces the one in `raw`, except for the
    settings that a config.json does not fix. Raises ConfigError if settings contradict the model.
    """
    command_line: JsonObject = {}
    pairs = [(full_path(path), text) for path, text in reader.setting_pairs(overrides)]
    values = [(path, _quoted(path, text)) for path, text in pairs]
    reader.set_values(command_line, values)
    notes = _let_a_size_follow(raw, command_line)
    name = value_at(command_line, pretrained.PATH)
    replaced = value_at(raw, "parallel3d.model")
    if not isinstance(name, str) or not isinstance(replaced, dict):
        reader.set_values(raw, values)
        return notes
    del block_at(raw, "parallel3d")["model"]
    reader.set_values(raw, values)
    folders.register(raw)  # the model's family may be the user's own
    return notes + pretrained.fill(raw, replaced)


def _quoted(path: str, text: str) -> str:
    """Return a text as JSON if it reads as a number or a switch, but the setting is a text.

    A shell takes the quotes off `--run.name "20261130"`.
    """
    reads_as = reader.value(text)
    is_other = isinstance(reads_as, int | float)
    return json.dumps(text) if is_other and explain.takes_text(RunSettings, path) else text


def _let_a_size_follow(raw: JsonObject, command_line: JsonObject) -> list[str]:
    """Remove the batch size of `raw` that follows from the command line; return a note on it.

    Two of the three sizes determine the third, so a file with all of them could not be changed.
    A file's own are consistent on its own mesh only.
    """
    schedule = "parallel3d.train.batch_schedule"
    batch = arithmetic.BATCH
    sizes = (batch, arithmetic.MICRO, arithmetic.ACCUMULATION)
    chosen = [size for size in sizes if _is_number(command_line.get(size))]
    if batch not in chosen and isinstance(value_at(command_line, schedule), list):
        chosen.append(batch)
    in_file = [size for size in sizes if size not in command_line and size not in chosen]
    in_file = [size for size in in_file if _is_number(raw.get(size))]
    changes = chosen or value_at(command_line, "parallel3d.mesh") is not ABSENT
    if len(chosen) + len(in_file) < len(sizes) or not in_file or not changes:
        return []
    follows = in_file[-1]
    value = raw.pop(follows)
    return [f"{follows}: {value} in the file, follows from the command line instead"]


def _is_number(value: object) -> bool:
    try:
        return type(read_count(value)) in (int, float)
    except ValueError:
        return False


def full_path(path: str) -> str:
    """Return the path in the file for `path` on the command line.

    The prefix `parallel3d.` may be omitted if DeepSpeed has no key at that path:
    `checkpoint.every` is parallel3d's, `checkpoint.tag_validation` is DeepSpeed's.
    """
    section, _, inside = path.partition(".")
    if section not in Parallel3DConfig.model_fields:
        return path
    key = TOP_LEVEL.get(section)
    if key and (not inside or inside.partition(".")[0] in key.items):
        return path
    return f"parallel3d.{path}"
