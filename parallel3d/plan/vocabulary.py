"""The number of tokens of a config's vocabulary, for planning, which loads no tokenizer."""

import json
from pathlib import Path

from parallel3d.base.hub_access import is_path
from parallel3d.base.section import Problem
from parallel3d.config import RunConfig

VOCABULARY = "parallel3d.model.vocab_size"
# Tokens of published models, by family: GPT-2, Llama 2, Mixtral.
_PUBLISHED = {"gpt": 50257, "llama": 32000, "moe": 32000}
# Names of tokenizers on the hub and the sizes that their models' config.json have.
_BY_NAME = {
    "gpt2": 50257,
    "gpt-neox": 50432,
    "pythia": 50432,
    "olmo": 50304,
    "llama-2": 32000,
    "llama-3": 128256,
    "mistral": 32768,
    "mixtral": 32000,
    "qwen2": 151936,
    "qwen3": 151936,
    "smollm": 49152,
    "cosmo2": 49152,
}


def with_vocabulary(config: RunConfig, may_guess: bool = False) -> RunConfig:
    """Return the config with a number for its vocabulary size.

    A tokenizer in a folder, or in the hub's cache on this machine, is counted.

    - `may_guess`: if it cannot be read, take the size of the published model, with a note.

    Raises ConfigError if the size is unknown, or smaller than the tokenizer's.
    """
    if config.model.vocab_size != "auto":
        return _with_known_tokenizer(config)
    if config.data.has_own_size:
        return config.with_vocab_size(config.data.vocab_size)
    tokenizer = config.data.tokenizer
    file = _file_of(tokenizer)
    size = _count(file) if file else None
    how = f"counted in {file}"
    if size is None and may_guess:
        size, whose = _published(tokenizer, config.model.family)
        how = f'as published for {whose}, because tokenizer "{tokenizer}" cannot be read here'
    if size is None:
        raise Problem(
            VOCABULARY,
            "auto",
            f'depends on tokenizer "{tokenizer}", which is not on this machine',
            "set the tokenizer's number of tokens",
        ).error()
    note = f"{VOCABULARY}: auto = {size:,}, {how}"
    return config.with_vocab_size(size).with_notes(*config.notes, note)


def _with_known_tokenizer(config: RunConfig) -> RunConfig:
    """Return the config if its model has a row for each token of a tokenizer on this machine."""
    file = None if config.data.has_own_size else _file_of(config.data.tokenizer)
    size = _count(file) if file else None
    return config.with_vocab_size(size) if size else config


def _file_of(tokenizer: str) -> Path | None:
    """Return the tokenizer.json of a folder or, if it is cached, of the hub; None without one."""
    folder = Path(tokenizer)
    for path in (folder / "tokenizer.json", folder):
        if path.name == "tokenizer.json" and path.is_file():
            return path
    if is_path(tokenizer):
        return None
    from huggingface_hub import try_to_load_from_cache  # a tenth of a second
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(tokenizer, "tokenizer.json")
    except HFValidationError:  # no name that the hub has
        return None
    return Path(cached) if isinstance(cached, str) else None


def _count(file: Path) -> int | None:
    """Return the highest id of a tokenizer.json plus one, as a run does; None if it is not one."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        vocabulary = content["model"]["vocab"]
        added = {token["id"] for token in content.get("added_tokens", ())}
    except (OSError, ValueError, LookupError, TypeError):
        return None
    # Unigram models list their tokens, others map them to their ids.
    ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    return max(added.union(ids), default=-1) + 1 or None


def _published(tokenizer: str, family: str) -> tuple[int | None, str]:
    """Return the size of the published model that a tokenizer's name, or a family, stands for."""
    words = tokenizer.lower()
    for name, size in _BY_NAME.items():
        if name in words:
            return size, name
    return _PUBLISHED.get(family), f"family {family}"
