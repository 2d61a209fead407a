"""A corpus on disk: tokenised once, cached by content, memory-mapped, split by document.

A corpus is a directory, `<cache>/corpora/<key>/`:

    tokens.bin    ids of all documents, training part first, each followed by end-of-text; uint16,
                  or uint32 for a vocabulary above 65536
    bounds.bin    int64 [documents + 1]: document i is tokens[bounds[i]:bounds[i + 1]]
    places.npy    file and row of each document
    names.json    the files' names, for messages
    counts.npy    int64 [vocabulary]: number of occurrences of each id
    held_out_counts.npy   the same for the held-out part; absent if only a sample of ids was checked
    held_out_bytes.npy    int64 [held-out documents]: bytes of each text, where known
    tokenizer/    the tokenizer, as Hugging Face saves it
    meta.json     counts, vocabulary, entropy

Ids of other programs stay in their own files; `tokenised` describes what replaces tokens.bin then.
A mixture is a directory beside its parts, with tokenizer/ and a meta.json that names the parts.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypedDict

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from parallel3d.base.errors import DataError
from parallel3d.base.masking import mask
from parallel3d.data.cache import is_complete
from parallel3d.data.facts import Facts
from parallel3d.data.ids.spans import IdArray, SpanFile, Spans, TokenWeights, check_sizes
from parallel3d.data.packing import Packing
from parallel3d.data.rows import place_of
from parallel3d.data.sharded import ShardCache, ShardedTokens, TokensAsRead

PLACE = np.dtype([("file", "<i4"), ("row", "<i8")])
HELD_OUT_COUNTS = "held_out_counts.npy"
HELD_OUT_BYTES = "held_out_bytes.npy"
CHAT = "chat"  # first word of `Facts.weights` for conversations


class DocumentBounds:
    """Bounds of documents, int64 [documents + 1], shifted so that the first one is 0.

    `bounds` is a memory map. Indexing reads and shifts only the requested entries.
    """

    def __init__(self, bounds: np.ndarray) -> None:
        self._bounds = bounds
        self._first = bounds[0]

    def __len__(self) -> int:
        return len(self._bounds)

    def __getitem__(self, key: Any) -> Any:
        return self._bounds[key] - self._first

    def searchsorted(self, places: ArrayLike, side: Literal["left", "right"] = "left") -> Any:
        """Return what numpy's searchsorted returns, reading only a few pages of the map."""
        return self._bounds.searchsorted(np.asarray(places) + self._first, side)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[:], dtype)


@dataclass(frozen=True, eq=False)
class TokenStream:
    """Consecutive documents: tokens [num_tokens], bounds int64 [num_documents + 1]."""

    tokens: np.ndarray | IdArray
    bounds: np.ndarray | DocumentBounds
    weights: TokenWeights | None = None
    """The weight of each token in the loss; None if all tokens count equally."""
    by_bounds: bool = False
    """True if documents are told apart by their bounds alone: an end-of-text may also be within."""
    packing: Packing | None = None
    """The documents in each sample; None if samples are consecutive windows."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def parts(self) -> tuple["TokenStream"]:
        """The stream as a mixture of one."""
        return (self,)

    @property
    def num_documents(self) -> int:
        """Number of documents in the stream."""
        return len(self.bounds) - 1


@dataclass(frozen=True, eq=False)
class Mixture:
    """Several token streams, and the share of samples drawn from each.

    The length, which defines an epoch, is the sum over the streams. Each stream repeats at its own
    rate.
    """

    parts: tuple[TokenStream, ...]
    weights: tuple[float, ...]
    changes: tuple[tuple[int, tuple[float, ...]], ...] = ()
    """Other weights, each from a number of tokens of samples on."""

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    @property
    def num_documents(self) -> int:
        """Number of documents in all streams."""
        return sum(part.num_documents for part in self.parts)


class Place(TypedDict):
    """Where a corpus is, as JSON: another process opens it with `Corpus.at`."""

    directory: str
    key: str
    found: Mapping[str, Any]
    """The JSON of the corpus's facts."""
    validation: dict[str, "Place"]


