"""Model families, found by folder name: `models/<family>/spec.py` and `blocks.py`.

A family may add `huggingface.py`: its architecture and parameter names in transformers.
"""

from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from parallel3d.base import user_folders
from parallel3d.base.section import Problem, Problems
from parallel3d.model.config import ModelConfig
from parallel3d.model.parametrization import parametrization_of
from parallel3d.model.spec import LayerSpec, Shape, count_params, named_params

__path__ += user_folders.from_environment(user_folders.MODELS)


def families() -> list[str]:
    """Return the names of all families: every folder, here or of the user's, with a spec.py."""
    specs = [spec for folder in __path__ for spec in Path(folder).glob("*/spec.py")]
    return sorted({spec.parent.name for spec in specs})


def config_class(family: str) -> Any:
    """Return the family's frozen config class (`Config` in its spec.py)."""
    return _spec(family).Config


def small(config: ModelConfig, tp: Sequence[int], sizes: Mapping[str, object]) -> dict[str, object]:
    """Return the family's own settings in a model that `verify` trains, by name.

    - `config`: the model with small sizes that fit most families (parallel3d/verify/shrink.py).
    - `tp`: the sizes of the tensor-parallel groups that train it.
    - `sizes`: the small sizes by their names in Hugging Face's configs.

    A family's spec.py may have `small`; {} if it has none.
    """
    own = getattr(_spec(config.family), "small", None)
    return dict(own(config, tp, sizes)) if own else {}


def layers(config: ModelConfig) -> list[LayerSpec]:
    """Return the layers of a model of any family, first to last."""
    specs: list[LayerSpec] = _spec(config.family).layers(config)
    kind = parametrization_of(config).type
    if kind != "standard":
        params = named_params(specs)
        problems = [_lacks_role(name, kind) for name in params if params[name].role is None]
        if problems:
            raise Problems(problems)
    return specs


def _lacks_role(name: str, kind: str) -> Problem:
    return Problem(
        "parallel3d.model.parametrization.type",
        kind,
        f"needs the role of every parameter; the family declares none for {name}",
        'declare it in its ParamSpec (docs/add-a-model.md), or use "standard"',
    )


def most_keys(config: ModelConfig, seq: int) -> tuple[int, ...]:
    """Return the most keys that a token attends to, for each layer with attention."""
    kernels = [layer.cost(Shape(1, seq)).forward.attention for layer in layers(config)]
    return tuple(kernel.keys for kernel in kernels if kernel is not None)


def num_params(config: ModelConfig, active: bool = False) -> int:
    """Return the number of parameters of a model, or of those that each token uses (`active`).

    A tied copy is counted once. All parameters of a dense model are active.
    """
    return count_params(layers(config), active)


def train_flops_per_token(config: ModelConfig, seq: int) -> float:
    """Return the FLOPs of forward and backward per token of a sequence of length `seq`.

    They are those of the active parameters: a layer's cost counts the products that tokens enter.
    """
    return sum(layer.cost(Shape(1, seq)).train_flops for layer in layers(config)) / seq


def huggingface(family: str) -> ModuleType | None:
    """Return the family's `huggingface` module, which loads torch; None if it has none."""
    return find_part(family, "huggingface")


def to_files(config: ModelConfig, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors in files for some full parameters, by name.

    A family's `to_files` has those that the modules of transformers have under other names.
    """
    family: Any = huggingface(config.family)
    convert = getattr(family, "to_files", family.to_huggingface)
    return dict(convert(config, weights))


def find_part(family: str, part: str) -> ModuleType | None:
    """Return a module that a family may have; None if it has none."""
    name = f"parallel3d.models.{family}.{part}"
    return import_module(name) if find_spec(name) else None


def _spec(family: str) -> ModuleType:
    return import_module(f"parallel3d.models.{family}.spec")
