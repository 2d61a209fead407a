"""A corpus on disk: tokenised once, cached by content, memory-mapped, split by document.

A corpus is a directory, `<cache>/corpora/<key>/`:

    tokens.bin    ids of all documents, training part first, each closed by end-of-text; uint16, or
                  uint32 for a vocabulary above 65536
    bounds.bin    int64 [documents + 1]: document i is tokens[bounds[i]:bounds[i + 1]]
    places.npy    file and row of each document; names.json has the files' names, for messages
    counts.npy    int64 [vocabulary]: how often each id occurs; held_out_counts.npy, in what is held
                  out (not where ids were checked by a sample)
    held_out_bytes.npy    int64 [held-out documents]: bytes of each one's text, where it is known
    tokenizer/    the tokenizer, as Hugging Face saves it
    meta.json     counts, vocabulary, entropy

Another program's ids stay in its files: `tokenised` says what is here instead of tokens.bin. A
mixture is a directory beside its parts, with tokenizer/ and a meta.json that names them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from parallel3d.base.errors import DataError
from parallel3d.data.cache import is_whole
from parallel3d.data.ids.counting import TokenWeights
from parallel3d.data.ids.remote import SET_BYTES, BlockCache, RemoteFiles, is_url
from parallel3d.data.ids.spans import Spans, check_sizes
from parallel3d.data.rows import place_of

PLACE = np.dtype([("file", "<i4"), ("row", "<i8")])
HELD_OUT_COUNTS, HELD_OUT_BYTES = "held_out_counts.npy", "held_out_bytes.npy"


class DocumentBounds:
    """Bounds of documents, int64 [documents + 1], counted from the first one, which is 0 here.

    `of`, a map of the disk, counts from elsewhere: a key reads and shifts its own bounds alone.
    """

    def __init__(self, of: np.ndarray) -> None:
        self._of, self._first = of, of[0]

    def __len__(self) -> int:
        return len(self._of)

    def __getitem__(self, key: Any) -> Any:
        return self._of[key] - self._first

    def searchsorted(self, places: Any, side: Literal["left", "right"] = "left") -> Any:
        """Search as numpy's searchsorted does, reading a few pages of the map."""
        return self._of.searchsorted(np.asarray(places) + self._first, side)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[:], dtype)


