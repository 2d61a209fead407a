"""The parameters of our model, read from the tensors of another program's checkpoint."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import isclose, prod
from typing import Any

import torch
from torch import Tensor

from parallel3d import models
from parallel3d.base.errors import CheckpointError
from parallel3d.checkpoint.chunks import empty
from parallel3d.config import CompleteConfig
from parallel3d.extras.foreign.checkpoints.names import Derived, Names
from parallel3d.extras.foreign.checkpoints.source import Source
from parallel3d.extras.foreign.checkpoints.tensors import FROM_WEIGHTS, KINDS
from parallel3d.model.spec import LayerSpec, ParamSpec, named_params, tied_names
from parallel3d.models.pretrained import Part

_WORDS = {"master": "weight", "exp_avg": "first moment", "exp_avg_sq": "second moment"}


class Parameters:
    """The source's tensors under our names."""

    def __init__(
        self, source: Source, config: CompleteConfig, names: Names, layers: Sequence[LayerSpec]
    ) -> None:
        self._source = source
        self._config = config.model
        self._family: Any = models.huggingface(config.model.family)
        self._tied = tied_names(layers)
        self.specs: dict[str, ParamSpec] = dict(named_params(layers))
        self._found = {
            kind: names.resolve(tensors, source.folder) if tensors else {}
            for kind, tensors in source.tensors.items()
        }
        self._check()

    def _parts(self, kind: str, name: str, shape: tuple[int, ...]) -> Sequence[Any]:
        """Return the parts of a parameter among the source's tensors; [] if one is missing."""
        found = self._found[kind]
        family = self._family
        forms = [family.parts(self._config, name, shape)]
        if hasattr(family, "packed"):
            forms.append((family.packed(self._config, name, shape),))
        else:
            forms.append(_stacked(name, shape, forms[0]))
        for parts in forms:
            if all(part.name in found for part in parts):
                return list(parts)
        return []

    def _check(self) -> None:
        """Raise CheckpointError unless each parameter has its weight and moments, in fp32."""
        folder = self._source.folder
        used: dict[str, set[str]] = {kind: set() for kind in KINDS}
        for name, spec in self.specs.items():
            for kind in KINDS:
                parts = self._parts(kind, name, spec.shape)
                if not parts:
                    first = self._family.parts(self._config, name, spec.shape)[0].name
                    hint = ""
                    if name.startswith("head.output"):
                        hint = ", or set parallel3d.model.tie_word_embeddings = true if it is tied"
                    raise CheckpointError(
                        f"{folder}: has no {_WORDS[kind]} of {first}; use a checkpoint of the "
                        f"whole model with its optimizer{hint}"
                    )
                for part in parts:
                    derived = self._found[kind][part.name]
                    used[kind].add(part.name)
                    self._check_tensor(kind, part, derived)
        for copy, original in self._tied.items():
            for part in self._family.parts(self._config, copy, self.specs[original].shape):
                used["exp_avg"].add(part.name)
        rest = [name for name in self._found["exp_avg"] if name not in used["exp_avg"]]
        if rest:
            raise CheckpointError(
                f"{folder}: has moments of {rest[0]}, which the model of the config does not have; "
                "set parallel3d.model to that of the run"
            )

    def _check_tensor(self, kind: str, part: Any, derived: Derived) -> None:
        tensor = derived.tensor
        place = f"{tensor.place}: the {_WORDS[kind]} of {part.name}"
        if tensor.dtype != torch.float32:
            raise CheckpointError(
                f"{place} is stored in {str(tensor.dtype).removeprefix('torch.')}, which has lost "
                "bits that AdamW needs; keep it in fp32 (the weights' masters, too), or "
                f"{FROM_WEIGHTS}"
            )
        problem = tensor.problem()
        if problem:
            raise CheckpointError(f"{place} {problem}; copy the whole folder")
        if prod(derived.shape) != prod(part.shape):
            raise CheckpointError(
                f"{place} has the shape {list(derived.shape)}, and {list(part.shape)} in "
                "parallel3d.model; set the sizes of the run"
            )

    def read(self, kind: str, name: str) -> Tensor:
        """Return a parameter's weight or moment in fp32."""
        shape = self.specs[name].shape
        out = empty(shape, torch.float32)
        for part in self._parts(kind, name, shape):
            value = self._found[kind][part.name].read()
            target = out[part.index] if part.index else out
            sizes = value.reshape(part.shape).permute(part.order)
            target.copy_(sizes.reshape(target.shape))
        return out

    def other_decays(self, weight_decay: float) -> Iterator[tuple[str, float, float]]:
        """Yield parameters with another weight decay: name, the source's, the config's."""
        names = {id(tensor): own for own, tensor in self._source.tensors["exp_avg"].items()}
        for name, spec in self.specs.items():
            own = weight_decay if spec.weight_decay else 0.0
            for part in self._parts("exp_avg", name, spec.shape)[:1]:
                foreign = names[id(self._found["exp_avg"][part.name].tensor)]
                said = self._source.decays.get(foreign)
                if said is not None and not isclose(said, own, rel_tol=1e-9):
                    yield foreign, said, own

    def check_tied(self) -> None:
        """Raise CheckpointError if a weight is stored twice with different values."""
        masters = self._found["master"]
        for copy, original in self._tied.items():
            shape = self.specs[original].shape
            (first,) = self._family.parts(self._config, original, shape)
            (second,) = self._family.parts(self._config, copy, shape)
            if second.name in masters and second.name != first.name:
                both = masters[first.name].read(), masters[second.name].read()
                self._refuse_different(first.name, second.name, *both)
        for name, derived in masters.items():
            for other in derived.tensor.copies:
                here = f"{name} in {derived.tensor.place}"
                self._refuse_different(here, other.place, derived.tensor.read(), other.read())

    def _refuse_different(self, first: str, second: str, one: Tensor, other: Tensor) -> None:
        if not torch.equal(one, other):
            raise CheckpointError(
                f"{self._source.folder}: {first} and {second} are one tied weight, but differ by "
                f"up to {float((one - other).abs().max()):.2g}; set "
                "parallel3d.model.tie_word_embeddings = false if the run had two"
            )


def _stacked(name: str, shape: tuple[int, ...], parts: Sequence[Part]) -> Sequence[Part]:
    """Return the tensor of transformers' modules, which stack the matrices that files divide.

    - `parts`: the tensors in files.
    """
    own = parts[0].name.replace("block_sparse_moe.", "mlp.")
    if ".experts." not in own:
        return [replace(part, name=own) for part in parts[:1]] if len(parts) == 1 else parts
    matrix = "gate_up_proj" if "gate_up" in name else "down_proj"
    own = f"{own.partition('.experts.')[0]}.experts.{matrix}"
    return [Part(own, shape, tuple(range(len(shape))))]
