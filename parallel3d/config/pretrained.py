"""`parallel3d.model.from_pretrained`: the "model" block that a published model's folder fixes.

Of the folder config.json alone is read with a config. Its name becomes a record of the weights
found there, so that a resolved config and a resumed run need nothing of the folder.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from parallel3d.base import reader
from parallel3d.base.errors import ConfigError
from parallel3d.base.hub_access import why_unreachable
from parallel3d.base.section import Problem, Problems
from parallel3d.models import pretrained

KEY = "from_pretrained"
PATH = f"parallel3d.model.{KEY}"
_DOWNLOAD = "download it where there is a network, and give that folder"
_SAMPLE = 2**16  # bytes of a file of weights that its digest reads, at each end
# What a config needs of a model on the hub; its weights are fetched when they are loaded.
SETTINGS = (
    *("config.json", "generation_config.json", "*tokenizer*", "*.model", "merges.txt"),
    *("vocab.*", "special_tokens_map.json", "added_tokens.json", "chat_template*"),
)
_SHARD = re.compile(r"[^/\\\x00-\x1f]{1,240}\.safetensors")
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")


def fill(raw: dict[str, Any], beneath: Mapping[str, Any] | None = None) -> list[str]:
    """Complete the "model" block of a ds.json in place if it names a folder; return notes on it.

    `beneath`: a block whose place it takes; what a config.json does not fix is kept of it. Raises
    ConfigError if there is no such folder, no family for its model, or a contradiction.
    """
    name, model = reader.at(raw, PATH), reader.at(raw, "parallel3d.model")
    if not isinstance(name, str):
        return []
    folder, record = _found(name)
    length = reader.at(raw, "parallel3d.data.sequence_length")
    config = read_config(folder)
    fixed = derived(folder, config, length if type(length) is int else None)
    chosen = {key: value for key, value in model.items() if key != KEY}
    if problems := list(_contradictions(chosen, fixed, folder)):
        raise Problems(problems)
    notes = [f"model: {_described(fixed)}, of {name}"]
    if beneath is not None:
        free = {*pretrained.free_settings(fixed["family"]), "parametrization"}
        chosen = {key: value for key, value in beneath.items() if key in free} | chosen
        gone = [key for key in beneath if key not in free]
        notes += [f"model: {', '.join(gone)} of the config give way to {name}"] if gone else []
    raw["parallel3d"]["model"] = {**chosen, **fixed, KEY: record}
    return [*notes, *_dropouts(config, fixed, chosen)]


def read_config(folder: Path) -> dict[str, Any]:
    """The object in a folder's config.json. Raises ConfigError."""
    path = folder / "config.json"
    if not os.path.isfile(path):
        raise ConfigError(f"{path}: is missing; name a folder that transformers can load")
    return reader.read(path)


def derived(folder: Path, config: Mapping[str, Any], length: int | None = None) -> dict[str, Any]:
    """The "model" block of a folder's config.json; raises Problems that name its fields."""
    path = folder / "config.json"
    try:
        return pretrained.model_block(config, length)
    except Problems as error:
        found = [Problem(f"{path}: {p.path}", p.value, p.rule, p.remedy) for p in error.problems]
        raise Problems(found, str(folder)) from None


def weight_files(folder: Path) -> list[Path]:
    """Return the shards that a folder's index names, or its single file; raises ConfigError."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    try:
        if index.is_file():
            shards = _shards(index)
            if missing := next((path for path in shards if not path.is_file()), None):
                raise ConfigError(f"{missing}: is missing, and in the index; download it")
            return shards
        if single.is_file():
            return [single]
    except OSError as error:
        raise _unreadable(Path(error.filename or folder), error) from None
    if pickled := sorted([*folder.glob("*.bin"), *folder.glob("*.pt*"), *folder.glob("*.ckpt")]):
        raise ConfigError(
            f"{folder} has its weights as {pickled[0].name}, which is pickled and never read; "
            'convert it where you trust it: python -c "from transformers import AutoModelFor'
            f"CausalLM as M; M.from_pretrained('{folder}').save_pretrained('{folder}-safe')\""
        )
    raise ConfigError(f"{folder}: has no model.safetensors, and no index of shards; download it")


def _shards(index: Path) -> list[Path]:
    """The files that an index names, in order; raises ConfigError for one that is no index."""
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        if strange := [name for name in names if not _SHARD.fullmatch(name)]:
            raise ValueError(f"it names {strange[0][:60]!r}, which is no shard of this folder")
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        raise ConfigError(f"{index}: is no index ({error}); download it again") from None
    return [index.with_name(name) for name in names]


def digest_of(folder: Path) -> str:
    """Return a digest of headers and samples of a folder's weights; raises ConfigError."""
    digest = blake2b(digest_size=16)
    for path in weight_files(folder):
        try:
            with safe_open(path, "numpy"):  # refuses what has no sound header
                size = path.stat().st_size
            with open(path, "rb") as file:
                start = file.read(8)
                digest.update(f"{path.name}\0{size}\0".encode() + start)
                digest.update(file.read(int.from_bytes(start, "little") + _SAMPLE))
                file.seek(max(0, size - _SAMPLE))
                digest.update(file.read(_SAMPLE))
        except OSError as error:
            raise _unreadable(path, error) from None
        except SafetensorError as error:
            why = f"is no sound file of safetensors ({error})"
            raise ConfigError(f"{path}: {why}; download it again") from None
    return digest.hexdigest()