@dataclass(frozen=True, eq=False)
class Corpus:
    """A prepared corpus, memory-mapped."""

    directory: Path
    vocab_size: int
    end_of_text: int
    unigram_entropy: float
    """Entropy of the token frequencies in nats per token: the loss of the best model that ignores
    context. In a mixture, frequencies are weighted as its samples are."""
    train: TokenStream | Mixture
    held_out: TokenStream | Mixture
    parts: tuple["Corpus", ...] = ()
    """The corpora of a mixture."""
    labels: tuple[str, ...] = ()
    """The names of the parts."""
    key: str = ""
    """Digest of the contents, independent of where they are stored."""
    facts: Facts = field(default_factory=Facts)
    """Facts recorded during preparation, such as the number of skipped documents."""
    validation: Mapping[str, "Corpus"] = field(default_factory=dict)
    """The validation sets by name; all their documents are held out."""

    @classmethod
    def open(cls, directory: str | Path, shards: ShardCache | None = None) -> "Corpus":
        """Return the corpus that `prepare` wrote to `directory`, without reading its sources.

        `shards` is the cache of streams. Raises DataError if the corpus is incomplete.
        """
        directory = Path(directory)
        if not is_complete(directory):
            raise DataError(f"{directory} has no complete corpus; run `parallel3d prepare` again")
        meta = json.loads((directory / "meta.json").read_text())
        fields = {name: meta[name] for name in ("vocab_size", "end_of_text", "unigram_entropy")}
        fields["key"] = meta.get("key", directory.name)
        fields["facts"] = Facts.from_json(meta.get("found", {}))
        if "mixture" in meta:
            parts = tuple(
                cls.open(directory.parent / part["corpus"], shards) for part in meta["mixture"]
            )
            weights = tuple(part["weight"] for part in meta["mixture"])
            changes = tuple((first, tuple(own)) for first, own in meta.get("changes", ()))
            return cls(
                directory=directory,
                train=Mixture(tuple(part.stream("train") for part in parts), weights, changes),
                held_out=Mixture(tuple(part.stream("held_out") for part in parts), weights),
                parts=parts,
                labels=tuple(part["label"] for part in meta["mixture"]),
                **fields,
            )
        train, held_out = streams_of(directory, meta, shards)
        return cls(directory=directory, train=train, held_out=held_out, **fields)

    def place(self) -> Place:
        """Return a JSON object from which `at` opens the corpus in another process."""
        return {
            "directory": str(self.directory),
            "key": self.key,
            "found": self.facts.to_json(),
            "validation": {name: part.place() for name, part in self.validation.items()},
        }

    @classmethod
    def at(cls, place: Place, shards: ShardCache | None = None) -> "Corpus":
        """Return the corpus that `place` describes, with its validation sets; see `open`."""
        sets = place["validation"].items()
        return replace(
            cls.open(place["directory"], shards),
            facts=Facts.from_json(place["found"]),
            validation={name: cls.at(part) for name, part in sets},
        )

    def stream(self, part: str) -> TokenStream:
        """Return the "train" or "held_out" part of a corpus; not for mixtures."""
        stream = self.train if part == "train" else self.held_out
        assert isinstance(stream, TokenStream), "a mixture has several streams"
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
        """Return the number of occurrences of each id: int64 [vocab_size]; not for mixtures."""
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
            **self.facts.to_json(),
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
        """Return the name of a document for messages; training documents are numbered first."""
        place = np.load(self.directory / "places.npy", mmap_mode="r", allow_pickle=False)[index]
        names = json.loads((self.directory / "names.json").read_text())
        name = names["names"][place["file"]]
        return mask(place_of(names["kind"], name, int(place["row"])))


def streams_of(
    directory: Path, meta: Mapping[str, Any], shards: ShardCache | None = None
) -> list[TokenStream]:
    """Return the training and the held-out stream of the corpus in `directory`."""
    bounds = np.asarray(np.memmap(directory / "bounds.bin", dtype=np.int64, mode="r"))
    num_train = meta["num_train_documents"]
    dtype = np.dtype(meta["dtype"])
    own: list[DocumentBounds | np.ndarray]
    own = [bounds[: num_train + 1], DocumentBounds(bounds[num_train:])]
    if "stream" in meta:
        is_counted = meta["stream"]["identity"].get("count") != "as-read"
        tokens_type = ShardedTokens if is_counted else TokensAsRead
        sharded = tokens_type(directory, dict(meta), shards)
        return [TokenStream(sharded, own[0]), TokenStream(np.empty(0, dtype), own[1])]
    if "files" not in meta:
        tokens = np.asarray(np.memmap(directory / "tokens.bin", dtype=dtype, mode="r"))
        parts = np.split(tokens, [int(bounds[num_train])])
        return [TokenStream(*pair) for pair in zip(parts, own, strict=True)]

    places = np.load(directory / "places.npy", mmap_mode="r", allow_pickle=False)["file"]

    def spans(
        files: Sequence[SpanFile], starts: str, between: int | None, dtype: np.dtype
    ) -> list[Spans]:
        check_sizes(files)
        begins = np.memmap(directory / starts, dtype=np.int64, mode="r")
        parts = []
        for first, end in ((0, num_train), (num_train, len(places))):
            part = Spans(
                files=files,
                places=places[first:end],
                starts=begins[first:end],
                bounds=bounds[first : end + 1],
                end_of_text=between,
                dtype=dtype,
            )
            parts.append(part)
        return parts

    weighed_by = meta.get("found", {}).get("weights", "")
    is_chat = weighed_by.startswith(CHAT)
    ids = spans(meta["files"], "starts.bin", meta["end_of_text"], dtype)
    weights: list[TokenWeights | None] = [None, None]
    if "weights" in meta:
        are_labels = weighed_by.startswith("labels")
        kind = np.dtype(np.int64 if are_labels else np.float64)
        # The end-of-text after each document has weight 1, except after conversations.
        between = None if is_chat else 1
        numbers = spans(meta["weights"], "weight_starts.bin", between, kind)
        weights = [TokenWeights(part, are_labels) for part in numbers]
    streams = zip(ids, own, weights, strict=True)
    return [TokenStream(*parts, by_bounds=is_chat) for parts in streams]


def entropy(frequencies: np.ndarray) -> float:
    """Return the entropy of these frequencies in nats (Shannon 1948, section 6)."""
    shares = frequencies[frequencies > 0] / frequencies.sum()
    return float(-(shares * np.log(shares)).sum())
