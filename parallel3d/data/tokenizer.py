"""Tokenizers: the user's own, or a byte-level BPE trained on the corpus."""

import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from parallel3d.base.errors import DataError, first_line
from parallel3d.base.hub_access import is_path, why_unreachable
from parallel3d.config.pretrained import pointer
from parallel3d.data.lines import Piece

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

END_OF_TEXT = "<|endoftext|>"
# Longest text that is encoded at once, in characters; each takes up to 250 bytes of memory.
LONGEST = 2**17
# Files that AutoTokenizer reads; a model's directory also holds gigabytes of weights.
TEMPLATES = "additional_chat_templates"  # transformers' folder of further chat templates
TOKENIZER_SUFFIXES = {".json", ".txt", ".model", ".jinja", ".tiktoken"}
# What transformers keeps of a call, and would write into tokenizer_config.json.
_LOADING = ("is_local", "local_files_only")
# Files of published tokenizers that transformers reads and does not write. Other programs need
# them: llama.cpp the model of sentencepiece.
_NOT_WRITTEN = (
    "added_tokens.json",
    "special_tokens_map.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
    "*.tiktoken",
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> "PreTrainedTokenizerBase":
    """Train a byte-level BPE of at most `vocab_size` tokens, including END_OF_TEXT.

    Deterministic. Small corpora may have too few pairs for a full vocabulary.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )


def load_tokenizer(name: str | Path) -> "PreTrainedTokenizerBase":
    """Load a tokenizer from a directory, or by its name on the Hugging Face hub.

    Its own code is never executed. Raises DataError if it cannot be loaded or has no end-of-text
    token.
    """
    from transformers import AutoTokenizer

    is_local = Path(name).is_dir() or bool(why_unreachable())
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(name), trust_remote_code=False, local_files_only=is_local
        )
    # Broad: each backend raises its own exceptions, and tokenizers a bare Exception.
    except Exception as error:
        reason, remedy = _why_not(Path(name), error)
        raise DataError(
            f"data.tokenizer = {str(name)!r}: AutoTokenizer cannot load it ({reason}); {remedy}, or"
            " for text use 'train'"
        ) from error
    for word in _LOADING:
        tokenizer.init_kwargs.pop(word, None)
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"data.tokenizer = {str(name)!r}: no end-of-text token, which separates documents;"
            " set eos_token in its tokenizer_config.json"
        )
    return tokenizer


def _why_not(directory: Path, error: Exception) -> tuple[str, str]:
    """Return why AutoTokenizer fails on a directory, and what helps."""
    settings = directory / "tokenizer_config.json"
    files = sorted(directory.glob("*")) if directory.is_dir() else []
    for path in files:
        if path.suffix in TOKENIZER_SUFFIXES and (reason := pointer(path)):
            return f"{path.name}: {reason}", "fetch it"
    if not (directory / "tokenizer.json").is_file():
        return first_line(error), "use a directory that contains tokenizer.json"
    with suppress(OSError):
        if b'"auto_map"' in settings.read_bytes():
            return "its tokenizer_config.json names custom code", "remove auto_map in a copy of it"
    return first_line(error), "mend its files, or use the directory of another tokenizer"


def check_once(directory: Path, cache: Path) -> None:
    """Raise DataError if the tokenizer in a directory cannot be loaded.

    One that could be is noted in the cache, and is not loaded again, which takes a second.
    """
    mark = cache / "tokenizers" / directory_digest(directory)
    if mark.exists():
        return
    load_tokenizer(directory)
    with suppress(OSError):  # the message about the corpus's folder says more
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


def save_tokenizer(tokenizer: "PreTrainedTokenizerBase", directory: Path) -> None:
    """Write a tokenizer's files; raise OSError if the disk is full."""
    try:
        tokenizer.save_pretrained(directory)
    except Exception as error:
        # The package tokenizers reports system errors only in the text of a bare Exception.
        if match := re.search(r"\(os error (\d+)\)", str(error)):
            raise OSError(int(match[1]), os.strerror(int(match[1])), str(directory)) from error
        raise


def copy_unwritten(name: str, directory: Path) -> None:
    """Copy files of the tokenizer `name` that `save_tokenizer` does not write; raise OSError.

    - `name`: a folder, or a name on the hub, whose files are in its cache.
    - `directory`: where the tokenizer was saved. What is there stays.
    """
    folder = published_folder(name)
    if folder is None:
        return
    for pattern in _NOT_WRITTEN:
        for path in folder.glob(pattern):
            target = directory / path.name
            if path.is_file() and not target.exists():
                shutil.copyfile(path, target)


def published_folder(name: str, revision: str | None = None) -> Path | None:
    """Return a tokenizer's folder, `name` itself or its copy in the hub's cache; None without.

    The hub is not asked: a model or a tokenizer that was loaded is in its cache.
    """
    folder = Path(name)
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(name, "tokenizer_config.json", revision=revision)
        if not isinstance(cached, str):
            return None
        folder = Path(cached).parent
    return folder


def check_name(name: str) -> None:
    """Raise DataError if no tokenizer can be loaded by this name, without loading it.

    Rejects files, missing directories, and hub names that are not cached while the hub is
    unreachable, which AutoTokenizer would try for a minute.
    """
    path = Path(name)
    if path.is_dir():
        return
    if path.is_file():
        raise DataError(
            f"data.tokenizer = {name!r} is a file; use the directory that contains tokenizer.json"
            f" and tokenizer_config.json, such as {str(path.parent)!r}"
        )
    if is_path(name):
        raise DataError(
            f"data.tokenizer = {name!r} is not a directory; use a directory that contains"
            " tokenizer.json, a name on the Hugging Face hub, or for text 'train'"
        )
    from huggingface_hub import constants

    copies = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}" / "snapshots"
    if (reason := why_unreachable()) and not copies.is_dir():
        raise DataError(
            f"data.tokenizer = {name!r} is not a local directory, and the Hugging Face hub is"
            f" unreachable ({reason}); download the tokenizer elsewhere, and use its directory"
        )


