"""The manifest of a checkpoint: its files with sizes and hashes, and checks of all of them.

The manifest is written last, so a folder with a manifest is complete. The hashes, including that of
the manifest itself, detect damage; they are not signatures.
"""

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from hashlib import file_digest
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from xxhash import xxh3_128, xxh3_128_hexdigest

from parallel3d.base.errors import CheckpointError
from parallel3d.base.reader import value_at
from parallel3d.checkpoint.chunks import Box, ChunkFile, tile
from parallel3d.checkpoint.safe_files import (
    is_count,
    open_file,
    parse_object,
    read_bytes,
    tokenizer_digest,
)
from parallel3d.model import optimizers

FORMAT = 1
MANIFEST = "manifest.json"
STATE = "state.json"
TOKENIZER = "tokenizer"  # folder beside them, whose digest is in state.json
TOKENIZER_FILES = "tokenizer_files"  # key of state.json: the entries of all its files

_REQUIRED_KEYS = {
    "tokens",
    "next_sample",
    "optimizer_steps",
    "loss_scale",
    "config",
    "mesh",
    "tokenizer",
    "corpus",
}
_MAX_JSON_BYTES = 2**30
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors|state\.json", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{32}", re.ASCII)
_STEP_FOLDER = re.compile(r"step-(0|[1-9][0-9]{0,17})", re.ASCII)


class Entry(NamedTuple):
    """Size in bytes and hash of a file."""

    size: int
    digest: str


class Manifest(NamedTuple):
    """A checkpoint's step, and its files by name: state.json and the safetensors files."""

    step: int
    files: dict[str, Entry]


class Fault(NamedTuple):
    """A damaged file of a checkpoint, and what is wrong with it."""

    file: str
    reason: str


