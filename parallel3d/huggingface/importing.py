"""Import of a published model's folder as a start for training, proved to have equal weights."""

import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from parallel3d import models
from parallel3d.base.errors import ConfigError
from parallel3d.config.pretrained import derived, read_config
from parallel3d.data.sources import Progress, silent
from parallel3d.huggingface.card import CARD, CONFIG, GENERATION, tokenizer_files
from parallel3d.huggingface.export import made, write_tensors
from parallel3d.huggingface.files import Stamp, stamp
from parallel3d.huggingface.header import StoredTensor
from parallel3d.huggingface.published_weights import PublishedWeights
from parallel3d.huggingface.read_back import (
    LARGE,
    LOGITS,
    Check,
    Proof,
    is_large,
    loading_differs,
    logits_differ,
    prove,
    tensors_differ,
)
from parallel3d.huggingface.weight_files import SHARD_BYTES, WeightFiles
from parallel3d.models import pretrained


def import_folder(
    folder: Path, to: Path, *, shard_bytes: int = SHARD_BYTES, progress: Progress = silent
) -> Proof:
    """Read a folder of transformers, and write one that `model.from_pretrained` takes.

    Two parameters at a time are in memory; each tensor has the type that it had. What was only
    there for old versions goes: masks, a tied weight's copy. Where a check fails, nothing is left.
    Raises ConfigError for a model that cannot be trained here, CheckpointError where a file is
    damaged, TrainingError where the disk is full.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: is no folder; name one that holds config.json")
    found = read_config(folder)
    block = derived(folder, found)
    config = models.config_class(block["family"]).model_validate(block)
    with PublishedWeights(folder, config) as weights:
        weights.check_tied()
        layout = WeightFiles(config, weights.dtype, shard_bytes)

        stored = weights.stored
        stamps: dict[str, Stamp] = {}

        def original(theirs: str) -> Tensor:
            return _read(stored[theirs]).to(layout.dtype)

        def read(name: str) -> Tensor:
            value = weights.whole(name)
            for theirs in layout.names[name]:  # while the system still holds what was read
                stamps[theirs] = stamp(original(theirs))
            return value

        def write(out: Path) -> Proof:
            write_tensors(read, layout, out, progress)
            for path in _beside(folder):
                shutil.copyfile(path, out / path.name)
            differ = tensors_differ(out, layout, stamps, original, progress)
            return _proof(folder, out, weights, layout, differ)

        return made(to, layout, write)


def _proof(
    folder: Path,
    out: Path,
    weights: PublishedWeights,
    layout: WeightFiles,
    differences: Iterator[str],
) -> Proof:
    """What was written against the folder itself, and our modules against transformers' class."""
    name = pretrained.class_of(read_config(folder))
    count = len(layout.places)
    checks: dict[str, Check] = {
        f"names, shapes, type and values of {count} tensors against {folder}": lambda: differences,
        "config.json, tokenizer and all else beside the weights": lambda: _rest(folder, out),
        f"{name} loads with nothing missing, unexpected or mismatched": lambda: loading_differs(
            out, name
        ),
    }
    left_out = [] if tokenizer_files(folder) else ["tokenizer: there is none"]
    if is_large(layout):
        left_out.append(LARGE)
    else:
        checks[LOGITS] = lambda: logits_differ(out, weights.whole, layout)
    return prove(name, layout, checks, left_out)


def _read(stored: StoredTensor) -> Tensor:
    """A tensor of a published folder, as the library of safetensors reads it."""
    # Opened anew, so that what is mapped of it is let go of.
    with safe_open(stored.file.path, "pt") as opened:
        value: Tensor = opened.get_tensor(stored.name)
        return value


def _beside(folder: Path) -> list[Path]:
    """The files that go along with the weights."""
    others = (folder / name for name in (CONFIG, GENERATION, CARD, "LICENSE", "LICENSE.txt"))
    return [*(path for path in others if path.is_file()), *tokenizer_files(folder)]


def _rest(folder: Path, out: Path) -> Iterator[str]:
    for path in _beside(folder):
        there = out / path.name
        if not there.is_file() or there.read_bytes() != path.read_bytes():
            yield f"{path.name}: is not that of {folder}"
