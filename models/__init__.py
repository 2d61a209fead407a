"""Model families, found by folder name: `models/<family>/spec.py` and `blocks.py`."""

from importlib import import_module
from pathlib import Path
from typing import Any

from parallel3d.model import LayerSpec


def families() -> list[str]:
    """The names of the families found: every folder here that holds a spec.py."""
    return sorted(p.parent.name for p in Path(__file__).parent.glob("*/spec.py"))


def config_class(family: str) -> Any:
    """The family's frozen config class (`Config` in its spec.py)."""
    return import_module(f"models.{family}.spec").Config


def layers(config: Any) -> list[LayerSpec]:
    """The layers of a model, first to last, for a config of any family."""
    result: list[LayerSpec] = import_module(f"models.{config.family}.spec").layers(config)
    return result
