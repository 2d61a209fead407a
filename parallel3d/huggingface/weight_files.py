"""The files of a transformers folder: weights, and config, tokenizer and model card beside them.

The layout of the weights depends only on the model and the type. So several ranks can write into
one file, and equal weights produce equal bytes on every mesh.
"""

import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from itertools import accumulate
from math import frexp
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor

from parallel3d import models
from parallel3d.base.atomic import rename, sync, sync_folder
from parallel3d.base.counts import read_count
from parallel3d.base.errors import ConfigError
from parallel3d.base.masking import mask
from parallel3d.base.step_lines import METRICS, parsed
from parallel3d.checkpoint.chunks import empty, header_bytes, memory_of
from parallel3d.checkpoint.disk import remove_folder
from parallel3d.config import RunConfig
from parallel3d.data.tokenizer import TEMPLATES, TOKENIZER_SUFFIXES
from parallel3d.huggingface.beside import GENERATION, Beside, fill_in
from parallel3d.mesh.nodes import wait_until
from parallel3d.model.config import ModelConfig
from parallel3d.model.spec import ParamSpec, named_params
from parallel3d.models.common import Pretrained, pretrained_of

INDEX = "model.safetensors.index.json"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHARD_BYTES = 5 * 10**9

_CODES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclass(frozen=True)
class TensorPlace:
    """The place of a tensor in the files: a file, its first byte there, and its shape."""

    file: str
    start: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class WeightFiles:
    """The layout of a model's weights: `model.safetensors`, or shards of at most `shard_bytes`.

    A tensor larger than `shard_bytes` gets a shard of its own. Tensors have the names of
    transformers, or those of parallel3d if transformers has no class for the model.
    """

    config: ModelConfig
    dtype: torch.dtype = torch.float32
    shard_bytes: int = SHARD_BYTES

    @cached_property
    def refusal(self) -> str:
        """The reason why the model cannot have the format of transformers; "" if it can."""
        family = models.huggingface(self.config.family)
        if family is None:
            return f"the family {self.config.family!r} has no huggingface.py"
        try:
            family.architecture(self.config)
        except ValueError as error:
            return str(error)
        return self._inexact()

    def _inexact(self) -> str:
        """Return the reason why folding a multiplier would round weights of this type, or ""."""
        if self.dtype == torch.float32:
            return ""
        for name, spec in self._specs.items():
            for factor in spec.folded:
                if frexp(factor)[0] != 0.5:
                    return (
                        f"parallel3d.model.parametrization has the multiplier {factor:.6g}, which "
                        f"is folded into {name}: it is not a power of two, so {self.dtype} would "
                        "round the weights again; use --dtype fp32"
                    )
        return ""

    def converted(self, name: str, value: Tensor) -> dict[str, Tensor]:
        """Convert a full parameter to the tensors in the files, by name.

        The tensors are contiguous and of the layout's type.
        """
        tensors = {name: value}
        if not self.refusal:
            tensors = {name: fold(value, self._specs[name].folded)}
            tensors = models.to_files(self.config, tensors)
        return {n: _contiguous(tensor.to(self.dtype)) for n, tensor in tensors.items()}

    @cached_property
    def names(self) -> dict[str, tuple[str, ...]]:
        """Parameter -> its names in the files, in the order of the layers."""
        return {name: tuple(tensors) for name, tensors in self._meta.items()}

    @cached_property
    def files(self) -> dict[str, list[str]]:
        """File -> names of its tensors, in order."""
        split = split_state_dict_into_shards_factory(
            self._tensors,
            get_storage_size=lambda tensor: tensor.nbytes,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=self.shard_bytes,
        )
        return dict(split.filename_to_tensors)

    @cached_property
    def headers(self) -> dict[str, bytes]:
        """File -> its safetensors header."""
        headers = {}
        for file, names in self.files.items():
            entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
            for name in names:
                tensor = self._tensors[name]
                begin = self._offsets[name]
                entries[name] = {
                    "dtype": _CODES[self.dtype],
                    "shape": tuple(tensor.shape),
                    "data_offsets": (begin, begin + tensor.nbytes),
                }
            headers[file] = header_bytes(entries)
        return headers

    @cached_property
    def places(self) -> dict[str, TensorPlace]:
        """Name in the files -> place of the tensor."""
        places = {}
        for file, names in self.files.items():
            data = len(self.headers[file])
            for name in names:
                shape = tuple(self._tensors[name].shape)
                places[name] = TensorPlace(file, data + self._offsets[name], shape)
        return places

    @property
    def num_elements(self) -> int:
        """Number of elements of all tensors."""
        return sum(tensor.numel() for tensor in self._tensors.values())

    @property
    def total_size(self) -> int:
        """Bytes of all tensors."""
        return self.num_elements * self.dtype.itemsize

    def file_size(self, file: str) -> int:
        """Return the size of a file in bytes, including its header."""
        return len(self.headers[file]) + sum(self._tensors[n].nbytes for n in self.files[file])

    @property
    def index(self) -> str | None:
        """The text of the index file in the format of transformers; None for a single file."""
        if len(self.files) == 1:
            return None
        metadata = {"total_parameters": self.num_elements, "total_size": self.total_size}
        places = {name: place.file for name, place in self.places.items()}
        return json.dumps({"metadata": metadata, "weight_map": places}, indent=2, sort_keys=True)

    @cached_property
    def _offsets(self) -> dict[str, int]:
        """Name in the files -> offset of the tensor in the data of its file."""
        offsets = dict[str, int]()
        for names in self.files.values():
            sizes = (self._tensors[name].nbytes for name in names)
            offsets |= zip(names, accumulate(sizes, initial=0), strict=False)
        return offsets

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
        """All tensors of the files on the meta device, by name."""
        return {name: x for tensors in self._meta.values() for name, x in tensors.items()}


