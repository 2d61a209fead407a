"""Descriptions of checkpoints, and of what is beside them."""

import re
from collections import Counter
from math import prod
from pathlib import Path

from parallel3d.base.errors import CheckpointError
from parallel3d.checkpoint.chunks import ChunkFile
from parallel3d.checkpoint.manifest import (
    MANIFEST,
    STATE,
    has_ema,
    optimizer_of,
    read_sound_state,
    shapes_of,
    step_folders,
)
from parallel3d.model import optimizers

LEFT_OVER = {
    ".tmp": "unfinished: a save in progress, or one that was killed",
    ".deleted": "partly deleted: an old checkpoint that is being removed",
    ".rejected": "set aside: the run resumed from an earlier step",
}
_STATE_KEYS = (
    "format",
    "step",
    "tokens",
    "next_sample",
    "optimizer_steps",
    "learning_rate",
    "loss_scale",
    "random",
    "corpus",
    "split",
    "tokenizer",
    "versions",
    "mesh",
    "config",
)


def find_checkpoints(path: Path) -> list[Path]:
    """Return the checkpoints at a path, newest first: one checkpoint, or all of a run.

    Raises CheckpointError if there is none.
    """
    if (path / MANIFEST).exists():
        return [path]
    for folder in (path / "checkpoints", path):
        steps = step_folders(folder)
        if steps:
            return [checkpoint for _, checkpoint in steps]
    if re.fullmatch(r"step-\d+", path.absolute().name) and path.is_dir():
        return [path]
    rest = "".join(f"; {folder.name} is {why}" for folder, why in find_leftovers(path))
    raise CheckpointError(
        f"{path}: no checkpoint there{rest}; name a folder step-N, or a run's folder"
    )


def find_leftovers(path: Path) -> list[tuple[Path, str]]:
    """Return the folders step-N.* of a run that are not checkpoints, each with the reason."""
    leftovers = []
    for folder in (path / "checkpoints", path):
        for left_over in sorted(folder.glob("step-*.*")):
            if left_over.suffix in LEFT_OVER and left_over.is_dir():
                leftovers.append((left_over, LEFT_OVER[left_over.suffix]))
    return leftovers


def describe(folder: Path) -> dict[str, object]:
    """Return the object that `inspect --json` prints; the tensors themselves are not read.

    Raises CheckpointError if the checkpoint is damaged.
    """
    entries, state = read_sound_state(folder)
    shapes = shapes_of(state)
    optimizer = optimizer_of(state)
    kinds = optimizers.kinds(optimizer, has_ema=has_ema(state)) if optimizer else ()
    sizes = Counter[str](dict.fromkeys(kinds, 0))
    files = []
    for name, entry in entries.items():
        row = {"file": name, "bytes": entry.size, "chunks": 0, "digest": entry.digest}
        files.append(row)
        if name != STATE:
            with ChunkFile(folder / name) as file:
                row["chunks"] = len(file.chunks)
                for chunk in file.chunks:
                    sizes[chunk.kind] += 4 * chunk.box.numel
    total = sum(entry.size for entry in entries.values())
    total += (folder / MANIFEST).stat().st_size
    return {
        "path": str(folder),
        **{key: state.get(key) for key in _STATE_KEYS},
        "num_parameters": len(shapes),
        "num_elements": sum(prod(shape) for shape in shapes.values()),
        "parameters": {name: list(shape) for name, shape in shapes.items()},
        "bytes": {**sizes, "other": total - sizes.total(), "total": total},
        "files": files,
    }
