"""Generate text from a trained model with the decoding of transformers."""

import json
from collections.abc import Iterable, Iterator, Mapping
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


class Generator:
    """A model and its tokenizer, which continue texts.

    - `tokens`: the most that are generated for a prompt.
    - `options`: arguments of transformers' `generate`.
    - `say`: prints why a text ends before so many tokens.

    Raises ConfigError if the folder has no model, or no tokenizer.
    """

    def __init__(
        self, folder: Path, *, tokens: int, seed: int, options: Mapping[str, Any], say: Say
    ) -> None:
        self._folder = folder
        self._say = say
        self._tokens = tokens
        self._options = options
        self._tokenizer, model = _load(folder)
        device = None
        if torch.accelerator.is_available():
            device = torch.accelerator.current_accelerator()
        self._model = model.to(device or "cpu").eval()
        torch.manual_seed(seed)

    def complete(self, prompt: str) -> None:
        """Print a prompt and its continuation, streaming the tokens as they are decoded.

        An empty prompt starts a document. Raises ConfigError if the prompt is too long.
        """
        ids = self._tokenizer(prompt, add_special_tokens=False).input_ids
        if not ids:
            if self._model.config.bos_token_id is None:
                raise ConfigError(
                    "--prompt: is empty, but the model has no bos_token_id to start with; give a"
                    " text"
                )
            ids = [self._model.config.bos_token_id]
        self._continue(ids)

    def chat(self, turns: Iterable[str]) -> None:
        """Answer the turns of a user, one after another, as the chat template has them.

        Raises ConfigError if there is no template, or if the conversation is too long.
        """
        if not self._tokenizer.chat_template:
            raise ConfigError(
                f"--chat: the tokenizer of {self._folder} has no chat template; train on"
                ' conversations (data.source "chat"), or leave it out'
            )
        messages: list[dict[str, str]] = []
        ends = self._ends_of_turns()
        for turn in turns:
            messages.append({"role": "user", "content": turn})
            ids = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False
            )
            answer = self._continue(ids, eos_token_id=ends, skip_prompt=True)
            text = self._tokenizer.decode(answer, skip_special_tokens=True)
            messages.append({"role": "assistant", "content": text})

    def _ends_of_turns(self) -> list[int]:
        """Return the ids that end an answer: the end of text, and what the template writes."""
        known = "x"
        example = [{"role": "user", "content": known}, {"role": "assistant", "content": known}]
        text = self._tokenizer.apply_chat_template(example, tokenize=False)
        after = str(text).rpartition(known)[2]
        ends = {self._tokenizer.eos_token_id}
        ends.update(self._tokenizer(after, add_special_tokens=False).input_ids[:1])
        return sorted(ends)

    def _continue(self, ids: list[int], *, skip_prompt: bool = False, **options: Any) -> list[int]:
        """Print what follows `ids`, and return it."""
        from transformers import TextStreamer

        limit = getattr(self._model.config, "max_position_embeddings", None)
        limit = limit or len(ids) + self._tokens
        if len(ids) >= limit:
            raise ConfigError(
                f"--prompt: has {len(ids)} tokens, but the model's context is {limit}; shorten it"
            )
        inputs = torch.tensor([ids], device=self._model.device)
        self._refuse_nonfinite(inputs)
        most = min(self._tokens, limit - len(ids))
        output = self._model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=most,
            streamer=TextStreamer(self._tokenizer, skip_prompt, skip_special_tokens=True),
            **{**self._options, **options},
        )
        continued: list[int] = output[0, len(ids) :].tolist()
        if len(continued) == most < self._tokens:
            self._say(f"stopped after {most} tokens, at the end of the model's context of {limit}")
        return continued

    def _refuse_nonfinite(self, inputs: torch.Tensor) -> None:
        """Raise ConfigError if the model's logits are not finite: any text of it would be noise."""
        with torch.no_grad():
            logits = self._model(inputs).logits  # [1, seq, vocab]
        if not logits.isfinite().all():
            raise ConfigError(
                f"{self._folder}: the model's logits are not finite, so its weights are damaged or "
                "its training diverged; use an earlier checkpoint, or another model"
            )


def _load(folder: Path) -> tuple[Any, Any]:
    """Return the tokenizer and the model of a folder; raise ConfigError if it has not both."""
    from transformers import AutoTokenizer

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
    return tokenizer, model


def _is_model(folder: Path) -> bool:
    """Return True if a folder has a transformers config.json; a run's config.json is another."""
    with suppress(OSError, ValueError):
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return isinstance(config, dict) and "model_type" in config
    return False
