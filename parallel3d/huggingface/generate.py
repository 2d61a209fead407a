"""Text from a trained model, by transformers' own decoding."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from parallel3d.base.errors import ConfigError, TrainingError
from parallel3d.checkpoint.manifest import step_folders
from parallel3d.data.sources import silent
from parallel3d.huggingface.card import steps_of
from parallel3d.huggingface.conversion import export, quiet
from parallel3d.huggingface.read_back import loaded
from parallel3d.huggingface.source import CheckpointSource
from parallel3d.huggingface.weight_files import WeightFiles

Say = Callable[[str], None]


@contextmanager
def model_folder(path: Path, say: Say) -> Iterator[Path]:
    """A folder of transformers for the block's duration; `say` is told which weights it has.

    `path` is one, or a run's folder, whose weights/ is one, or of a checkpoint, which is exported
    to a temporary folder. Raises ConfigError for another one, or as an export does.
    """
    quiet()
    for folder in (path, path / "weights"):
        if _is_model(folder):
            say(f"weights of {folder}{_but_newer(path, folder)}")
            yield folder
            return
    if not path.is_dir():
        raise ConfigError(f"{path}: no such folder; give a run's, a checkpoint's or a model's")
    source = CheckpointSource(path)
    say(f"weights of {source.folder}")
    with TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        proof = export(source, source.about(), WeightFiles(source.config.model), folder, silent)
        if not proof.ok:
            raise TrainingError(f"{source.folder} cannot be exported: {proof.differs[0]}")
        yield folder


def generate(
    folder: Path, prompt: str, *, tokens: int, seed: int, options: Mapping[str, Any], say: Say
) -> None:
    """Print a prompt and at most `tokens` tokens that follow it, as they come.

    `options` are those of transformers' `generate`. An empty prompt begins a document. Raises
    ConfigError for a folder without a tokenizer, and for a prompt that is too long.
    """
    from transformers import AutoTokenizer, TextStreamer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model, report = loaded(folder, output_loading_info=True)
    # Broad: each of their libraries refuses in its own way, some with a bare Exception.
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ConfigError(
            f"{folder}: transformers cannot load its model or its tokenizer ({reason}); give a "
            "folder that has both"
        ) from error
    if wrong := [*report["missing_keys"], *report["unexpected_keys"], *report["mismatched_keys"]]:
        raise ConfigError(f"{folder}: its weights are not those of its config: {wrong[0]}")
    ids = tokenizer(prompt, add_special_tokens=False).input_ids
    if not ids:
        if model.config.bos_token_id is None:
            raise ConfigError(
                "--prompt: is empty, and the model has no first token; give some text"
            )
        ids = [model.config.bos_token_id]
    limit = getattr(model.config, "max_position_embeddings", None) or len(ids) + tokens
    if len(ids) >= limit:
        raise ConfigError(f"--prompt: is {len(ids)} tokens; the model reads {limit}; shorten it")
    if len(ids) + tokens > limit:
        say(f"at most {limit - len(ids)} new tokens: the model reads {limit}")
        tokens = limit - len(ids)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    model = model.to(device or "cpu").eval()
    torch.manual_seed(seed)
    inputs = torch.tensor([ids], device=model.device)
    model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=tokens,
        streamer=TextStreamer(tokenizer, skip_special_tokens=True),
        **options,
    )


def _but_newer(run: Path, weights: Path) -> str:
    """A remark where a run has a checkpoint of more steps than its weights; else ""."""
    steps, found = steps_of(weights), step_folders(run / "checkpoints")
    if weights == run or steps is None or not found or found[0][0] <= steps:
        return ""
    return f", after {steps:,} steps; {found[0][1]} is newer: name it to take it"


def _is_model(folder: Path) -> bool:
    """True if a folder's config.json is of transformers; a run has one of its own."""
    with suppress(OSError, ValueError):
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return isinstance(config, dict) and "model_type" in config
    return False