def _unreadable(path: Path, error: OSError) -> ConfigError:
    why = error.strerror or error
    return ConfigError(f"{path}: cannot be read: {why}; make it readable, or download it again")


def _found(name: str) -> tuple[Path, dict[str, Any]]:
    """A folder of this machine, or what the hub has under a name; and what is recorded of it."""
    known = "name one that holds config.json, or a model on the hub"
    if not name.isprintable():
        raise Problems([Problem(PATH, name, "holds what cannot be typed", known)])
    path = Path(os.path.expanduser(name))
    if os.path.isdir(path):  # which a name is not that no file system takes
        folder = path.resolve()
        return folder, {"folder": str(folder), "weights": digest_of(folder)}
    if os.path.exists(path):
        rule, remedy = "is a file", f"name its folder, {str(path.parent)!r}"
        raise Problems([Problem(PATH, name, rule, remedy)])
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise Problems([Problem(PATH, name, "is no folder", known)])
    owner, _, revision = name.partition("@")
    folder = downloaded(owner, revision or None, SETTINGS)
    return folder, {"folder": owner, "revision": folder.name}


def downloaded(name: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    """The hub cache's folder with these files of a model, which are fetched if need be.

    Its name is the revision's. Raises ConfigError at once where the hub cannot be asked.
    """
    from huggingface_hub import constants

    why = why_unreachable()
    cache = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    if why and not os.path.isdir(cache):
        rule = f"is no folder here, and the hub cannot be asked: {why}"
        raise Problems([Problem(PATH, name, rule, _DOWNLOAD)])
    # After the question: to import it takes a second.
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

    disable_progress_bars()
    try:
        found = snapshot_download(
            name, revision=revision, allow_patterns=list(patterns), local_files_only=bool(why)
        )
    # Broad: what goes wrong comes as it is, of the network, of the name, of the disk.
    except Exception as error:
        lines = str(error).strip().splitlines()
        reason = why or (lines[0] if lines else type(error).__name__)
        rule = f"cannot be had of the hub, or of its cache here ({reason})"
        raise Problems([Problem(PATH, name, rule, _DOWNLOAD)]) from None
    finally:
        enable_progress_bars()
    return Path(found)


def _contradictions(
    chosen: Mapping[str, Any], fixed: Mapping[str, Any], folder: Path
) -> Iterator[Problem]:
    for key, value in chosen.items():
        if key not in fixed or value == "auto":
            continue
        there = fixed[key]
        # Null stands for a size that is derived; for a block it means that there is none.
        if value is None and not isinstance(there, Mapping):
            continue
        if isinstance(value, Mapping) and isinstance(there, Mapping):
            same = all(there.get(name) == item for name, item in value.items())
        else:
            same = value == there and isinstance(value, bool) == isinstance(there, bool)
        if not same:
            rule = f"contradicts {folder / 'config.json'}, by which it is {json.dumps(there)}"
            yield Problem(f"parallel3d.model.{key}", value, rule, "remove it")


def _described(fixed: Mapping[str, Any]) -> str:
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
    words = dict(zip(names, ("layers", "hidden size", "heads", "vocabulary"), strict=True))
    sizes = ", ".join(f"{words[name]} {fixed.get(name)}" for name in names)
    return f"{fixed['family']}, {sizes}"


def _dropouts(
    config: Mapping[str, Any], fixed: Mapping[str, Any], chosen: Mapping[str, Any]
) -> Iterator[str]:
    """What the folder's training had, and this one does not have unless it says so."""
    for ours, theirs in pretrained.free_settings(fixed["family"]).items():
        if "drop" in ours and ours not in chosen and config.get(theirs):
            yield f"model.{ours}: 0, unless it is set; {theirs} is {config[theirs]} in config.json"
