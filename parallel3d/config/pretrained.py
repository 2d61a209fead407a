"""`parallel3d.model.from_pretrained`: derive the "model" block from a published model's folder.

Only config.json is read with the config. The folder's name is replaced by a record of its weights,
so that a resolved config and a resumed run do not need the folder.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from parallel3d import models
from parallel3d.base import reader
from parallel3d.base.errors import ConfigError
from parallel3d.base.explain import problems_in
from parallel3d.base.hub_access import why_unreachable
from parallel3d.base.paths import expand_path
from parallel3d.base.reader import JsonObject
from parallel3d.base.section import Problem, Problems, raise_if_any
from parallel3d.model.config import ModelConfig
from parallel3d.models import pretrained

KEY = "from_pretrained"
PATH = f"parallel3d.model.{KEY}"
_DOWNLOAD = "download it on a machine with network access, and use that folder"
_SAMPLE = 2**16  # bytes at each end of a weight file that its digest reads
# Files on the hub that a config needs; weights are fetched when they are loaded.
SETTINGS = (
    "config.json",
    "generation_config.json",
    "*tokenizer*",
    "*.model",
    "merges.txt",
    "vocab.*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "additional_chat_templates/*.jinja",
)
_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
CARRIED = (
    *_SPECIAL_IDS,
    "sep_token_id",
    "task_specific_params",
    "tokenizer_class",
    "use_cache",
)
"""Fields of a config.json that an export has again: they neither change training nor follow it."""
_SAMPLING = (
    "max_length",
    "min_length",
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
    "num_beams",
    "repetition_penalty",
    "length_penalty",
)
_POINTER = b"version https://git-lfs"
_SHARD = re.compile(r"[^/\\\x00-\x1f]{1,240}\.safetensors")
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")


def fill(raw: JsonObject, replaced: Mapping[str, object] | None = None) -> list[str]:
    """Complete the "model" block of a ds.json in place if it names a folder; return notes.

    - `raw`: the object of the ds.json.
    - `replaced`: a "model" block that this one replaces; settings that a config.json does not fix
      are taken over from it.

    Raises ConfigError if the folder does not exist, no family fits its model, or settings
    contradict its config.json.
    """
    name = reader.value_at(raw, PATH)
    model = reader.block_at(raw, "parallel3d.model")
    if not isinstance(name, str):
        return []
    folder, record = _locate(name)
    config = read_config(folder)
    fixed = derive_model_block(folder, config, model.get("family"))
    chosen = {key: value for key, value in model.items() if key != KEY}
    if problems := list(_contradictions(chosen, fixed, folder)):
        raise Problems(problems)
    described = _described(model_of(folder, fixed), config)
    notes = [f"model: {described}, from {name}"]
    if replaced is not None:
        free = {*pretrained.free_settings(fixed["family"]), "parametrization"}
        chosen = {key: value for key, value in replaced.items() if key in free} | chosen
    reader.block_at(raw, "parallel3d")["model"] = {**chosen, **fixed, KEY: record}
    output = reader.block_at(raw, "parallel3d").setdefault("run", {})
    if isinstance(output, dict):
        output["published"] = read_published(folder, config)
    return notes


def _described(model: ModelConfig, config: Mapping[str, object]) -> str:
    """Return the family and the layers of a model, and why the family is any decoder's."""
    family = model.family
    if family == pretrained.GENERIC:
        family += f" ({pretrained.why_any(config)})"
    return f"{family}, {model.num_hidden_layers} layers"


def read_published(folder: Path, config: Mapping[str, object]) -> JsonObject:
    """Return the block `parallel3d.run.published` for a model's folder and its config.json.

    Raises ConfigError if its generation_config.json is not valid JSON, or a special id no id.
    """
    raise_if_any(_wrong_ids(folder, config), str(folder))
    path = folder / "generation_config.json"
    generation: JsonObject | None = None
    if os.path.isfile(path):
        generation = reader.read(path)
    elif old := {key: config[key] for key in _SAMPLING if key in config}:
        # Before generation_config.json existed, config.json had the settings.
        generation = {key: config[key] for key in CARRIED if key in config} | old
        generation.pop("task_specific_params", None)
    return {
        "config": {key: config[key] for key in CARRIED if key in config},
        "generation": generation,
        "architecture": pretrained.class_of(config),
    }


def _wrong_ids(folder: Path, config: Mapping[str, object]) -> Iterator[Problem]:
    """Yield the special ids of a config.json that transformers, and a tokenizer, cannot load."""
    for key in (*_SPECIAL_IDS, "sep_token_id"):
        value = config.get(key)
        if value is None:
            continue
        ids = value if isinstance(value, list) and key == "eos_token_id" else [value]
        if any(type(item) is not int for item in ids):
            remedy = "write the id as a whole number without quotes in a copy of the folder"
            yield Problem(f"{folder / 'config.json'}: {key}", value, "is no token id", remedy)


def read_config(folder: Path) -> JsonObject:
    """Return the object in a folder's config.json; raises ConfigError."""
    path = folder / "config.json"
    if not os.path.isfile(path):
        if os.path.isfile(folder / "adapter_config.json"):
            raise ConfigError(
                f"{folder}: has an adapter (adapter_config.json) without its model; merge it into "
                "the model with peft's merge_and_unload, save that, and name its folder"
            )
        raise ConfigError(f"{path}: is missing; name a folder that transformers can load")
    return reader.read(path)


