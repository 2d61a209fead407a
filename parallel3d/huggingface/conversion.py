"""Convert checkpoints and published models to folders that transformers loads.

Each folder is read back and compared with its source before it gets its final name.
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
from parallel3d.checkpoint.free_space import missing_disk_bytes
from parallel3d.config.pretrained import derive_model_block, read_config
from parallel3d.data.sources import Progress, no_progress
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
    """Turn off the progress bars and warnings of transformers."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def check_new(folder: Path) -> None:
    """Raise ConfigError if `folder` exists and is not an empty folder."""
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise ConfigError(f"--to = {folder}: exists and is not empty; remove it, or name another")


def export(
    source: CheckpointSource, about: About, layout: WeightFiles, to: Path, progress: Progress
) -> Proof:
    """Export a checkpoint to a folder that transformers loads, and check it by reading it back.

    Memory holds at most two parameters, one of them twice. If a check fails, nothing is left at
    `to`.

    Raises:
        ConfigError: `to` is not empty, or transformers has no class for the model.
        CheckpointError: the checkpoint is damaged.
        TrainingError: the disk is full.
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

    return _publish_if_proved(to, layout, write)


def import_folder(
    folder: Path, to: Path, *, shard_bytes: int = SHARD_BYTES, progress: Progress = no_progress
) -> Proof:
    """Convert a transformers folder to one that `model.from_pretrained` reads, and check it.

    Tensors keep their types. Attention masks and copies of tied weights, which old versions of
    transformers saved, are left out. Raises ConfigError for an unsupported model, otherwise the
    errors of `export`.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: is not a folder; name one that contains config.json")
    settings = read_config(folder)
    block = derive_model_block(folder, settings)
    config = models.config_class(block["family"]).model_validate(block)
    weights = PublishedWeights(folder, config)
    weights.check_tied()
    layout = WeightFiles(config, weights.dtype, shard_bytes)
    stamps: dict[str, Stamp] = {}

    def read(name: str) -> Tensor:
        value = weights.read_whole(name)
        for stored_name in layout.names[name]:  # now, while the file is in the page cache
            stored = weights.stored[stored_name]
            stamps[stored_name] = stamp(tensor_in(stored.path, stored.name).to(layout.dtype))
        return value

    def write(out: Path) -> Proof:
        write_tensors(read, layout, out, progress)
        for path in _other_files(folder):
            shutil.copyfile(path, out / path.name)
        tensors = f"{len(layout.places)} tensors against {folder}"
        return prove(
            pretrained.class_of(settings),
            out,
            layout,
            {
                f"names, shapes, type and values of {tensors}": tensors_differ(
                    out, layout, stamps, progress
                ),
                "config.json, tokenizer and other files": _other_files_differ(folder, out),
            },
            read=weights.read_whole,
            has_tokenizer=bool(tokenizer_files(folder)),
        )

    return _publish_if_proved(to, layout, write)


def _other_files(folder: Path) -> list[Path]:
    """Return the files to copy along with the weights."""
    others = (folder / name for name in (CONFIG, GENERATION, CARD, "LICENSE", "LICENSE.txt"))
    return [*(path for path in others if path.is_file()), *tokenizer_files(folder)]


def _other_files_differ(folder: Path, out: Path) -> Iterator[str]:
    for path in _other_files(folder):
        copy = out / path.name
        if not copy.is_file() or copy.read_bytes() != path.read_bytes():
            yield f"{path.name}: differs from the file in {folder}"


def _publish_if_proved(to: Path, layout: WeightFiles, write: Callable[[Path], Proof]) -> Proof:
    """Write a folder under a temporary name, and rename it to `to` if its proof holds.

    write: writes the weights and other files into the folder and returns the proof.
    """
    to = to.resolve()  # "." has no name to derive the temporary one from
    check_new(to)
    unfinished = to.with_name(f"{to.name}.partial")
    try:
        if lacks := missing_disk_bytes(to.parent, layout.total_size):
            raise OSError(f"the disk needs {decimal(lacks)} more free space")
        create(unfinished, layout)
        proof = write(unfinished)
        if proof.ok:
            publish(unfinished, to)
    except OSError as error:
        raise TrainingError(
            f"cannot write {to} ({error}); free some space, or name another folder with --to"
        ) from error
    finally:
        remove(unfinished)
    return proof


def write_tensors(
    read: Read, layout: WeightFiles, folder: Path, progress: Progress
) -> dict[str, Stamp]:
    """Write every weight into the files that `create` has made. Raises OSError.

    While `read` reads one parameter, a thread converts and writes the one before. Returns name in
    the files -> stamp of the written tensor.
    """
    stamps: dict[str, Stamp] = {}
    with Writer(folder, layout) as writer, ThreadPoolExecutor(1) as behind, recycled():

        def write(name: str, value: Tensor) -> None:
            for stored_name, tensor in layout.converted(name, value).items():
                stamps[stored_name] = stamp(tensor)
                writer.write(stored_name, tensor)

        written: Future[None] | None = None
        for done, name in enumerate(layout.names):
            progress("writing (tensors)", done, len(layout.names))
            value = read(name)
            if written is not None:
                written.result()
            written = behind.submit(write, name, value)
            del value  # the writing thread frees it
        if written is not None:
            written.result()
    return stamps
