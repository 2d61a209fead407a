"""A folder of weights that gets its name once all of its files are on disk."""

import os
import shutil
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from xxhash import xxh3_128_hexdigest

from parallel3d.base.atomic import rename, sync, sync_folder
from parallel3d.checkpoint.arrays import memory_of
from parallel3d.huggingface.weight_files import INDEX, WeightFiles
from parallel3d.mesh.nodes import appears


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
        data = memory_of(value)
        assert len(data) == place.size, name
        descriptor, done = self._descriptor(place.file), 0
        while done < len(data):  # one call takes 2 GiB at most
            done += os.pwrite(descriptor, data[done:], place.start + done)

    def close(self, synced: bool = True) -> None:
        """Close what this process wrote; with `synced`, once it is on disk."""
        try:
            if synced:
                for descriptor in self._open.values():
                    os.fsync(descriptor)
        finally:
            for descriptor in self._open.values():
                os.close(descriptor)
            self._open = {}

    def _descriptor(self, file: str) -> int:
        if file not in self._open:
            path = self._folder / file
            if not appears(path.is_file):
                raise OSError(f"{file} was made on another host, and is not here")
            self._open[file] = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        return self._open[file]


def create(folder: Path, layout: WeightFiles) -> None:
    """Make a new folder with the layout's files: their headers, and room for the tensors.

    What stood there under that name goes. Raises OSError.
    """
    remove(folder)
    folder.mkdir(parents=True)
    for file, header in layout.headers.items():
        # Everybody's as the umask has it, and not the writer's alone.
        descriptor = os.open(folder / file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            os.truncate(descriptor, layout.file_size(file))
            os.pwrite(descriptor, header, 0)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
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


class Stamp(NamedTuple):
    """The type and the shape of a tensor, and the 128-bit hash of its bytes.

    Of a NaN and of -0, too: stamps are equal where the bits are.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    digest: str


def stamp(value: Tensor) -> Stamp:
    """The stamp of a contiguous tensor of the host."""
    return Stamp(value.dtype, tuple(value.shape), xxh3_128_hexdigest(memory_of(value)))
