"""Places of the weights in a folder of transformers: a pure function of the model and the type.

No tensor is needed for it, so ranks that hold parts of a model write into one file, and the same
weights are the same bytes from every mesh, ZeRO stage and offload.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import frexp, prod
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor

from parallel3d import models
from parallel3d.base.errors import ConfigError
from parallel3d.checkpoint.arrays import empty
from parallel3d.checkpoint.chunks import framed
from parallel3d.model.spec import ParamSpec, named_params

INDEX = "model.safetensors.index.json"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHARD_BYTES = 5 * 10**9

_CODES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@dataclass(frozen=True)
class TensorPlace:
    """The place of a tensor of a `shape`: its file, and its bytes [start, start + size) there."""

    file: str
    start: int
    size: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class WeightFiles:
    """The files of a model's weights: `model.safetensors`, or shards of at most `shard_bytes`.

    `config` is the model's. A tensor that is larger than a shard has one of its own. Weights bear
    the names of transformers; where it has no class for the model, ours.
    """

    config: Any
    dtype: torch.dtype = torch.float32
    shard_bytes: int = SHARD_BYTES

    @cached_property
    def refusal(self) -> str:
        """Why transformers has no class for this model; "" where it has one."""
        family = models.huggingface(self.config.family)
        if family is None:
            return f"the family {self.config.family!r} has no huggingface.py"
        try:
            family.architecture(self.config)
        except ValueError as error:
            return str(error)
        return self._inexact()

    def _inexact(self) -> str:
        """Which multiplier weights of this type cannot take without being rounded anew; else ""."""
        for name, spec in self._specs.items() if self.dtype != torch.float32 else ():
            if factor := next((f for f in spec.folded if frexp(f)[0] != 0.5), None):
                return (
                    f"parallel3d.model.parametrization multiplies by {factor:.6g}, to be folded "
                    f"into {name}: no power of two, so {self.dtype} would round it anew; use "
                    "--dtype fp32"
                )
        return ""

    def converted(self, name: str, value: Tensor) -> dict[str, Tensor]:
        """A whole parameter of ours -> tensors under transformers' names, of the layout's type.

        Each is contiguous, where the value is not on the meta device; none is larger than it.
        """
        found = {name: value}
        if not self.refusal:
            found = {name: fold(value, self._specs[name].folded)}
            family = models.huggingface(self.config.family)
            assert family is not None
            found = family.to_huggingface(self.config, found)
        return {n: _contiguous(tensor.to(self.dtype)) for n, tensor in found.items()}

    @cached_property
    def names(self) -> dict[str, tuple[str, ...]]:
        """For each parameter of ours, in the order of the layers, its names in the files."""
        return {name: tuple(found) for name, found in self._meta.items()}

    @cached_property
    def files(self) -> dict[str, list[str]]:
        """Each file, and the tensors in it in their order."""
        tensors = {n: t for found in self._meta.values() for n, t in found.items()}
        split = split_state_dict_into_shards_factory(
            tensors,
            get_storage_size=lambda tensor: tensor.nbytes,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=self.shard_bytes,
        )
        return dict(split.filename_to_tensors)

    @cached_property
    def headers(self) -> dict[str, bytes]:
        """The header of each file."""
        found = {}
        for file, names in self.files.items():
            entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
            at = 0
            for name in names:
                size = self._sizes[name]
                offsets = at, at + size
                entries[name] = {
                    "dtype": _CODES[self.dtype],
                    "shape": self._shapes[name],
                    "data_offsets": offsets,
                }
                at += size
            found[file] = framed(entries)
        return found

    @cached_property
    def places(self) -> dict[str, TensorPlace]:
        """The place of each tensor."""
        found = {}
        for file, names in self.files.items():
            at = len(self.headers[file])
            for name in names:
                found[name] = TensorPlace(file, at, self._sizes[name], self._shapes[name])
                at += self._sizes[name]
        return found

    @property
    def total_size(self) -> int:
        """Bytes of all tensors together."""
        return sum(self._sizes.values())

    def file_size(self, file: str) -> int:
        """Bytes of one whole file, its header included."""
        return len(self.headers[file]) + sum(self._sizes[name] for name in self.files[file])

    @property
    def index(self) -> str | None:
        """The text of the index, as transformers writes it; None for a single file."""
        if len(self.files) == 1:
            return None
        metadata = {
            "total_parameters": sum(map(prod, self._shapes.values())),
            "total_size": self.total_size,
        }
        places = {name: place.file for name, place in self.places.items()}
        return json.dumps({"metadata": metadata, "weight_map": places}, indent=2, sort_keys=True)

    @cached_property
    def _meta(self) -> Mapping[str, dict[str, Tensor]]:
        return {
            name: self.converted(name, torch.empty(spec.shape, device="meta"))
            for name, spec in self._specs.items()
        }

    @cached_property
    def _specs(self) -> dict[str, ParamSpec]:
        return named_params(models.layers(self.config))

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {n: tuple(t.shape) for found in self._meta.values() for n, t in found.items()}

    @cached_property
    def _sizes(self) -> dict[str, int]:
        return {n: t.nbytes for found in self._meta.values() for n, t in found.items()}


def _contiguous(value: Tensor) -> Tensor:
    if value.device.type != "cpu" or value.is_contiguous():
        return value.contiguous()
    return empty(value.shape, value.dtype).copy_(value)


def fold(value: Tensor, factors: tuple[float, ...]) -> Tensor:
    """A parameter with its `ParamSpec.folded` multiplied in; by each index of its first dim."""
    if not factors:
        return value
    if len(factors) == 1:
        return value * factors[0]
    each = value.new_tensor(factors)
    return value * each.view(-1, *[1] * (value.dim() - 1))


def bytes_of(text: str) -> int:
    """Bytes of a size in words such as 5GB, in units of a thousand; raises ConfigError."""
    match = re.fullmatch(r"(\d{1,15}) ?([KMGT]B|)", text, re.ASCII | re.IGNORECASE)
    size = int(match[1]) * _UNITS[match[2].upper()] if match else 0
    if size < 1:
        raise ConfigError(f"--shard-size = {text[:40]}: is no size; write 5GB, or 500MB")
    return size