def _contiguous(value: Tensor) -> Tensor:
    if value.device.type != "cpu" or value.is_contiguous():
        return value.contiguous()
    return empty(value.shape, value.dtype).copy_(value)  # `empty` reuses memory


def fold(value: Tensor, factors: tuple[float, ...]) -> Tensor:
    """Multiply a parameter by its `ParamSpec.folded`: one factor, or one per index of dim 0."""
    if not factors:
        return value
    if len(factors) == 1:
        return value * factors[0]
    return value * value.new_tensor(factors).view(-1, *[1] * (value.dim() - 1))


def bytes_of(text: str) -> int:
    """Return the bytes of a size such as "5GB" (10^9 bytes); raise ConfigError for other text."""
    try:
        size = int(read_count(text, "bytes"))
    except ValueError:
        size = 0
    if not 0 < size < 10**18:
        raise ConfigError(f"--shard-size = {text[:40]}: must be a size such as 5GB; write 500MB")
    return size


def write_tensor(folder: Path, layout: WeightFiles, name: str, value: Tensor) -> None:
    """Write a tensor into the files that `create` has made. Raises OSError.

    Several processes may write different tensors into the same folder; the caller syncs the files.

    - `value`: contiguous, on the host, of the layout's type and shape.
    """
    place = layout.places[name]
    assert tuple(value.shape) == place.shape and value.dtype == layout.dtype, name
    path = folder / place.file
    if not wait_until(path.is_file):
        raise OSError(f"{place.file} was created on another node, and is not visible here")
    with open(path, "r+b") as file:
        file.seek(place.start)
        file.write(memory_of(value))


def create(folder: Path, layout: WeightFiles) -> None:
    """Create the folder and its files, with headers and space for the tensors. Raises OSError.

    An existing folder is removed first.
    """
    remove_folder(folder)
    folder.mkdir(parents=True)
    for name, header in layout.headers.items():
        with open(folder / name, "xb") as file:
            file.write(header)
            file.truncate(layout.file_size(name))
    if layout.index is not None:
        (folder / INDEX).write_text(f"{layout.index}\n", encoding="utf-8")


def publish(folder: Path, name: Path) -> None:
    """Rename a folder to its final name after syncing its files; replace an existing one."""
    for path in folder.iterdir():
        sync(path)
    sync_folder(folder)
    aside = name.with_name(f"{name.name}.deleted")
    remove_folder(aside)
    if name.exists():
        rename(name, aside)
    rename(folder, name)
    remove_folder(aside)


CONFIG = "config.json"
CARD = "README.md"
_LIBRARIES = "parallel3d", "torch", "deepspeed", "transformers"
# JSON files of a model, which may be in the same folder as a tokenizer.
_NOT_OF_A_TOKENIZER = {CONFIG, GENERATION}


