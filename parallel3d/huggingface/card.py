"""Files written beside the weights: config, generation config, tokenizer, model card."""

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from parallel3d import models
from parallel3d.base.masking import mask
from parallel3d.config import RunConfig
from parallel3d.data.tokenizer import TOKENIZER_SUFFIXES
from parallel3d.huggingface.weight_files import WeightFiles

CONFIG, GENERATION, CARD = "config.json", "generation_config.json", "README.md"
# They belong to a model that lay beside the tokenizer.
_NOT_OF_A_TOKENIZER = {CONFIG, GENERATION}


@dataclass(frozen=True)
class About:
    """Facts about a model that are not in its weights.

    `end_of_text`: the id that comes before and after each document; None where nobody knows.
    `tokenizer`: the folder of its files; None where the corpus is token ids alone.
    """

    config: RunConfig
    step: int
    tokens: int
    end_of_text: int | None = None
    tokenizer: Path | None = None
    line: Mapping[str, Any] = field(default_factory=dict)
    """The line of metrics.jsonl after that step."""
    architecture: str | None = None
    """The class of transformers that is wanted, where several would do."""

    def settings(self, layout: WeightFiles) -> Any:
        """The transformers config of a model; None where transformers has no class for it.

        Raises ValueError where it is not the class that is wanted.
        """
        if layout.refusal:
            return None
        family = models.huggingface(self.config.model.family)
        assert family is not None
        settings = family.architecture(self.config.model, self.end_of_text, self.architecture)
        settings.dtype = str(layout.dtype).removeprefix("torch.")
        return settings


def write_rest(folder: Path, about: About, layout: WeightFiles) -> None:
    """Write every file except the weights into a folder of weights. Raises OSError."""
    settings = about.settings(layout)
    if settings is not None:
        from transformers import GenerationConfig

        settings.save_pretrained(folder)
        end = about.end_of_text
        GenerationConfig(bos_token_id=end, eos_token_id=end, pad_token_id=end).save_pretrained(
            folder
        )
    for path in tokenizer_files(about.tokenizer):
        shutil.copyfile(path, folder / path.name)
    (folder / CARD).write_text(mask(_card(about, layout, settings)), encoding="utf-8")


def tokenizer_files(folder: Path | None) -> list[Path]:
    """The files of a tokenizer in a folder, which may hold a model, too."""
    if folder is None or not folder.is_dir():
        return []
    return [
        path
        for path in sorted(folder.iterdir())
        if path.suffix in TOKENIZER_SUFFIXES
        and path.is_file()
        and path.name not in _NOT_OF_A_TOKENIZER
        and not path.name.endswith(".index.json")
    ]


def line_after(run: Path, step: int) -> dict[str, Any]:
    """The line of a run's metrics.jsonl after `step` steps; {} where there is none."""
    found: dict[str, Any] = {}
    with suppress(OSError), open(run / "metrics.jsonl", encoding="utf-8", errors="replace") as file:
        for text in file:
            with suppress(ValueError):
                line = json.loads(text)
                if isinstance(line, dict) and line.get("step") == step:
                    found = line
    return found


def steps_of(folder: Path) -> int | None:
    """The steps of training that the card of a folder of weights gives; None without such a one."""
    with suppress(OSError):
        text = (folder / CARD).read_text(encoding="utf-8", errors="replace")
        if match := re.search(r"^\| steps \| ([\d,]{1,30}) \|$", text, re.ASCII | re.MULTILINE):
            return int(match[1].replace(",", "") or 0)
    return None


def _card(about: About, layout: WeightFiles, settings: Any) -> str:
    rows = "\n".join(f"| {name} | {value} |" for name, value in _facts(about, layout))
    name, remark = about.config.model.family, ""
    if settings is not None:
        name = settings.architectures[0]
    else:
        remark = (
            f"No class of transformers can be this model ({layout.refusal}): the tensors bear "
            "parallel3d's names, and there is no config.json.\n\n"
        )
    config = json.dumps(about.config.to_public_dict(), indent=1)
    return f"""---
library_name: transformers
pipeline_tag: text-generation
---
# {name}, trained with parallel3d

| | |
|---|---|
{rows}

{remark}The config of the run:

```json
{config}
```
"""


def _facts(about: About, layout: WeightFiles) -> Iterator[tuple[str, str]]:
    config, line = about.config, about.line
    yield "parameters", f"{layout.num_elements:,}"
    yield "type", str(layout.dtype).removeprefix("torch.")
    yield "steps", f"{about.step:,}"
    yield "tokens", f"{about.tokens:,}"
    yield "sequence length", f"{config.data.sequence_length:,}"
    for key in ("loss", "held_out_loss"):
        if isinstance(line.get(key), int | float):
            words = {"loss": "training loss of the last step", "held_out_loss": "held-out loss"}
            yield words[key], f"{line[key]:.4f} nats per token"
    yield "data", _data(config)
    yield "tokenizer", config.data.tokenizer if about.tokenizer is not None else "none"
    names = ("parallel3d", "torch", "deepspeed", "transformers")
    yield "versions", ", ".join(f"{name} {version(name)}" for name in names)


def _data(config: RunConfig) -> str:
    """Where the text comes from, part by part."""
    shown = []
    for part in config.data.mixture or (config.data,):
        which = [*part.paths] or [part.name, part.subset or ""]
        shown.append(" ".join(filter(None, [part.source, *which])))
    return "; ".join(shown)
