"""Generate text from a trained model with the decoding of transformers."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from parallel3d.base.errors import ConfigError, TrainingError, first_line
from parallel3d.base.say import Say
from parallel3d.data.sources import no_progress
from parallel3d.huggingface.conversion import export, loaded, quiet
from parallel3d.huggingface.source import CheckpointSource
from parallel3d.huggingface.weight_files import WeightFiles


@contextmanager
def model_folder(path: Path, say: Say) -> Iterator[Path]:
    """Yield a folder that transformers loads, and `say` which weights it contains.

    - `path`: such a folder, a run's folder (its weights/ if it exists), or a checkpoint.
      Checkpoints are exported to a temporary folder.

    Raises ConfigError for any other path, and the errors of `export`.
    """
    quiet()
    for folder in (path, path / "weights"):
        if _is_model(folder):
            say(f"using the weights of {folder}")
            yield folder
            return
    if not path.is_dir():
        raise ConfigError(
            f"{path}: does not exist; name the folder of a run, a checkpoint or a model"
        )
    source = CheckpointSource(path)
    say(f"using the weights of {source.folder}")
    with TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        proof = export(
            source, source.about(), WeightFiles(source.config.model), folder, no_progress
        )
        if not proof.ok:
            raise TrainingError(f"cannot export {source.folder}: {proof.differs[0]}")
        yield folder


def generate(
    folder: Path, prompt: str, *, tokens: int, seed: int, options: Mapping[str, Any]
) -> None:
    """Print a prompt and up to `tokens` generated tokens, streaming them as they are decoded.

    - `options`: arguments of transformers' `generate`. An empty prompt starts a document.

    Raises ConfigError if the folder has no tokenizer or the prompt is too long.
    """
    from transformers import AutoTokenizer, TextStreamer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model, report = loaded(folder, output_loading_info=True)
    # Broad, because the libraries raise errors of many types, some of them a bare Exception.
    except Exception as error:
        raise ConfigError(
            f"{folder}: transformers cannot load the model or the tokenizer ({first_line(error)}); "
            "name a folder with both"
        ) from error
    wrong = [*report["missing_keys"], *report["unexpected_keys"], *report["mismatched_keys"]]
    if wrong:
        raise ConfigError(f"{folder}: the weights do not match config.json: {wrong[0]}")
    ids = tokenizer(prompt, add_special_tokens=False).input_ids
    if not ids:
        if model.config.bos_token_id is None:
            raise ConfigError(
                "--prompt: is empty, but the model has no bos_token_id to start with; give a text"
            )
        ids = [model.config.bos_token_id]
    limit = getattr(model.config, "max_position_embeddings", None) or len(ids) + tokens
    if len(ids) >= limit:
        raise ConfigError(
            f"--prompt: has {len(ids)} tokens, but the model's context is {limit}; shorten it"
        )
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    model = model.to(device or "cpu").eval()
    torch.manual_seed(seed)
    inputs = torch.tensor([ids], device=model.device)
    model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=min(tokens, limit - len(ids)),
        streamer=TextStreamer(tokenizer, skip_special_tokens=True),
        **options,
    )


def _is_model(folder: Path) -> bool:
    """Return True if a folder has a transformers config.json; a run's config.json is another."""
    with suppress(OSError, ValueError):
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return isinstance(config, dict) and "model_type" in config
    return False