@dataclass(frozen=True)
class About:
    """Facts about a model that are not in its weights."""

    config: RunConfig
    step: int
    tokens: int
    end_of_text: int | None = None
    """Id of the token between documents; None if unknown."""
    tokenizer: Path | None = None
    """Folder of the tokenizer's files; None for a corpus of token ids."""
    line: Mapping[str, object] = field(default_factory=dict)
    """The line of metrics.jsonl for `step`."""
    architecture: str | None = None
    """Name of the transformers class to use; None for that of the published model, if there is one,
    or else the default of the model family."""
    beside: Beside = field(default_factory=Beside)
    """Special ids and generation settings."""
    averaged: str = ""
    """A text about the average that the weights are; "" if they are those after `step`."""

    def settings(self, layout: WeightFiles) -> Any:
        """Return the transformers config of the model; None if transformers has no class for it.

        Raises ValueError if the model cannot have the class `architecture`.
        """
        if layout.refusal:
            return None
        family = models.huggingface(self.config.model.family)
        assert family is not None
        settings = self._settings_of_class(family)
        settings.dtype = str(layout.dtype).removeprefix("torch.")
        fill_in(settings, self.beside)
        return settings

    def _settings_of_class(self, family: Any) -> Any:
        """Return the transformers config of the requested class, or of the published one.

        A run may have settings that the published class lacks: then it is the family's default.
        """
        model = self.config.model
        if self.architecture is None and self.beside.architecture is not None:
            with suppress(ValueError):
                return family.architecture(model, self.end_of_text, self.beside.architecture)
        return family.architecture(model, self.end_of_text, self.architecture)


def write_rest(folder: Path, about: About, layout: WeightFiles) -> None:
    """Write all files except the weights into a folder. Raises OSError."""
    settings = about.settings(layout)
    if settings is not None:
        settings.save_pretrained(folder)
        about.beside.write(folder)
    copy_tokenizer(about.tokenizer, folder)
    (folder / CARD).write_text(mask(_card(about, layout, settings)), encoding="utf-8")


def copy_tokenizer(tokenizer: Path | None, folder: Path) -> None:
    """Copy a tokenizer's files into a folder. Raises OSError."""
    for path in tokenizer_files(tokenizer):
        assert tokenizer, "it has files"
        target = folder / path.relative_to(tokenizer)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)


def tokenizer_files(folder: Path | None) -> list[Path]:
    """Return the tokenizer's files in a folder, which may also contain a model.

    Chat templates beside the first one are in a folder of their own.
    """
    if folder is None or not folder.is_dir():
        return []
    return [
        path
        for path in [*sorted(folder.iterdir()), *sorted((folder / TEMPLATES).glob("*.jinja"))]
        if path.suffix in TOKENIZER_SUFFIXES
        and path.is_file()
        and path.name not in _NOT_OF_A_TOKENIZER
        and not path.name.endswith(".index.json")
    ]


def line_after(run: Path, step: int) -> dict[str, Any]:
    """Return the last line for `step` in a run's metrics.jsonl; {} if there is none."""
    with suppress(OSError), open(run / METRICS, encoding="utf-8", errors="replace") as file:
        return [{}, *(line for line, _ in parsed(file) if line["step"] == step)][-1]
    return {}


def _loss_in_words(loss: object) -> str:
    return f"{loss:.4f} nats" if isinstance(loss, int | float) else "unknown"


def _card(about: About, layout: WeightFiles, settings: Any) -> str:
    config = about.config
    parts = config.data.mixture or (config.data,)
    sources = ([p.source, *(p.paths or [p.name, p.subset or ""])] for p in parts)
    facts = {
        "parameters": f"{layout.num_elements:,}",
        "type": str(layout.dtype).removeprefix("torch."),
        "weights": about.averaged or "those after the last step",
        "steps": f"{about.step:,}",
        "tokens": f"{about.tokens:,}",
        "sequence length": f"{config.data.sequence_length:,}",
        "training loss of the last step": _loss_in_words(about.line.get("loss")),
        "held-out loss": _loss_in_words(about.line.get("held_out_loss")),
        "data": "; ".join(" ".join(filter(None, names)) for names in sources),
        "tokenizer": config.data.tokenizer if about.tokenizer is not None else "none",
        "versions": ", ".join(f"{name} {version(name)}" for name in _LIBRARIES),
    }
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    name = config.model.family
    remark = ""
    if settings is not None:
        name = settings.architectures[0]
    else:
        remark = (
            f"Transformers has no class for this model ({layout.refusal}). The tensors have "
            "parallel3d's names, and there is no config.json.\n\n"
        )
    origin = pretrained_of(config.model)
    head = ""
    if isinstance(origin, Pretrained):
        remark += f"Training began from the weights of {origin.folder}, whose license holds.\n\n"
        if origin.revision is not None:  # a model of the hub, which links the two by this line
            head = f"base_model: {origin.folder}\n"
    return f"""---
{head}library_name: transformers
pipeline_tag: text-generation
---
# {name}, trained with parallel3d

| | |
|---|---|
{rows}

{remark}The config of the run:

```json
{json.dumps(config.to_public_dict(), indent=1)}
```
"""
