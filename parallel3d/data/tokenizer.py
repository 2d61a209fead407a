"""Text to token ids: a tokenizer of the user's, or a byte-level BPE trained on the corpus."""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from parallel3d.base.errors import DataError
from parallel3d.base.hub_access import why_unreachable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

END_OF_TEXT = "<|endoftext|>"
NUM_BYTES = 256
# Characters that are encoded at once, at most: it takes up to 250 bytes for each.
LONGEST = 2**17
# Files that AutoTokenizer reads; a model's directory also holds weights, of gigabytes.
TOKENIZER_SUFFIXES = {".json", ".txt", ".model", ".jinja", ".tiktoken"}


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> "PreTrainedTokenizerBase":
    """Train a byte-level BPE of at most `vocab_size` tokens, END_OF_TEXT among them.

    The same texts give the same tokenizer; few texts may have too few pairs for a full vocabulary.
    Raises DataError if `vocab_size` does not hold the 256 bytes and END_OF_TEXT.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if vocab_size <= NUM_BYTES:
        raise DataError(
            f"data.vocab_size={vocab_size} is too small: a byte-level tokenizer has"
            f" {NUM_BYTES} bytes and one end-of-text token; use at least {NUM_BYTES + 1}"
        )
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
    """Load a tokenizer from a directory, or by its name on the Hugging Face hub; never its code.

    Raises DataError if it cannot be loaded or has no end-of-text token.
    """
    from transformers import AutoTokenizer

    is_local = Path(name).is_dir() or bool(why_unreachable())
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(name), trust_remote_code=False, local_files_only=is_local
        )
    # Broad, because each backend fails in its own way, tokenizers with a bare Exception.
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(
            f"data.tokenizer={str(name)!r} cannot be loaded by AutoTokenizer ({reason});"
            " give a directory that holds tokenizer.json, or 'train'"
        ) from error
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"data.tokenizer={str(name)!r} has no end-of-text token, which separates documents;"
            " set eos_token in its tokenizer_config.json"
        )
    return tokenizer


@dataclass(frozen=True)
class Backend:
    """A tokenizer without transformers around it, as `encode` takes one."""

    backend_tokenizer: Any

    @classmethod
    def load(cls, directory: Path) -> "Backend":
        """Load the tokenizer that was saved in `directory`, in 0.05 s instead of 2 s."""
        from tokenizers import Tokenizer

        return cls(Tokenizer.from_file(str(directory / "tokenizer.json")))


def is_backend_enough(tokenizer: Any, directory: Path) -> bool:
    """True if `Backend.load` of `directory` encodes exactly as `tokenizer` does.

    Some classes of transformers change what they read; others have no such file.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not (directory / "tokenizer.json").is_file():
        return False
    # All that it consists of; numbers are written so that each one is told from every other.
    return bool(Backend.load(directory).backend_tokenizer.to_str() == backend.to_str())


def save_tokenizer(tokenizer: "PreTrainedTokenizerBase", directory: Path) -> None:
    """Write a tokenizer's files; OSError where the disk is full."""
    try:
        tokenizer.save_pretrained(directory)
    except Exception as error:
        # The package tokenizers says what the system said in a bare Exception.
        if found := re.search(r"\(os error (\d+)\)", str(error)):
            raise OSError(int(found[1]), os.strerror(int(found[1])), str(directory)) from error
        raise


def check_name(name: str) -> None:
    """Raise DataError for a name that cannot be a tokenizer's, without loading it.

    Such are a file, a missing directory, and a name that neither the hub nor its cache can give
    now: AutoTokenizer would ask for it for a minute.
    """
    path = Path(name).expanduser()
    if name in ("train", "none") or path.is_dir():
        return
    if path.is_file():
        raise DataError(
            f"data.tokenizer={name!r} is a file; give the directory that holds tokenizer.json and"
            f" tokenizer_config.json, such as {str(path.parent)!r}"
        )
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise DataError(
            f"data.tokenizer={name!r} is not a directory; give a directory that holds"
            " tokenizer.json, a name on the Hugging Face hub, or 'train'"
        )
    from huggingface_hub import constants

    copies = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}" / "snapshots"
    if (reason := why_unreachable()) and not copies.is_dir():
        raise DataError(
            f"data.tokenizer={name!r} is no directory here, and the Hugging Face hub cannot be"
            f" asked for it ({reason}); download its tokenizer where there is a network, and give"
            " that folder"
        )


@contextmanager
def tokenizer_directory(name: str) -> Iterator[Path]:
    """The directory that holds the files of the tokenizer `name`, for the block's duration.

    Raises DataError as `check_name` and `load_tokenizer` do.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        yield path
    else:
        check_name(name)
        with TemporaryDirectory() as folder:
            save_tokenizer(load_tokenizer(name), Path(folder))
            yield Path(folder)


def directory_digest(directory: Path) -> str:
    """Return the digest of the tokenizer files in `directory`, names and contents."""
    digest = blake2b(digest_size=20)
    for path in sorted(directory.iterdir()):
        if path.suffix in TOKENIZER_SUFFIXES and path.is_file():
            content = blake2b(path.read_bytes(), digest_size=20).hexdigest()
            digest.update(f"{path.name}\0{content}\n".encode())
    return digest.hexdigest()


def lost_share(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str]) -> float:
    """Return the fraction of visible characters that only the unknown token stands for."""
    given = kept = 0
    unknown = tokenizer.unk_token_id
    for text, ids in zip(texts, encode(tokenizer, list(texts)), strict=True):
        known = [token for token in ids if token != unknown]
        given += len("".join(text.split()))
        # A tokenizer that changes case or accents keeps the number of characters, or about it.
        kept += min(len("".join(str(tokenizer.decode(known)).split())), len("".join(text.split())))
    return 1 - kept / given if given else 0.0


def num_tokens(tokenizer: "PreTrainedTokenizerBase") -> int:
    """Return the highest id plus one, since some vocabularies have gaps."""
    return max(tokenizer.get_vocab().values()) + 1


def encode(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Return the ids of each text, with nothing added.

    A special token that is spelt out in a text is text: a document cannot end itself. All cores are
    at work, unless TOKENIZERS_PARALLELISM is "false".
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        encoding = tokenizer(
            texts,
            add_special_tokens=False,
            split_special_tokens=True,
            return_attention_mask=False,
            verbose=False,
        )
        ids: list[list[int]] = encoding["input_ids"]
        return ids
    # Without offsets and masks, which nobody asks for, it takes two thirds of the time.
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    return [found.ids for found in backend.encode_batch_fast(texts, add_special_tokens=False)]


def cut_long(pieces: Iterable[tuple[str, bool]]) -> Iterator[tuple[str, bool]]:
    """Yield texts that come in pieces, each with whether it is a text's last, to be encoded.

    A long text is cut before white space about every LONGEST characters, or after so many without
    any, where ids may differ from those of the whole. A text in one piece stays as it is.
    """
    text, is_start = "", True
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
