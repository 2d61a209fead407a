"""Descriptions of checkpoints, for people and for scripts."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.filesize import decimal

from parallel3d.base import terminal
from parallel3d.base.errors import CheckpointError
from parallel3d.base.terminal import Column
from parallel3d.checkpoint.chunks import KINDS, ChunkFile
from parallel3d.checkpoint.manifest import (
    MANIFEST,
    STATE,
    read_sound_state,
    shapes_of,
    step_folders,
)

LEFT_OVER = {
    ".tmp": "unfinished: a save under way, or one that was killed",
    ".deleted": "half deleted: an old checkpoint on its way out",
    ".rejected": "set aside: a run went on from an earlier step",
}
_STATE_KEYS = (
    *("format", "step", "tokens", "next_sample", "optimizer_steps", "learning_rate", "loss_scale"),
    *("random", "corpus", "split", "tokenizer", "versions", "mesh", "config"),
)
_MODEL_KEYS = "family", "num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size"
_KIND_NAMES = {
    "master": "weights (master)",
    "exp_avg": "Adam's first moments (exp_avg)",
    "exp_avg_sq": "second moments (exp_avg_sq)",
}
_MOST_FILES = 12  # that a table lists


def find_checkpoints(path: Path) -> list[Path]:
    """The checkpoints that a path names, newest first: one checkpoint, or all of a run.

    Raises CheckpointError where there is none.
    """
    if path.suffix in LEFT_OVER:
        raise CheckpointError(f"{path} is {LEFT_OVER[path.suffix]}; name another one")
    if (path / MANIFEST).exists():
        return [path]
    for folder in (path / "checkpoints", path):
        if steps := step_folders(folder):
            return [found for _, found in steps]
    if re.fullmatch(r"step-\d+", path.absolute().name) and path.is_dir():
        return [path]
    rest = "".join(f"; {folder.name} is {why}" for folder, why in find_left_over(path))
    raise CheckpointError(
        f"{path}: no checkpoint there{rest}; give a folder step-N, or that of a run"
    )


def find_left_over(path: Path) -> list[tuple[Path, str]]:
    """The folders beside a run's checkpoints that are not checkpoints, and why."""
    return [
        (found, LEFT_OVER[found.suffix])
        for folder in (path / "checkpoints", path)
        for found in sorted(folder.glob("step-*.*"))
        if found.suffix in LEFT_OVER and found.is_dir()
    ]


def describe(folder: Path) -> dict[str, Any]:
    """The object that `inspect --json` prints; raises CheckpointError for damage.

    The tensors are not looked at.
    """
    entries, state = read_sound_state(folder)
    shapes = shapes_of(state)
    sizes: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
    files = []
    for name, entry in entries.items():
        num_chunks = 0
        if name != STATE:
            with ChunkFile(folder / name) as file:
                num_chunks = len(file.chunks)
                for chunk in file.chunks:
                    sizes[chunk.kind] += 4 * chunk.box.numel
        row = {"file": name, "bytes": entry.size, "chunks": num_chunks, "digest": entry.digest}
        files.append(row)
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


def show(found: Mapping[str, Any], out: Console) -> None:
    """Print the description of a checkpoint for people."""
    out.print(f"{found['path']}\n")
    columns = [Column("", right=False), Column("", right=False, wraps=True)]
    terminal.show(out, columns, _facts(found))
    out.print()
    parts: dict[str, list[int]] = {}
    for name, shape in found["parameters"].items():
        parts.setdefault(name.partition(".")[0], []).append(prod(shape))
    rows = [(name, f"{len(own):,} tensors", f"{sum(own):,}") for name, own in parts.items()]
    total = ("in all", f"{found['num_parameters']:,} tensors", f"{found['num_elements']:,}")
    _print_table(out, [("parameters", "", "elements"), *rows, total])
    words = _KIND_NAMES | {"other": "headers, state and manifest", "total": "in all"}
    rows = [(words[kind], decimal(size), f"{size:,}") for kind, size in found["bytes"].items()]
    _print_table(out, [("on disk", "", "bytes"), *rows])
    files = [
        (f["file"], f"{f['chunks']:,} chunks" if f["chunks"] else "", f"{f['bytes']:,}")
        for f in found["files"]
    ]
    if len(files) > _MOST_FILES:
        left = len(files) - _MOST_FILES
        files[_MOST_FILES // 2 : -_MOST_FILES // 2] = [(f"... {left:,} more", "", "")]
    _print_table(out, [("files", "", "bytes"), *files])


def _facts(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """A name and a text each: where the run is, who wrote this, and of what model it is."""
    for key in _STATE_KEYS:
        if key == "learning_rate" and isinstance(found[key], dict) and not found[key].get("next"):
            yield _words(key), f"the schedule of {found[key].get('of_steps')} steps is over"
        elif key not in ("config", "random", "split"):
            yield _words(key), _text(found[key])
    with suppress(KeyError, TypeError):
        model = found["config"]["parallel3d"]["model"]
        yield "model", _text({key: model[key] for key in _MODEL_KEYS if key in model})
    yield "config", "--show-config prints it"


def _print_table(out: Console, rows: Sequence[tuple[str, ...]]) -> None:
    """Print a table whose first row are its heads."""
    heads, *rest = rows
    columns = [Column(head, right=bool(place)) for place, head in enumerate(heads)]
    terminal.show(out, columns, rest)
    out.print()


def _text(value: object) -> str:
    """A value of state.json in a line."""
    if isinstance(value, dict):
        return ", ".join(f"{_words(str(key))} {_text(own)}" for key, own in value.items())
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "none" if value is None else str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _words(key: str) -> str:
    return key.replace("_", " ")
