"""Export of a checkpoint to a folder of transformers, read back before it gets its name."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from parallel3d.base.errors import ConfigError, TrainingError
from parallel3d.checkpoint.arrays import recycled
from parallel3d.checkpoint.room import disk_lacks, shown
from parallel3d.data.sources import Progress
from parallel3d.huggingface.card import About, write_rest
from parallel3d.huggingface.files import Stamp, Writer, create, publish, remove, stamp
from parallel3d.huggingface.logits import Read
from parallel3d.huggingface.read_back import Proof, read_back
from parallel3d.huggingface.source import CheckpointSource
from parallel3d.huggingface.weight_files import WeightFiles


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
    where the checkpoint is damaged, TrainingError where the disk is full.
    """
    try:
        if layout.refusal:
            raise ValueError(layout.refusal)
        about.settings(layout)
    except ValueError as error:
        raise ConfigError(f"{source.folder}: {error}") from None

    def write(folder: Path) -> Proof:
        stamps = write_tensors(source.read, layout, folder, progress)
        source.check(progress)
        write_rest(folder, about, layout)
        return read_back(folder, source, about, layout, stamps, progress)

    return made(to, layout, write)


def made(to: Path, layout: WeightFiles, write: Callable[[Path], Proof]) -> Proof:
    """Write and prove a folder with the layout's files, and give it its name if the proof holds.

    Else nothing is left. Raises ConfigError where `to` is not empty, TrainingError where the disk
    is full.
    """
    to = to.resolve()  # "." has no name beside which another could stand
    check_new(to)
    unfinished = to.with_name(f"{to.name}.partial")
    try:
        if lacks := disk_lacks(to.parent, layout.total_size):
            raise OSError(f"the disk has {shown(lacks)} too little room")
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
    written. Gives the stamps of what was written, by the names in the files.
    """
    writer = Writer(folder, layout)
    stamps: dict[str, Stamp] = {}

    def write(name: str, value: Tensor) -> None:
        for theirs, tensor in layout.converted(name, value).items():
            stamps[theirs] = stamp(tensor)
            writer.write(theirs, tensor)

    try:
        with ThreadPoolExecutor(1) as behind, recycled():
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
    except BaseException:
        writer.close(synced=False)
        raise
    writer.close()
    return stamps
