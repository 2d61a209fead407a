"""Settings of the command line, set in the object of a ds.json."""

from collections.abc import Sequence
from typing import Any

from parallel3d.base import reader
from parallel3d.config import folders, pretrained
from parallel3d.config.short_paths import full_path

_NAMED = f"parallel3d.model.{pretrained.KEY}"


def apply_overrides(raw: dict[str, Any], overrides: Sequence[str]) -> list[str]:
    """Set `--a.b value` in `raw`, in place; gives notes on what else of it changed.

    A published model that is named by `--parallel3d.model.from_pretrained` takes the place of the
    model in `raw`, of which stays what no config.json fixes; its sizes are filled in. Settings of
    the model that are on the command line, too, are compared with it. Raises ConfigError.
    """
    alone: dict[str, Any] = {}
    reader.apply_overrides(alone, overrides, full_path)
    named = any(full_path(path) == _NAMED for path, _ in reader.pairs(overrides))
    model = alone["parallel3d"]["model"] if named else {}
    block = raw.get("parallel3d")
    beneath = block.get("model") if isinstance(block, dict) else None
    if not isinstance(model.get(pretrained.KEY), str) or not isinstance(beneath, dict):
        reader.apply_overrides(raw, overrides, full_path)
        return []
    del raw["parallel3d"]["model"]
    reader.apply_overrides(raw, overrides, full_path)
    folders.look_into(raw)  # a family of the user's own may be the model's
    return pretrained.fill(raw, beneath)
