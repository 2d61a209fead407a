"""From documents to a corpus: split, tokenised once, published in the cache under its content."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from parallel3d.data.cache import cache_root, is_whole, locked, staged
from parallel3d.data.corpus import Corpus, check_ids, entropy
from parallel3d.data.sources import Document, Progress, find_documents, read_documents, silent
from parallel3d.data.tokenizer import (
    directory_digest,
    encode,
    load_tokenizer,
    num_tokens,
    tokenizer_directory,
    train_tokenizer,
)
from parallel3d.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Part of the cache key: raise it when the bytes that a corpus is written with change.
FORMAT = 1
DOCUMENTS_PER_BATCH = 32


class DataSettings(Protocol):
    """What this floor needs of the `data` section of a config."""

    @property
    def source(self) -> str: ...
    @property
    def paths(self) -> tuple[str, ...]: ...
    @property
    def tokenizer(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def held_out_fraction(self) -> float: ...
    @property
    def cache(self) -> str: ...


@dataclass(frozen=True)
class Recipe:
    """What the bytes of a corpus follow from, and nothing else.

    `tokenizer` is a directory; None trains one of at most `vocab_size` tokens.
    """

    train: list[Document]
    held_out: list[Document]
    tokenizer: Path | None
    vocab_size: int

    def key(self) -> str:
        """Give the name of the corpus in the cache: a digest of contents, not of names or times."""
        trained = f"trained to {self.vocab_size}"
        parts = [str(FORMAT), directory_digest(self.tokenizer) if self.tokenizer else trained]
        for documents in (self.train, self.held_out):
            parts += [str(len(documents)), *(document.digest for document in documents)]
        return blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


def prepare(config: DataSettings, progress: Progress = silent) -> Corpus:
    """Give the corpus that `config` describes, from the cache if one of this content is there.

    The cache knows a corpus by its documents' contents, its tokenizer and its split, never by
    names or times, nor by the sequence length. Any number of processes may call this at once: one
    works, the others wait. Raises DataError; then nothing half-written is left behind.
    """
    documents = find_documents(config.source, config.paths, progress)
    train, held_out = split_documents(documents, config.held_out_fraction)
    corpora = cache_root(config.cache) / "corpora"
    if config.tokenizer == "train":
        return _cached(corpora, Recipe(train, held_out, None, config.vocab_size), progress)
    with tokenizer_directory(config.tokenizer) as directory:
        return _cached(corpora, Recipe(train, held_out, directory, config.vocab_size), progress)


def split_documents(
    documents: Sequence[Document], fraction: float
) -> tuple[list[Document], list[Document]]:
    """Split into training and held-out documents by content; each part keeps the given order.

    The distinct contents with the lowest digests are held out, at least one of them and not all:
    copies of a document fall on one side, and no name or order moves a document across.
    Raises DataError if there are fewer than two distinct contents.
    """
    contents = sorted({document.digest for document in documents})
    if len(contents) < 2:
        raise DataError(
            f"the corpus has {len(documents)} documents, {len(contents)} of them distinct, and the"
            " held-out part is split off by document; give at least two files with different text"
            " (for example, cut one file in two)"
        )
    num_held_out = min(max(1, round(fraction * len(contents))), len(contents) - 1)
    apart = set(contents[:num_held_out])
    train = [document for document in documents if document.digest not in apart]
    held_out = [document for document in documents if document.digest in apart]
    return train, held_out


def _cached(corpora: Path, recipe: Recipe, progress: Progress) -> Corpus:
    directory = corpora / recipe.key()
    if is_whole(directory):
        return Corpus.open(directory)

    def say_waiting() -> None:
        progress("waiting for another process that prepares this corpus", 0, 1)

    try:
        with locked(directory, say_waiting):
            # Whoever held the lock before may have written it.
            if not is_whole(directory):
                with staged(directory) as folder:
                    _build(folder, recipe, progress)
    except OSError as error:
        raise DataError(
            f"the cache {corpora} cannot be written ({error.strerror or error});"
            " set data.cache to a directory that is writable and has room"
        ) from error
    return Corpus.open(directory)


def _build(folder: Path, recipe: Recipe, progress: Progress) -> None:
    tokenizer = _make_tokenizer(recipe, progress)
    tokenizer.save_pretrained(folder / "tokenizer")
    vocab_size = num_tokens(tokenizer)
    dtype = np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)
    documents = recipe.train + recipe.held_out
    counts = _write_tokens(folder, documents, tokenizer, vocab_size, dtype, progress)
    names = [document.name for document in documents]
    (folder / "names.json").write_text(json.dumps(names))
    meta = {
        "dtype": dtype.name,
        "end_of_text": tokenizer.eos_token_id,
        "format": FORMAT,
        "num_documents": len(documents),
        "num_tokens": int(counts.sum()),
        "num_train_documents": len(recipe.train),
        "unigram_entropy": entropy(counts),
        "vocab_size": vocab_size,
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=1))


def _make_tokenizer(recipe: Recipe, progress: Progress) -> "PreTrainedTokenizerBase":
    if recipe.tokenizer:
        return load_tokenizer(recipe.tokenizer)
    progress("training the tokenizer", 0, 1)
    # On the training part alone: what is held out shall be new to the tokenizer too.
    tokenizer = train_tokenizer(recipe.train, recipe.vocab_size)
    progress("training the tokenizer", 1, 1)
    return tokenizer


def _write_tokens(
    folder: Path,
    documents: Sequence[Document],
    tokenizer: "PreTrainedTokenizerBase",
    vocab_size: int,
    dtype: np.dtype,
    progress: Progress,
) -> np.ndarray:
    """Write tokens.bin and bounds.bin; give how often each id occurs, int64 [vocab_size]."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    bounds = [0]
    with open(folder / "tokens.bin", "wb") as file:
        for batch in read_documents(documents).iter(batch_size=DOCUMENTS_PER_BATCH):
            for name, ids in zip(batch["name"], encode(tokenizer, batch["text"]), strict=True):
                tokens = np.array([*ids, tokenizer.eos_token_id], dtype=np.int64)
                check_ids(tokens, vocab_size, name)
                counts += np.bincount(tokens, minlength=vocab_size)
                tokens.astype(dtype).tofile(file)
                bounds.append(bounds[-1] + len(tokens))
            progress("tokenising documents", len(bounds) - 1, len(documents))
    np.array(bounds, dtype=np.int64).tofile(folder / "bounds.bin")
    return counts
