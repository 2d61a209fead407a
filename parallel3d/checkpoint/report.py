"""Descriptions of checkpoints, for people and for scripts."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from rich.console import Console

from parallel3d.base import terminal
from parallel3d.base.errors import CheckpointError
from parallel3d.base.terminal import Column
from parallel3d.checkpoint.chunks import KINDS, ChunkFile
from parallel3d.checkpoint.manifest import (
    MANIFEST,
    STATE,
    check_file,
    read_manifest,
    read_state,
    shapes_of,
    step_folders,
)
from parallel3d.checkpoint.room import shown

LEFT_OVER = {
    ".tmp": "unfinished: a save under way, or one that was killed",
    ".deleted": "half deleted: an old checkpoint on its way out",
    ".rejected": "set aside: a run went on from an earlier step",
}
_STATE_KEYS = (
    *("format", "step", "tokens", "next_sample", "optimizer_steps", "learning_rate", "loss_scale"),
    *("random", "corpus", "split", "tokenizer", "versions", "mesh", "config"),
)
_MODEL_SIZES = {
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "hidden_size": "hidden size",
    "vocab_size": "vocabulary",
}
_KIND_NAMES = dict(zip(KINDS, ("weights", "Adam's first moments", "second moments"), strict=True))
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
    """The object that `inspect --json` prints, from manifest, state.json and the files' headers.

    Raises CheckpointError where one of them is damaged; the tensors are not looked at.
    """
    manifest = read_manifest(folder)
    if reason := check_file(folder, STATE, manifest.files[STATE]):
        raise CheckpointError(f"{folder / STATE}: {reason}; use another checkpoint")
    state = read_state(folder)
    shapes = shapes_of(state)
    sizes: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
    files = []
    for name, entry in manifest.files.items():
        num_chunks = 0
        if name != STATE:
            with ChunkFile(folder / name) as file:
                num_chunks = len(file.chunks)
                for chunk in file.chunks:
                    sizes[chunk.kind] += 4 * chunk.box.numel
        row = {"file": name, "bytes": entry.size, "chunks": num_chunks, "digest": entry.digest}
        files.append(row)
    total = sum(entry.size for entry in manifest.files.values())
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
    rows = [
        (name, f"{tensors:,} tensors", f"{numel:,}")
        for name, tensors, numel in _layers(found["parameters"])
    ]
    total = ("in all", f"{found['num_parameters']:,} tensors", f"{found['num_elements']:,}")
    _print_table(out, [("parameters", "", "elements"), *rows, total])
    sizes = dict(found["bytes"])
    end, other = sizes.pop("total"), sizes.pop("other")
    rows = [(f"{_KIND_NAMES[kind]} ({kind})", shown(n), f"{n:,}") for kind, n in sizes.items()]
    rows.append(("headers, state and manifest", shown(other), f"{other:,}"))
    _print_table(out, [("on disk", "", "bytes"), *rows, ("in all", shown(end), f"{end:,}")])
    files = [
        (f["file"], f"{f['chunks']:,} chunks" if f["chunks"] else "", f"{f['bytes']:,}")
        for f in found["files"]
    ]
    if len(files) > _MOST_FILES:
        left = len(files) - _MOST_FILES
        files[_MOST_FILES // 2 : -_MOST_FILES // 2] = [(f"... {left:,} more", "", "")]
    _print_table(out, [("files", "", "bytes"), *files])


def _facts(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """A name and a text each: where the run is, what it is, and who wrote this."""
    for key in ("step", "tokens", "next_sample", "optimizer_steps"):
        yield key.replace("_", " "), _text(found[key])
    yield "learning rate", _learning_rate(found["learning_rate"])
    yield "loss scale", _text(found["loss_scale"])
    mesh = found["mesh"] if isinstance(found["mesh"], dict) else {}
    sizes = " x ".join(f"{axis} {mesh.get(axis, '?')}" for axis in ("pp", "dp", "tp"))
    schedule, stages = mesh.get("schedule", "?"), mesh.get("stages_per_rank", "?")
    yield "written by", f"{sizes}, {schedule}, stages a rank {stages}"
    places = {"optimizer": "offload_optimizer", "parameters": "offload_param"}
    offload = [f"{w} on {mesh[k]}" for w, k in places.items() if mesh.get(k, "none") != "none"]
    yield "", ", ".join([f"ZeRO-{mesh.get('zero_stage', '?')}", *(offload or ["no offload"])])
    config = found["config"] if isinstance(found["config"], dict) else {}
    block = config.get("parallel3d")
    model = block.get("model") if isinstance(block, dict) else None
    if isinstance(model, dict):
        sizes_of = [f"{word} {_text(model[k])}" for k, word in _MODEL_SIZES.items() if k in model]
        yield "model", ", ".join([str(model.get("family", "?")), *sizes_of])
    for key in ("corpus", "tokenizer", "versions", "format"):
        yield key, _text(found[key])
    yield "config", "--show-config prints it"


def _layers(parameters: Mapping[str, list[int]]) -> Iterator[tuple[str, int, int]]:
    """Name, number of tensors and of elements of each layer; equal layers in a row are one."""
    layers: dict[tuple[str, int], dict[str, list[int]]] = {}
    for name, shape in parameters.items():
        match = re.match(r"(.+?)\.(\d{1,9})\.(.+)", name)
        first, _, rest = name.partition(".")
        key = (match[1], int(match[2])) if match else (first, -1)
        layers.setdefault(key, {})[match[3] if match else rest] = shape
    runs: list[tuple[str, int, int, dict[str, list[int]]]] = []
    for (name, number), layer in sorted(layers.items()):
        start = number
        if runs and (runs[-1][0], runs[-1][2], runs[-1][3]) == (name, number - 1, layer):
            start = runs.pop()[1]
        runs.append((name, start, number, layer))
    for name, start, end, layer in runs:
        count = end - start + 1
        numel = count * sum(prod(shape) for shape in layer.values())
        span = "" if start < 0 else f".{start}" if start == end else f".{start} to {name}.{end}"
        yield name + span, count * len(layer), numel


def _print_table(out: Console, rows: Sequence[tuple[str, ...]]) -> None:
    """A table whose first row are its heads."""
    heads, *rest = rows
    columns = [Column(head, right=bool(place)) for place, head in enumerate(heads)]
    terminal.show(out, columns, rest)
    out.print()


def _learning_rate(said: object) -> str:
    """The rate that comes next; a run that is done has none."""
    if not isinstance(said, dict) or said.keys() != {"next", "of_steps"}:
        return _text(said)
    steps = _text(said["of_steps"])
    if said["next"] is None:
        return f"the schedule of {steps} steps is over"
    return f"{_text(said['next'])} in the next step, of {steps}"


def _text(value: object) -> str:
    """A value of state.json in a line."""
    if isinstance(value, dict):
        return ", ".join(f"{str(k).replace('_', ' ')} {_text(v)}" for k, v in value.items())
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "none" if value is None else str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"
