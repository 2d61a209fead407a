"""Files of weights in a folder of transformers: where each tensor lies, and how it is written.

The places are a pure function of the model and the type, so ranks that hold parts of a model write
into one file, and the same weights are the same bytes from every mesh.
"""

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import frexp
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor

from parallel3d import models
from parallel3d.base.atomic import rename, sync, sync_folder
from parallel3d.base.errors import ConfigError
from parallel3d.checkpoint.arrays import empty, memory_of
from parallel3d.checkpoint.chunks import framed
from parallel3d.mesh.nodes import appears
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
        """A whole parameter of ours -> contiguous tensors of the layout's type in transformers."""
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
        split = split_state_dict_into_shards_factory(
            self._tensors,
            get_storage_size=lambda tensor: tensor.nbytes,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=self.shard_bytes,
        )
        return dict(split.filename_to_tensors)

    @cached_property
    def headers(self) -> dict[str, bytes]:
        """The header of each file."""
        headers = {}
        for file, names in self.files.items():
            entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
            at = 0
            for name in names:
                tensor = self._tensors[name]
                entries[name] = {
                    "dtype": _CODES[self.dtype],
                    "shape": tuple(tensor.shape),
                    "data_offsets": (at, at + tensor.nbytes),
                }
                at += tensor.nbytes
            headers[file] = framed(entries)
        return headers

    @cached_property
    def places(self) -> dict[str, TensorPlace]:
        """The place of each tensor."""
        places = {}
        for file, names in self.files.items():
            at = len(self.headers[file])
            for name in names:
                tensor = self._tensors[name]
                places[name] = TensorPlace(file, at, tensor.nbytes, tuple(tensor.shape))
                at += tensor.nbytes
        return places

    @property
    def total_size(self) -> int:
        """Bytes of all tensors together."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    @property
    def num_elements(self) -> int:
        """Number of elements of all tensors together."""
        return sum(tensor.numel() for tensor in self._tensors.values())

    def file_size(self, file: str) -> int:
        """Bytes of one whole file, its header included."""
        return len(self.headers[file]) + sum(self._tensors[n].nbytes for n in self.files[file])

    @property
    def index(self) -> str | None:
        """The text of the index, as transformers writes it; None for a single file."""
        if len(self.files) == 1:
            return None
        metadata = {"total_parameters": self.num_elements, "total_size": self.total_size}
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
    def _tensors(self) -> dict[str, Tensor]:
        """Every tensor of the files, on the meta device."""
        return {n: t for found in self._meta.values() for n, t in found.items()}


def _contiguous(value: Tensor) -> Tensor:
    if value.device.type != "cpu" or value.is_contiguous():
        return value.contiguous()
    return empty(value.shape, value.dtype).copy_(value)  # memory that is used again


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


class Writer:
    """A writer of tensors at their places in the files of a folder that `create` has made.

    Several processes may write into one folder, each its own tensors. Raises OSError.
    """

    def __init__(self, folder: Path, layout: WeightFiles) -> None:
        self._folder, self._layout = folder, layout
        self._open: dict[str, int] = {}

    def write(self, name: str, value: Tensor) -> None:
        """Write a contiguous host tensor of the layout's type and of its shape."""
        place = self._layout.places[name]
        assert tuple(value.shape) == place.shape and value.dtype == self._layout.dtype, name
        if place.file not in self._open:
            path = self._folder / place.file
            if not appears(path.is_file):
                raise OSError(f"{place.file} was made on another host, and is not here")
            self._open[place.file] = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        data, done = memory_of(value), 0
        while done < len(data):  # one call takes 2 GiB at most
            done += os.pwrite(self._open[place.file], data[done:], place.start + done)

    def close(self, synced: bool = True) -> None:
        """Close what this process wrote; with `synced`, once it is on disk."""
        try:
            for descriptor in self._open.values() if synced else ():
                os.fsync(descriptor)
        finally:
            for descriptor in self._open.values():
                os.close(descriptor)
            self._open = {}

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        self.close(synced=kind is None)


def create(folder: Path, layout: WeightFiles) -> None:
    """Make a new folder with the layout's files: their headers, and room for the tensors.

    An older folder of that name goes. Raises OSError.
    """
    remove(folder)
    folder.mkdir(parents=True)
    for name, header in layout.headers.items():
        with open(folder / name, "xb") as file:
            file.write(header)
            file.truncate(layout.file_size(name))
    if layout.index is not None:
        (folder / INDEX).write_text(f"{layout.index}\n", encoding="utf-8")


def publish(folder: Path, name: Path) -> None:
    """Give a folder its name, in the place of one that stood there; all is on disk before."""
    for path in folder.iterdir():
        sync(path)
    sync_folder(folder)
    aside = name.with_name(f"{name.name}.deleted")
    remove(aside)
    if name.exists():
        rename(name, aside)
    rename(folder, name)
    remove(aside)


def remove(folder: Path) -> None:
    """Remove a folder that this program made, if it exists."""
    if folder.is_dir():
        shutil.rmtree(folder)
