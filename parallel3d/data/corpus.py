"""A corpus on disk: tokenised once, cached by content, memory-mapped, split by document.

A corpus is a directory, `<cache>/corpora/<key>/`:

    tokens.bin    ids of all documents, the training part first, each closed by end-of-text;
                  uint16, or uint32 for a vocabulary above 65536
    bounds.bin    int64 [documents + 1]: document i is tokens[bounds[i]:bounds[i + 1]]
    names.json    the documents' names, in that order, for messages
    tokenizer/    the tokenizer, as Hugging Face saves it
    meta.json     counts, vocabulary, entropy
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from parallel3d.data.cache import is_whole
from parallel3d.errors import DataError


@dataclass(frozen=True, eq=False)
class TokenStream:
    """Documents one after the other: tokens [num_tokens], bounds int64 [num_documents + 1]."""

    tokens: np.ndarray
    bounds: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_documents(self) -> int:
        """Number of documents in the stream."""
        return len(self.bounds) - 1

    def document(self, index: int) -> np.ndarray:
        """Give the tokens of one document, without its end-of-text."""
        return self.tokens[self.bounds[index] : self.bounds[index + 1] - 1]


@dataclass(frozen=True, eq=False)
class Corpus:
    """A prepared corpus, memory-mapped.

    `unigram_entropy`, in nats per token, is that of the token frequencies of the whole corpus,
    both parts: the loss of the best model that knows how often each token occurs and nothing of
    its context. A model that has learnt anything about order has a held-out loss below it.
    """

    directory: Path
    vocab_size: int
    end_of_text: int
    unigram_entropy: float
    train: TokenStream
    held_out: TokenStream

    @classmethod
    def open(cls, directory: str | Path) -> "Corpus":
        """Open what `prepare` left in `directory`, without reading the sources again.

        Raises DataError if it is not there or not whole.
        """
        directory = Path(directory)
        if not is_whole(directory):
            raise DataError(f"{directory} holds no whole corpus; run launch/prepare.py again")
        meta = json.loads((directory / "meta.json").read_text())
        tokens = np.asarray(np.memmap(directory / "tokens.bin", dtype=meta["dtype"], mode="r"))
        bounds = np.fromfile(directory / "bounds.bin", dtype=np.int64)
        num_train = meta["num_train_documents"]
        cut = int(bounds[num_train])
        return cls(
            directory=directory,
            vocab_size=meta["vocab_size"],
            end_of_text=meta["end_of_text"],
            unigram_entropy=meta["unigram_entropy"],
            train=TokenStream(tokens[:cut], bounds[: num_train + 1]),
            held_out=TokenStream(tokens[cut:], bounds[num_train:] - cut),
        )

    @property
    def tokenizer_directory(self) -> Path:
        """Where `AutoTokenizer.from_pretrained` finds the corpus's tokenizer."""
        return self.directory / "tokenizer"

    @property
    def num_documents(self) -> int:
        """Number of documents, training and held-out."""
        return self.train.num_documents + self.held_out.num_documents

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise DataError, naming document and id, if a token has no place in `vocab_size`."""
        if self.vocab_size <= vocab_size:
            return
        names = json.loads((self.directory / "names.json").read_text())
        first = 0
        for stream in (self.train, self.held_out):
            for index in range(stream.num_documents):
                check_ids(stream.document(index), vocab_size, names[first + index])
            first += stream.num_documents

    def summary(self) -> dict[str, Any]:
        """Give what a log or a command says about the corpus."""
        return {
            "directory": str(self.directory),
            "tokenizer": str(self.tokenizer_directory),
            "num_documents": self.num_documents,
            "num_held_out_documents": self.held_out.num_documents,
            "num_tokens": len(self.train) + len(self.held_out),
            "num_held_out_tokens": len(self.held_out),
            "vocab_size": self.vocab_size,
            "unigram_entropy": self.unigram_entropy,
        }


def check_ids(tokens: np.ndarray, vocab_size: int, name: str) -> None:
    """Raise DataError, naming the document, if one of its ids is not below `vocab_size`."""
    if len(tokens) and tokens.max() >= vocab_size:
        raise DataError(
            f"document {name} has the token id {tokens.max()}, beyond a vocabulary of {vocab_size};"
            " use the tokenizer that belongs to this vocabulary, or a larger vocab_size"
        )


def entropy(counts: np.ndarray) -> float:
    """Give the entropy of the distribution with these counts, in nats (Shannon 1948, section 6)."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())