@contextmanager
def tokenizer_directory(name: str) -> Iterator[Path | None]:
    """Yield a directory with the files of the tokenizer `name`, valid within the block.

    It is None for "train" and "none". Raises DataError as `check_name` and `load_tokenizer` do.
    """
    path = Path(name)
    if name in ("train", "none"):
        yield None
    elif path.is_dir():
        yield path
    else:
        check_name(name)
        with TemporaryDirectory() as folder:
            save_tokenizer(load_tokenizer(name), Path(folder))
            yield Path(folder)


def directory_digest(directory: Path) -> str:
    """Return a digest of names and contents of the tokenizer files in `directory`."""
    digest = blake2b(digest_size=20)
    templates = sorted((directory / TEMPLATES).glob("*.jinja"))
    for path in (*sorted(directory.iterdir()), *templates):
        if path.suffix in TOKENIZER_SUFFIXES and path.is_file():
            content = blake2b(path.read_bytes(), digest_size=20).hexdigest()
            digest.update(f"{path.relative_to(directory)}\0{content}\n".encode())
    return digest.hexdigest()


def lost_share(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str]) -> float:
    """Return the fraction of visible characters that are lost by encoding and decoding."""
    num_visible = 0
    num_decoded = 0
    unknown = tokenizer.unk_token_id
    for text, ids in zip(texts, encode(tokenizer, list(texts)), strict=True):
        known = [token for token in ids if token != unknown]
        visible = "".join(text.split())
        decoded = "".join(str(tokenizer.decode(known)).split())
        num_visible += len(visible)
        # Tokenizers that change case or accents roughly preserve the number of characters.
        num_decoded += min(len(decoded), len(visible))
    return 1 - num_decoded / num_visible if num_visible else 0.0


def num_tokens(tokenizer: "PreTrainedTokenizerBase") -> int:
    """Return the highest id plus one; vocabularies may have gaps."""
    return int(max(tokenizer.get_vocab().values())) + 1


def encode(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Return the ids of each text, without adding special tokens.

    Special tokens that are spelled out in a text are encoded as plain text, so that a document
    cannot end itself. Uses all cores, unless TOKENIZERS_PARALLELISM is "false".
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        batch = tokenizer(
            texts,
            add_special_tokens=False,
            split_special_tokens=True,
            return_attention_mask=False,
            verbose=False,
        )
        ids: list[list[int]] = batch["input_ids"]
        return ids
    # Skipping offsets and masks saves a third of the time.
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]


def cut_long(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Join and cut the pieces of texts for encoding; yield (piece, is the last one of its text).

    A long text is cut before white space about every LONGEST characters, or at LONGEST characters
    if there is none; there, ids may differ from those of the uncut text. A text that comes in one
    piece is not cut.
    """
    text = ""
    is_start = True
    for piece, is_last in pieces:
        text += piece
        while len(text) > 2 * LONGEST and not (is_start and is_last):
            between = [m.start() for m in re.finditer(r"\s(?=\S)", text[: LONGEST + 1])]
            cut = between[-1] if between and between[-1] else LONGEST
            yield text[:cut], False
            text = text[cut:]
        if is_last:
            yield text, True
            text = ""
        is_start = is_last