def manifest_bytes(step: int, files: Mapping[str, Entry]) -> bytes:
    """Return the contents of manifest.json, the same bytes for the same checkpoint.

    The manifest's own hash is that of these bytes with 32 zeros in the place of the hash.
    """
    content = {
        "digest": "0" * 32,
        "files": {name: entry._asdict() for name, entry in files.items()},
        "format": FORMAT,
        "step": step,
    }
    blank = (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()
    return blank.replace(b"0" * 32, xxh3_128_hexdigest(blank).encode(), 1)


def state_bytes(state: Mapping[str, object]) -> bytes:
    """Return the contents of state.json."""
    return (json.dumps(state, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint's folder, without looking at the files.

    Raises CheckpointError if it is missing or damaged, has another format, belongs to another step
    than the folder, or lists an invalid file name.
    """
    path = folder / MANIFEST
    data = _read(path)
    try:
        content = parse_object(data)
        _check_format(content)
        manifest = _parse(content)
        if manifest_bytes(manifest.step, manifest.files) != data:
            raise ValueError("its bytes do not match its own hash")
        name = Path(os.path.abspath(folder)).name
        if name != f"step-{manifest.step}":
            raise ValueError(f"it is of step {manifest.step}, but the folder is {name!r}")
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}; use another checkpoint") from None
    return manifest


def _check_format(content: dict[str, Any]) -> None:
    if content.get("format") != FORMAT:
        raise ValueError(
            f"it is of format {content.get('format')!r}; this version of parallel3d reads {FORMAT}"
        )


def _parse(content: dict[str, Any]) -> Manifest:
    """Return the manifest in a JSON object; raises ValueError."""
    if set(content) != {"digest", "files", "format", "step"} or not is_count(content["step"]):
        raise ValueError("it is damaged, or not a manifest")
    if not isinstance(content["files"], dict) or STATE not in content["files"]:
        raise ValueError(f"it lists no {STATE}")
    files = {}
    for name, entry in content["files"].items():
        if not _FILE_NAME.fullmatch(name):
            raise ValueError(
                f"it lists {name[:80]!r}, which is not a plain file name: {STATE}, or letters, "
                "digits and ._- with .safetensors at the end"
            )
        files[name] = _entry(name, entry)
    return Manifest(content["step"], files)


def _entry(name: str, entry: object) -> Entry:
    """Return the entry of a file in a JSON object; raises ValueError."""
    if not isinstance(entry, dict) or set(entry) != {"size", "digest"}:
        raise ValueError(f"it does not have size and digest of {name}")
    size = entry["size"]
    digest = entry["digest"]
    if not (is_count(size) and isinstance(digest, str) and _DIGEST.fullmatch(digest)):
        raise ValueError(f"it has no valid size and digest of {name}")
    return Entry(size, digest)


def check_file(folder: Path, name: str, entry: Entry) -> str:
    """Read a file to its end and return how it differs from its entry; "" if it does not."""
    try:
        descriptor, size = open_file(folder / name)
        with open(descriptor, "rb", buffering=0) as file:
            if size != entry.size:
                return f"is {size:,} bytes, not {entry.size:,}"
            digest = file_digest(file, xxh3_128).hexdigest()
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    if digest != entry.digest:
        return "its contents do not match the manifest (a damaged disk or copy)"
    return ""


def read_state(folder: Path) -> dict[str, Any]:
    """Return the JSON object in state.json; raises CheckpointError."""
    path = folder / STATE
    data = _read(path)
    try:
        return parse_object(data)
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON: {error}; use another checkpoint") from None


def read_sound_state(folder: Path) -> tuple[dict[str, Entry], dict[str, Any]]:
    """Return a checkpoint's files by name, and its state after comparing it with its hash.

    Raises CheckpointError.
    """
    files = read_manifest(folder).files
    reason = check_file(folder, STATE, files[STATE])
    if reason:
        raise CheckpointError(f"{folder / STATE}: {reason}; use another checkpoint")
    return files, read_state(folder)


def shapes_of(state: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all parameters in a state, by name; raises CheckpointError."""
    parameters = state.get("parameters")
    shapes = {}
    if not isinstance(parameters, dict) or not parameters:
        raise CheckpointError(f"{STATE}: it lists no parameters; use another checkpoint")
    for name, entry in parameters.items():
        shape = entry.get("shape") if isinstance(entry, dict) else None
        if not isinstance(shape, list) or not all(map(is_count, shape)):
            raise CheckpointError(
                f"{STATE}: it has no valid shape of {name[:80]!r}; use another checkpoint"
            )
        shapes[name] = tuple(shape)
    return shapes


def check_state(state: Mapping[str, object], step: int) -> None:
    """Raise CheckpointError if a state is not of this step, or lacks what a run needs."""
    if state.get("step") != step:
        raise CheckpointError(f"{STATE} is of step {state.get('step')}, not {step}")
    shapes_of(state)
    missing = sorted(_REQUIRED_KEYS - state.keys())
    if missing:
        raise CheckpointError(f"{STATE} lacks {missing[0]!r}")


def tensor_files(files: Iterable[str]) -> tuple[str, ...]:
    """Return the names of a checkpoint's files with tensors, sorted."""
    return tuple(sorted(name for name in files if name != STATE))


def optimizer_of(state: Mapping[str, object]) -> str | None:
    """Return the file of a checkpoint's optimizer; None if it is the user's and not known here.

    The folder that the checkpoint's config names is not searched, because its code would be run.
    """
    name = value_at(state, "config.optimizer.type")
    file = optimizers.file_of(name if isinstance(name, str) else "AdamW")
    return file if file in optimizers.names() else None


def has_ema(state: Mapping[str, object]) -> bool:
    """Return True if a checkpoint has averages of the weights."""
    return state.get(optimizers.EMA) is True


def verify(folder: Path) -> list[Fault]:
    """Read a checkpoint completely and return its faults; an empty list if it is valid.

    Compares all files with the manifest, and checks that the chunks of all files hold each element
    of every parameter's master weight and optimizer state once.
    """
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return [Fault(MANIFEST, _reason(error, folder / MANIFEST))]
    faults = []
    for name, entry in manifest.files.items():
        reason = check_file(folder, name, entry)
        if reason:
            faults.append(Fault(name, reason))
    return faults or _check_contents(folder, manifest)


def _check_tokenizer(folder: Path, state: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield the faults of the files in a checkpoint's tokenizer folder."""
    if folder.is_dir() and tokenizer_digest(folder) != state.get("tokenizer"):
        yield Fault(TOKENIZER, "its hash is not the one in state.json")
        return
    entries = state.get(TOKENIZER_FILES)
    if entries is None:  # written by an earlier version
        return
    if not isinstance(entries, dict) or not all(map(_is_inside, entries)):
        yield Fault(STATE, f"{TOKENIZER_FILES} must be an object of paths in {TOKENIZER}")
        return
    for name, entry in entries.items():
        try:
            reason = check_file(folder, name, _entry(name, entry))
        except ValueError as error:
            yield Fault(STATE, f"{TOKENIZER_FILES}: {error}")
            continue
        if reason:
            yield Fault(f"{TOKENIZER}/{name}", reason)
    files = filter(Path.is_file, folder.rglob("*"))
    names = {path.relative_to(folder).as_posix() for path in files}
    for name in sorted(names - set(entries)):
        yield Fault(f"{TOKENIZER}/{name}", f"{STATE} does not list it")


def _is_inside(name: str) -> bool:
    """Return True for a relative path that does not leave its folder."""
    path = PurePosixPath(name)
    return bool(name) and not path.is_absolute() and ".." not in path.parts


def _check_contents(folder: Path, manifest: Manifest) -> list[Fault]:
    """Return the faults inside files whose hashes are right."""
    try:
        state = read_state(folder)
        _check_format(state)
        check_state(state, manifest.step)
    except ValueError as error:
        return [Fault(STATE, _reason(error, folder / STATE))]
    shapes = shapes_of(state)
    faults: list[Fault] = []
    faults += _check_tokenizer(folder / TOKENIZER, state)
    boxes: dict[str, dict[str, list[Box]]] = {name: defaultdict(list) for name in shapes}
    for file in tensor_files(manifest.files):
        try:
            with ChunkFile(folder / file) as opened:
                for chunk in opened.chunks:
                    if chunk.name not in shapes:
                        raise ValueError(f"{STATE} has no parameter {chunk.name[:80]!r}")
                    boxes[chunk.name][chunk.kind].append(chunk.box)
        except ValueError as error:
            faults.append(Fault(file, _reason(error, folder / file)))
    if faults:
        return faults
    optimizer = optimizer_of(state)
    if optimizer:
        # Hidden matrices may have other states than the rest, and a checkpoint does not say which
        # parameters they are.
        average = has_ema(state)
        roles = (optimizers.MATRIX, None)
        complete = [{*optimizers.kinds(optimizer, role, average)} for role in roles]
    else:
        complete = [{"master"}.union(*boxes.values())]
    for name, of_kinds in boxes.items():
        stored = {kind for kind, own in of_kinds.items() if tile(own, shapes[name])}
        if prod(shapes[name]) and (stored != of_kinds.keys() or stored not in complete):
            held = ", ".join(sorted(stored)) or "no kind"
            text = f"the files do not hold each element of {name[:80]!r} once, but for {held}"
            faults.append(Fault(STATE, text))
    return faults


def step_folders(checkpoints: Path) -> list[tuple[int, Path]]:
    """Return step and path of the folders step-N in a folder, newest first; [] if it is missing."""
    if not checkpoints.is_dir():
        return []
    folders = []
    for path in checkpoints.iterdir():
        match = _STEP_FOLDER.fullmatch(path.name)
        if match and path.is_dir():
            folders.append((int(match[1]), path))
    return sorted(folders, reverse=True)


def _read(path: Path) -> bytes:
    try:
        return read_bytes(path, _MAX_JSON_BYTES)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing; use another checkpoint") from None
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(f"{path}: cannot be read: {reason}; use another checkpoint") from None


def _reason(error: ValueError, path: Path) -> str:
    text = str(error).removeprefix(f"{path}: ").removeprefix(f"{path.name}: ")
    return text.removesuffix("; use another checkpoint")
