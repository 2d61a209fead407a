"""Model families, found by folder name: `models/<family>/spec.py` and `blocks.py`.

A family may bring `huggingface.py`: its architecture and its names in transformers.
"""

import os
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from parallel3d.base import user_folders
from parallel3d.base.section import Problem, Problems
from parallel3d.model.parametrization import parametrization_of
from parallel3d.model.spec import LayerSpec, Shape, named_params

__path__ += user_folders.from_environment(user_folders.MODELS)


def families() -> list[str]:
    """The names of the families found: every folder, here or of the user's, with a spec.py."""
    names = {name for folder in __path__ if os.path.isdir(folder) for name in os.listdir(folder)}
    return sorted(n for n in names if any(os.path.isfile(f"{f}/{n}/spec.py") for f in __path__))


def config_class(family: str) -> Any:
    """The family's frozen config class (`Config` in its spec.py)."""
    return import_module(f"parallel3d.models.{family}.spec").Config


def layers(config: Any) -> list[LayerSpec]:
    """The layers of a model, first to last, for a config of any family."""
    result: list[LayerSpec] = import_module(f"parallel3d.models.{config.family}.spec").layers(
        config
    )
    if (kind := parametrization_of(config).type) != "standard":
        for name, p in named_params(result).items():
            if p.role is None:
                rule = f"needs the role of each parameter, and the family states none of {name}"
                remedy = 'state it in its ParamSpec (docs/add-a-model.md), or use "standard"'
                path = "parallel3d.model.parametrization.type"
                raise Problems([Problem(path, kind, rule, remedy)])
    return result


def num_params(config: Any) -> int:
    """Parameters of a model of any family; a tied copy is counted once."""
    return sum(layer.num_params for layer in layers(config))


def train_flops_per_token(config: Any, seq: int) -> float:
    """FLOPs of forward and backward for one token of a sequence of length `seq`."""
    return sum(layer.cost(Shape(1, seq)).train_flops for layer in layers(config)) / seq


def huggingface(family: str) -> ModuleType | None:
    """The family's `huggingface` module (torch's floor); None where it has none."""
    name = f"parallel3d.models.{family}.huggingface"
    return import_module(name) if find_spec(name) else None