@dataclass(frozen=True, eq=False)
class TokenStream:
    """Documents in a row: tokens [num_tokens], bounds int64 [num_documents + 1]."""

    tokens: np.ndarray | Spans
    bounds: np.ndarray | DocumentBounds
    weights: TokenWeights | None = None
    """How much each token counts in the loss; None where all count alike."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_documents(self) -> int:
        """Number of documents in the stream."""
        return len(self.bounds) - 1

    def document(self, index: int) -> np.ndarray:
        """The tokens of one document, without its end-of-text."""
        return self.tokens[self.bounds[index] : self.bounds[index + 1] - 1]


@dataclass(frozen=True, eq=False)
class Mixture:
    """Several token streams, and the share of the samples that each one gives.

    Its length, which an epoch has, is that of all its streams; each comes round at its own rate.
    """

    parts: tuple[TokenStream, ...]
    weights: tuple[float, ...]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    @property
    def num_documents(self) -> int:
        """Number of documents in all streams."""
        return sum(part.num_documents for part in self.parts)


@dataclass(frozen=True, eq=False)
class Corpus:
    """A prepared corpus, memory-mapped.

    `unigram_entropy`, in nats per token, is that of all token frequencies, weighted in a mixture as
    its samples are: the loss of the best model that ignores context. `parts`, with `labels`, are
    the corpora of a mixture. `validation` are corpora that are all held out. `key` stands for the
    contents, wherever they lie; `found` is what was seen while they were prepared.
    """

    directory: Path
    vocab_size: int
    end_of_text: int
    unigram_entropy: float
    train: TokenStream | Mixture
    held_out: TokenStream | Mixture
    parts: tuple["Corpus", ...] = ()
    labels: tuple[str, ...] = ()
    key: str = ""
    found: Mapping[str, Any] = field(default_factory=dict)
    validation: Mapping[str, "Corpus"] = field(default_factory=dict)

    @classmethod
    def open(cls, directory: str | Path, remote_cache_bytes: int = 0) -> "Corpus":
        """Return the corpus that `prepare` left in `directory`, without reading its sources.

        `remote_cache_bytes` of blocks of remote files are kept. Raises DataError if it is not
        whole.
        """
        directory = Path(directory)
        if not is_whole(directory):
            raise DataError(f"{directory} holds no whole corpus; run `parallel3d prepare` again")
        meta = json.loads((directory / "meta.json").read_text())
        given = {name: meta[name] for name in ("vocab_size", "end_of_text", "unigram_entropy")}
        given |= {"key": meta.get("key", directory.name), "found": meta.get("found", {})}
        if "mixture" in meta:
            parts = tuple(
                cls.open(directory.parent / part["corpus"], remote_cache_bytes)
                for part in meta["mixture"]
            )
            weights = tuple(part["weight"] for part in meta["mixture"])
            return cls(
                directory=directory,
                train=Mixture(tuple(part.stream("train") for part in parts), weights),
                held_out=Mixture(tuple(part.stream("held_out") for part in parts), weights),
                parts=parts,
                labels=tuple(part["label"] for part in meta["mixture"]),
                **given,
            )
        train, held_out = streams_of(directory, meta, remote_cache_bytes)
        return cls(directory=directory, train=train, held_out=held_out, **given)

    def place(self) -> dict[str, Any]:
        """Return a description in JSON by which `at` opens the corpus in another process."""
        sets = {name: part.place() for name, part in self.validation.items()}
        found = {"found": self.found, "validation": sets}
        return {"directory": str(self.directory), "key": self.key, **found}

    @classmethod
    def at(cls, place: Mapping[str, Any], remote_cache_bytes: int = 0) -> "Corpus":
        """The corpus at a `place`, with its validation sets; raises DataError as `open` does."""
        sets = place["validation"].items()
        return replace(
            cls.open(place["directory"], remote_cache_bytes),
            found=place["found"],
            validation={name: cls.at(part, remote_cache_bytes) for name, part in sets},
        )

    def stream(self, part: str) -> TokenStream:
        """Return the "train" or "held_out" part of a corpus that is no mixture."""
        stream = self.train if part == "train" else self.held_out
        assert isinstance(stream, TokenStream), "a mixture has no one stream"
        return stream

    @property
    def tokenizer_directory(self) -> Path:
        """The folder from which `AutoTokenizer.from_pretrained` loads the tokenizer."""
        return self.directory / "tokenizer"

    @property
    def num_documents(self) -> int:
        """Number of documents, training and held-out."""
        return self.train.num_documents + self.held_out.num_documents

    @property
    def num_tokens(self) -> int:
        """Number of tokens, training and held-out."""
        return len(self.train) + len(self.held_out)

    def counts(self) -> np.ndarray:
        """Return how often each id occurs in a corpus that is no mixture: int64 [vocab_size]."""
        counts: np.ndarray = np.load(self.directory / "counts.npy", allow_pickle=False)
        return counts

    def summary(self) -> dict[str, Any]:
        """Return facts about the corpus, and about each part of a mixture."""
        summary = {
            "directory": str(self.directory),
            "tokenizer": str(self.tokenizer_directory),
            "num_documents": self.num_documents,
            "num_held_out_documents": self.held_out.num_documents,
            "num_tokens": self.num_tokens,
            "num_held_out_tokens": len(self.held_out),
            "vocab_size": self.vocab_size,
            "unigram_entropy": self.unigram_entropy,
            **self.found,
        }
        if isinstance(self.train, Mixture):
            parts = zip(self.labels, self.train.weights, self.parts, strict=True)
            summary["mixture"] = [
                {"label": label, "weight": weight, **part.summary()}
                for label, weight, part in parts
            ]
        if self.validation:
            summary["validation"] = {name: part.summary() for name, part in self.validation.items()}
        return summary

    def name(self, index: int) -> str:
        """Return the name of a document in messages; training documents count first."""
        place = np.load(self.directory / "places.npy", mmap_mode="r", allow_pickle=False)[index]
        names = json.loads((self.directory / "names.json").read_text())
        name = names["names"][place["file"]]
        return place_of(names["kind"], name, int(place["row"]))


def streams_of(
    directory: Path, meta: Mapping[str, Any], remote_cache_bytes: int = 0
) -> list[TokenStream]:
    """Return the training and the held-out part of the corpus in a folder."""
    bounds = np.asarray(np.memmap(directory / "bounds.bin", dtype=np.int64, mode="r"))
    num_train, dtype = meta["num_train_documents"], np.dtype(meta["dtype"])
    own: list[DocumentBounds | np.ndarray]
    own = [bounds[: num_train + 1], DocumentBounds(bounds[num_train:])]
    if "files" not in meta:
        tokens = np.asarray(np.memmap(directory / "tokens.bin", dtype=dtype, mode="r"))
        parts = np.split(tokens, [int(bounds[num_train])])
        return [TokenStream(*pair) for pair in zip(parts, own, strict=True)]

    places = np.load(directory / "places.npy", mmap_mode="r", allow_pickle=False)["file"]

    def spans(
        files: list[dict[str, Any]], starts: str, between: int, dtype: np.dtype
    ) -> list[Spans]:
        check_sizes(files)
        begins = np.memmap(directory / starts, dtype=np.int64, mode="r")
        return [
            Spans(
                files=files,
                places=places[first:end],
                starts=begins[first:end],
                bounds=bounds[first : end + 1],
                end_of_text=between,
                dtype=dtype,
                remote=_remote(directory, files, remote_cache_bytes),
            )
            for first, end in ((0, num_train), (num_train, len(places)))
        ]

    ids = spans(meta["files"], "starts.bin", meta["end_of_text"], dtype)
    weights: list[TokenWeights | None] = [None, None]
    if "weights" in meta:
        are_labels = meta["found"]["weights"].startswith("labels")
        kind = np.dtype(np.int64 if are_labels else np.float64)
        # Between documents stands an end-of-text, which counts.
        numbers = spans(meta["weights"], "weight_starts.bin", 1, kind)
        weights = [TokenWeights(part, are_labels) for part in numbers]
    return [TokenStream(*parts) for parts in zip(ids, own, weights, strict=True)]


def _remote(directory: Path, files: Sequence[Mapping[str, Any]], cache_bytes: int) -> RemoteFiles:
    """Return the files that are named by a URL; their blocks are kept beside all corpora."""
    sizes = {file["path"]: file["size"] for file in files if is_url(file["path"])}
    cache = None
    if sizes and cache_bytes >= SET_BYTES:
        cache = BlockCache(directory.parents[1] / "remote" / "blocks", cache_bytes)
    return RemoteFiles(sizes, directory.name, cache)


def entropy(frequencies: np.ndarray) -> float:
    """The entropy of these relative frequencies, in nats (Shannon 1948, section 6)."""
    shares = frequencies[frequencies > 0] / frequencies.sum()
    return float(-(shares * np.log(shares)).sum())
