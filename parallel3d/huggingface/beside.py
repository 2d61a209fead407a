"""Special ids and settings for generation, which a model's folder has beside its weights.

A model that training started from keeps what its publisher wrote. A model from scratch has what
its tokenizer says.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parallel3d.base.reader import JsonObject
from parallel3d.config import RunConfig
from parallel3d.config.pretrained import read_config, read_published
from parallel3d.data.tokenizer import load_tokenizer, published_folder
from parallel3d.models.common import Pretrained, pretrained_of

GENERATION = "generation_config.json"
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class Beside:
    """Fields of config.json, and the content of generation_config.json."""

    config: Mapping[str, Any] = field(default_factory=dict)
    """Fields that take the place of the model family's own."""
    generation: Mapping[str, Any] = field(default_factory=dict)
    published: str = ""
    """Name of the published model that they come from; "" for a model from scratch."""
    architecture: str | None = None
    """The published model's class in transformers; None for the default of the model family."""

    def write(self, folder: Path) -> None:
        """Write generation_config.json; raise OSError.

        transformers does not write it, because it refuses to save some settings that it loads.
        """
        text = json.dumps(self.generation, indent=2, ensure_ascii=False)
        (folder / GENERATION).write_text(f"{text}\n", encoding="utf-8")

    def differences(self, folder: Path, loaded: Mapping[str, Any]) -> Iterator[str]:
        """Yield what a folder says in another way.

        - `loaded`: the fields of its config.json, as transformers loads it.
        """
        for key, value in self.config.items():
            if loaded.get(key) != value:
                yield f"config.json: {key} is {loaded.get(key)!r}, not {value!r}"
        written = json.loads((folder / GENERATION).read_text(encoding="utf-8"))
        for key in sorted(written.keys() | self.generation.keys()):
            if written.get(key) != self.generation.get(key):
                yield (
                    f"{GENERATION}: {key} is {written.get(key)!r}, not {self.generation.get(key)!r}"
                )


def beside_of(config: RunConfig, tokenizer: Path | None, end_of_text: int | None) -> Beside:
    """Return what the folder of a run's model says beside its weights.

    - `tokenizer`: folder of the run's tokenizer; None for a corpus of token ids.
    - `end_of_text`: id of the token between documents; None if unknown.
    """
    published = _published(config)
    if published is not None:
        origin = pretrained_of(config.model)
        fields = published["config"]
        # A field that config.json leaves out has the default of the model's class.
        generation = published["generation"]
        if generation is None:
            keys = (*IDS, "use_cache")
            generation = {key: fields[key] for key in keys if key in fields}
        name = origin.folder if isinstance(origin, Pretrained) else str(origin)
        return Beside(fields, generation, name, published.get("architecture"))
    ids: JsonObject = {} if end_of_text is None else dict.fromkeys(IDS, end_of_text)
    own: JsonObject = {}
    if tokenizer is not None:
        loaded = load_tokenizer(tokenizer)
        said = {key: getattr(loaded, key) for key in IDS}
        own = {key: value for key, value in said.items() if value is not None}
    return Beside(own, ids | own)


def published_tokenizer(config: RunConfig) -> Path | None:
    """Return the folder of the published model that a run on token ids starts from, if it exists.

    Its tokenizer is the one that the ids are of.
    """
    origin = pretrained_of(config.model)
    if not isinstance(origin, Pretrained):
        return None
    folder = published_folder(origin.folder, origin.revision)
    return folder if folder and (folder / "tokenizer_config.json").is_file() else None


def _published(config: RunConfig) -> dict[str, Any] | None:
    """Return what the published model says; None for a model from scratch.

    A run that was started by an older version has no record: the model's folder is asked again.
    """
    record = config.run.published
    origin = pretrained_of(config.model)
    if record is not None:
        return record.model_dump()
    if isinstance(origin, Pretrained) and Path(origin.folder).is_dir():
        return read_published(Path(origin.folder), read_config(Path(origin.folder)))
    return None


def fill_in(settings: Any, beside: Beside) -> None:
    """Give a transformers config the fields of `beside`, and its class's defaults for the rest.

    Without this, fields that the publisher left out would be those of a model from scratch.
    """
    if beside.published:
        defaults = type(settings)()
        for key in IDS:
            setattr(settings, key, getattr(defaults, key, None))
    for key, value in beside.config.items():
        setattr(settings, key, value)
