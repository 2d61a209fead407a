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
from parallel3d.base.step_lines import METRICS, parsed
from parallel3d.config import RunConfig
from parallel3d.data.tokenizer import TOKENIZER_SUFFIXES
from parallel3d.huggingface.weight_files import WeightFiles

CONFIG, GENERATION, CARD = "config.json", "generation_config.json", "README.md"
# JSON files of a model, which may be in the same folder as a tokenizer.
_NOT_OF_A_TOKENIZER = {CONFIG, GENERATION}


@dataclass(frozen=True)
class About:
    """Facts about a model that are not in its weights."""

    config: RunConfig
    step: int
    tokens: int
    end_of_text: int | None = None
    """Id of the token between documents; None if unknown."""
    tokenizer: Path | None = None
    """Folder of the tokenizer's files; None for a corpus of token ids."""
    line: Mapping[str, object] = field(default_factory=dict)
    """The line of metrics.jsonl for `step`."""
    architecture: str | None = None
    """Name of the transformers class to use; None for the default of the model family."""

    def settings(self, layout: WeightFiles) -> Any:
        """Return the transformers config of the model; None if transformers has no class for it.

        Raises ValueError if the model cannot have the class `architecture`.
        """
        if layout.refusal:
            return None
        family = models.huggingface(self.config.model.family)
        assert family is not None
        settings = family.architecture(self.config.model, self.end_of_text, self.architecture)
        settings.dtype = str(layout.dtype).removeprefix("torch.")
        return settings


def write_rest(folder: Path, about: About, layout: WeightFiles) -> None:
    """Write all files except the weights into a folder. Raises OSError."""
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
    """Return the tokenizer's files in a folder, which may also contain a model."""
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
    """Return the last line for `step` in a run's metrics.jsonl; {} if there is none."""
    with suppress(OSError), open(run / METRICS, encoding="utf-8", errors="replace") as file:
        return [{}, *(line for line, _ in parsed(file) if line["step"] == step)][-1]
    return {}


def steps_of(folder: Path) -> int | None:
    """Return the number of training steps in a folder's model card; None if it has none."""
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
            f"Transformers has no class for this model ({layout.refusal}). The tensors have "
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
    losses = {"loss": "training loss of the last step", "held_out_loss": "held-out loss"}
    for key, label in losses.items():
        if isinstance(line.get(key), int | float):
            yield label, f"{line[key]:.4f} nats per token"
    yield "data", _data(config)
    yield "tokenizer", config.data.tokenizer if about.tokenizer is not None else "none"
    names = ("parallel3d", "torch", "deepspeed", "transformers")
    yield "versions", ", ".join(f"{name} {version(name)}" for name in names)


def _data(config: RunConfig) -> str:
    """Return the sources of the training data as text."""
    sources = []
    for part in config.data.mixture or (config.data,):
        names = [*part.paths] or [part.name, part.subset or ""]
        sources.append(" ".join(filter(None, [part.source, *names])))
    return "; ".join(sources)
