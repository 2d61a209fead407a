"""Conversion of checkpoints and of published models to folders of transformers.

Each folder is read back and compared with its source before it gets its name.
"""

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from rich.filesize import decimal
from torch import Tensor

from parallel3d import models
from parallel3d.base.errors import ConfigError, TrainingError
from parallel3d.checkpoint.arrays import recycled
from parallel3d.checkpoint.free_space import disk_lacks
from parallel3d.config.pretrained import derived, read_config
from parallel3d.data.sources import Progress, silent
from parallel3d.huggingface.card import CARD, CONFIG, GENERATION, About, tokenizer_files, write_rest
from parallel3d.huggingface.published_weights import PublishedWeights
from parallel3d.huggingface.read_back import (
    Proof,
    Read,
    Stamp,
    prove,
    read_back,
    stamp,
    tensor_in,
    tensors_differ,
)
from parallel3d.huggingface.source import CheckpointSource
from parallel3d.huggingface.weight_files import (
    SHARD_BYTES,
    WeightFiles,
    Writer,
    create,
    publish,
    remove,
)
from parallel3d.models import pretrained


def quiet() -> None:
    """Have transformers load without progress bars and remarks."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def check_new(folder: Path) -> None:
    """Raise ConfigError unless `folder` can be created here, or exists and is empty."""
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise ConfigError(f"--to = {folder}: exists and is not empty; remove it, or name another")


def export(
    source: CheckpointSource, about: About, layout: WeightFiles, to: Path, progress: Progress
) -> Proof:
    """Write a checkpoint as a folder of transformers at `to`, and read all of it back.

    Two parameters at a time are in memory, one of them twice. Where a check fails, nothing is left.
    Raises ConfigError where `to` is not empty or transformers has no such class, CheckpointError
    for damage, TrainingError where the disk is full.
    """
    try:
        if layout.refusal:
            raise ValueError(layout.refusal)
        about.settings(layout)
    except ValueError as error:
        raise ConfigError(f"{source.folder}: {error}") from None

    def write(out: Path) -> Proof:
        stamps = write_tensors(source.read, layout, out, progress)
        source.check(progress)
        write_rest(out, about, layout)
        return read_back(out, source, about, layout, stamps, progress)

    return _made(to, layout, write)


def import_folder(
    folder: Path, to: Path, *, shard_bytes: int = SHARD_BYTES, progress: Progress = silent
) -> Proof:
    """Read a folder of transformers, and write one that `model.from_pretrained` takes.

    Each tensor keeps its type. Masks and a tied weight's copy, which old versions saved, are left
    out. Raises ConfigError for a model that cannot be trained here, else as `export` does.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: is no folder; name one that holds config.json")
    found = read_config(folder)
    block = derived(folder, found)
    config = models.config_class(block["family"]).model_validate(block)
    weights = PublishedWeights(folder, config)
    weights.check_tied()
    layout = WeightFiles(config, weights.dtype, shard_bytes)
    stamps: dict[str, Stamp] = {}

    def read(name: str) -> Tensor:
        value = weights.whole(name)
        for theirs in layout.names[name]:  # while the system still holds what was read
            stored = weights.stored[theirs]
            stamps[theirs] = stamp(tensor_in(stored.path, stored.name).to(layout.dtype))
        return value

    def write(out: Path) -> Proof:
        write_tensors(read, layout, out, progress)
        for path in _beside(folder):
            shutil.copyfile(path, out / path.name)
        tensors = f"{len(layout.places)} tensors against {folder}"
        return prove(
            pretrained.class_of(found),
            out,
            layout,
            {
                f"names, shapes, type and values of {tensors}": tensors_differ(
                    out, layout, stamps, progress
                ),
                "config.json, tokenizer and all else beside the weights": _rest(folder, out),
            },
            read=weights.whole,
            has_tokenizer=bool(tokenizer_files(folder)),
        )

    return _made(to, layout, write)


def _beside(folder: Path) -> list[Path]:
    """The files that go along with the weights."""
    others = (folder / name for name in (CONFIG, GENERATION, CARD, "LICENSE", "LICENSE.txt"))
    return [*(path for path in others if path.is_file()), *tokenizer_files(folder)]


def _rest(folder: Path, out: Path) -> Iterator[str]:
    for path in _beside(folder):
        there = out / path.name
        if not there.is_file() or there.read_bytes() != path.read_bytes():
            yield f"{path.name}: is not that of {folder}"


def _made(to: Path, layout: WeightFiles, write: Callable[[Path], Proof]) -> Proof:
    """Write and prove a folder with the layout's files; it gets its name if the proof holds."""
    to = to.resolve()  # "." has no name beside which another could stand
    check_new(to)
    unfinished = to.with_name(f"{to.name}.partial")
    try:
        if lacks := disk_lacks(to.parent, layout.total_size):
            raise OSError(f"the disk has {decimal(lacks)} too little room")
        create(unfinished, layout)
        proof = write(unfinished)
        if proof.ok:
            publish(unfinished, to)
    except OSError as error:
        raise TrainingError(
            f"{to} cannot be written ({error}); make room, or name another folder with --to"
        ) from error
    finally:
        remove(unfinished)
    return proof


def write_tensors(
    read: Read, layout: WeightFiles, folder: Path, progress: Progress
) -> dict[str, Stamp]:
    """Write every weight at its place in a folder that `create` has made. Raises OSError.

    `read` gives a parameter by our name, whole; meanwhile the one before it is converted and
    written. Returns the stamps of what was written, by the names in the files.
    """
    stamps: dict[str, Stamp] = {}
    with Writer(folder, layout) as writer, ThreadPoolExecutor(1) as behind, recycled():

        def write(name: str, value: Tensor) -> None:
            for theirs, tensor in layout.converted(name, value).items():
                stamps[theirs] = stamp(tensor)
                writer.write(theirs, tensor)

        written: Future[None] | None = None
        for done, name in enumerate(layout.names):
            progress("writing (tensors)", done, len(layout.names))
            value = read(name)
            if written is not None:
                written.result()
            written = behind.submit(write, name, value)
            del value  # with its writing it goes
        if written is not None:
            written.result()
    return stamps
