"""Settings of the command line, set in the object of a ds.json."""

from collections.abc import Sequence
from typing import Any

from parallel3d.base import reader
from parallel3d.config import folders, pretrained
from parallel3d.config.deepspeed_keys import TOP_LEVEL
from parallel3d.config.parallel3d_block import Parallel3DConfig


def apply_overrides(raw: dict[str, Any], overrides: Sequence[str]) -> list[str]:
    """Set `--a.b value` in `raw`, in place; gives notes on what else of it changed.

    A published model that is named by `--parallel3d.model.from_pretrained` takes the place of the
    model in `raw`, of which stays what no config.json fixes; its sizes are filled in. Settings of
    the model that are on the command line, too, are compared with it. Raises ConfigError.
    """
    alone: dict[str, Any] = {}
    values = [(full_path(path), text) for path, text in reader.pairs(overrides)]
    reader.set_values(alone, values)
    named, beneath = reader.at(alone, pretrained.PATH), reader.at(raw, "parallel3d.model")
    if not isinstance(named, str) or not isinstance(beneath, dict):
        reader.set_values(raw, values)
        return []
    del raw["parallel3d"]["model"]
    reader.set_values(raw, values)
    folders.look_into(raw)  # a family of the user's own may be the model's
    return pretrained.fill(raw, beneath)


def full_path(path: str) -> str:
    """The path in the file that `path` on the command line means.

    A path below `parallel3d.` needs no prefix where no key of DeepSpeed's has it: DeepSpeed has
    blocks `checkpoint` and `pipeline` of its own, so that `checkpoint.every` is parallel3d's and
    `checkpoint.tag_validation` is DeepSpeed's.
    """
    section, _, inside = path.partition(".")
    if section not in Parallel3DConfig.model_fields:
        return path
    theirs = TOP_LEVEL.get(section)
    if theirs and (not inside or inside.partition(".")[0] in theirs.items):
        return path
    return f"parallel3d.{path}"