def derive_model_block(
    folder: Path, config: Mapping[str, object], family: object = None
) -> dict[str, Any]:
    """Return the "model" block for a folder's config.json; raises Problems that name its fields.

    - `folder`: where the config.json is, for messages.
    - `config`: the object in it.
    - `family`: the family that the user names; None for one that fits.
    """
    path = folder / "config.json"
    try:
        return pretrained.model_block(config, family)
    except Problems as error:
        problems = [Problem(f"{path}: {p.path}", p.value, p.rule, p.remedy) for p in error.problems]
        raise Problems(problems, str(folder)) from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def model_of(folder: Path, block: JsonObject) -> ModelConfig:
    """Return the model of a block from a folder's config.json; raises Problems that name it."""
    section = models.config_class(str(block["family"]))
    try:
        model: ModelConfig = section.model_validate(block)
    except ValidationError as error:
        path = folder / "config.json"
        problems = []
        for problem in problems_in(error, block, section):
            problems.append(replace(problem, path=f"{path}: {problem.path}"))
        raise Problems(problems, str(folder)) from None
    return model


def weight_files(folder: Path) -> list[Path]:
    """Return the shards that a folder's index names, or its single file; raises ConfigError."""
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    try:
        if index.is_file():
            shards = _shards(index)
            if missing := next((path for path in shards if not path.is_file()), None):
                raise ConfigError(f"{missing}: is missing, but the index lists it; download it")
            return shards
        if single.is_file():
            return [single]
        if single.is_symlink():
            raise ConfigError(
                f"{single}: is a link to {os.readlink(single)}, which does not exist; download it"
            )
    except OSError as error:
        raise _unreadable(Path(error.filename or folder), error) from None
    if pickled := sorted([*folder.glob("*.bin"), *folder.glob("*.pt*"), *folder.glob("*.ckpt")]):
        raise ConfigError(
            f"{folder}: {pickled[0].name} is a pickle, which can run code and is never read; "
            f"if you trust it, convert it, and name {folder}-safe: python -c "
            '"from transformers import AutoModelFor'
            f"CausalLM as M; M.from_pretrained('{folder}').save_pretrained('{folder}-safe')\""
        )
    raise ConfigError(f"{folder}: has no model.safetensors and no index of shards; download them")


def _shards(index: Path) -> list[Path]:
    """Return the files that an index lists, in order; raises ConfigError if it is not valid."""
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        if invalid := [name for name in names if not _SHARD.fullmatch(name)]:
            raise ValueError(f"it lists {invalid[0][:60]!r}, which is not a shard in this folder")
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        raise ConfigError(f"{index}: is not a valid index ({error}); download it again") from None
    return [index.with_name(name) for name in names]


def digest_of(folder: Path) -> str:
    """Return a digest of a folder's weights, from headers and samples; raises ConfigError."""
    # Imported late: the planner's page has no build of it for the browser.
    from safetensors import SafetensorError, safe_open

    digest = blake2b(digest_size=16)
    for path in weight_files(folder):
        try:
            with safe_open(path, "numpy"):  # raises if the header is not valid
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
            raise ConfigError(
                f"{path}: is not a valid safetensors file ({pointer(path) or error}); download it "
                "again"
            ) from None
    return digest.hexdigest()


def pointer(path: Path) -> str:
    """Return what a file is that stands for another one in a Git repository; "" if it does not."""
    with suppress(OSError), open(path, "rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            return "it is a pointer of Git LFS: `git lfs pull` in its folder fetches the file"
    return ""


def _unreadable(path: Path, error: OSError) -> ConfigError:
    reason = error.strerror or error
    return ConfigError(f"{path}: cannot be read: {reason}; make it readable, or download it again")


def _locate(name: str) -> tuple[Path, JsonObject]:
    """Return the folder of a local path or of a model on the hub, and the record for the config."""
    try:
        path = Path(expand_path(name))
    except ValueError as error:
        rule, _, remedy = str(error).partition("; ")
        raise Problems([Problem(PATH, name, rule, remedy)]) from None
    if os.path.isdir(path):  # False, without an error, for names that no file system allows
        folder = path.resolve()
        return folder, {"folder": str(folder), "weights": digest_of(folder)}
    is_local = os.path.exists(path) or path.is_absolute() or name.startswith((".", "~"))
    if is_local or name.count("/") > 1:
        remedy = "name a folder with config.json, or a model on the hub"
        raise Problems([Problem(PATH, name, "is not a folder", remedy)])
    model, _, revision = name.partition("@")
    folder = download(model, revision or None, SETTINGS)
    return folder, {"folder": model, "revision": folder.name}


def download(name: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    """Return the hub cache's folder of a model, after fetching the files that are missing.

    The folder's name is the revision. Raises ConfigError, without waiting, if the hub is
    unreachable and the model is not in the cache.
    """
    # Imported late, because the import takes a second.
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

    unreachable = why_unreachable()
    disable_progress_bars()
    try:
        snapshot = snapshot_download(
            name,
            revision=revision,
            allow_patterns=list(patterns),
            local_files_only=bool(unreachable),
        )
    # Broad, because errors of the network, the name and the disk have no common base class.
    except Exception as error:
        lines = str(error).strip().splitlines()
        reason = unreachable or (lines[0] if lines else type(error).__name__)
        rule = f"is not a local folder, and cannot be fetched from the hub or its cache ({reason})"
        raise Problems([Problem(PATH, name, rule, _DOWNLOAD)]) from None
    finally:
        enable_progress_bars()
    return Path(snapshot)


def _contradictions(
    chosen: Mapping[str, object], fixed: Mapping[str, object], folder: Path
) -> Iterator[Problem]:
    for key, value in chosen.items():
        if key in fixed and value not in ("auto", None, fixed[key]):
            yield Problem(
                f"parallel3d.model.{key}",
                value,
                f"contradicts {folder / 'config.json'}, which says {json.dumps(fixed[key])}",
                "remove it",
            )
