"""Tokenising shard by shard: a preparation's folder, and one shard of its tokens.

A preparation works in a folder of its own:

    plan.json, table.npy, held_out.npy    what there is to do, for the workers to read
    tokenizer/                            published whole
    shards/<first>-<last>/                the tokens of documents first .. last - 1, published whole
        train.bin, held_out.bin           ids of the documents of each part, with end-of-text
        lengths.npy                       int64 [documents]: tokens of each, end-of-text included
        counts.npy                        int64 [vocabulary]: how often each id occurs

Where a preparation is killed, its shards stay, and the next one of the same content goes on from
there: the folder's name is that of the corpus, so no other setting finds it.
"""

import json
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from parallel3d.data.cache import is_whole, locked, staged
from parallel3d.data.corpus import check_ids
from parallel3d.data.documents import Documents
from parallel3d.data.sources import Files
from parallel3d.data.tokenizer import Backend, encode, encode_long, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A few seconds of one core's work: what is lost at most when a preparation is killed. Of a small
# corpus an eighth, but no crumbs: workers have something to share.
SHARD_BYTES, SMALL_SHARD_BYTES = 16 * 2**20, 3 * 2**20
PARTS = 8
BATCH_BYTES = 2**19


@dataclass(frozen=True)
class ShardPlan:
    """The plan of a tokenisation: documents, which of them are held out, and shard bounds.

    `bounds` are the first documents of the shards, and the number of documents. `backend_only`:
    the tokenizer is encoded with as well without transformers, which take seconds to import.
    """

    work: Path
    documents: Documents
    held_out: np.ndarray
    bounds: list[int]
    vocab_size: int
    end_of_text: int
    backend_only: bool = False

    def save(self) -> None:
        """Write the plan where a worker finds it."""
        np.save(self.work / "table.npy", self.documents.table, allow_pickle=False)
        np.save(self.work / "held_out.npy", self.held_out, allow_pickle=False)
        settings = {
            "files": asdict(self.documents.files),
            "bounds": self.bounds,
            "vocab_size": self.vocab_size,
            "end_of_text": self.end_of_text,
            "backend_only": self.backend_only,
        }
        (self.work / "plan.json").write_text(json.dumps(settings))

    @classmethod
    def open(cls, work: Path) -> "ShardPlan":
        """The plan that was saved in `work`; its arrays stay on disk."""
        settings = json.loads((work / "plan.json").read_text())
        files = settings.pop("files")
        paths, names = tuple(files.pop("paths")), tuple(files.pop("names"))
        table = np.load(work / "table.npy", mmap_mode="r", allow_pickle=False)
        held_out = np.load(work / "held_out.npy", mmap_mode="r", allow_pickle=False)
        documents = Documents(Files(paths=paths, names=names, **files), table)
        return cls(work, documents, held_out, **settings)

    @property
    def dtype(self) -> np.dtype:
        """The type of the ids on disk."""
        return np.dtype(np.uint16 if self.vocab_size <= 2**16 else np.uint32)

    @property
    def num_shards(self) -> int:
        """Number of shards."""
        return len(self.bounds) - 1

    def tokenizer(self) -> "PreTrainedTokenizerBase | Backend":
        """Load the tokenizer, as `encode` takes it."""
        directory = self.work / "tokenizer"
        return Backend.load(directory) if self.backend_only else load_tokenizer(directory)

    def shard(self, number: int) -> Path:
        """The folder of a shard."""
        first, last = self.bounds[number : number + 2]
        return self.work / "shards" / f"{first}-{last}"

    def missing(self) -> list[int]:
        """Numbers of the shards that do not exist, or differ from the bits that were written."""
        return [i for i in range(self.num_shards) if not is_whole(self.shard(i), bits=True)]

    def num_documents(self, number: int) -> int:
        """The number of documents in a shard."""
        return self.bounds[number + 1] - self.bounds[number]


def cut(num_bytes: np.ndarray) -> list[int]:
    """The bounds of shards of equal size, or of the one document that is larger.

    The size follows from the text alone: a preparation that was killed is gone on with by any
    number of workers.
    """
    ends = np.cumsum(num_bytes)
    size = min(max(int(ends[-1]) // PARTS, SMALL_SHARD_BYTES), SHARD_BYTES)
    bounds = [0]
    while bounds[-1] < len(ends):
        before = ends[bounds[-1] - 1] if bounds[-1] else 0
        bounds.append(max(bounds[-1] + 1, int(np.searchsorted(ends, before + size, side="right"))))
    return bounds


def make_shard(
    plan: ShardPlan,
    number: int,
    tokenizer: "PreTrainedTokenizerBase | Backend",
    on_documents: Callable[[int], None],
) -> None:
    """Tokenise one shard and publish it; `on_documents` is told of documents as they are done.

    Raises DataError for a document that changed, or an id beyond the vocabulary.
    """
    directory = plan.shard(number)
    # A worker of a killed preparation may still be at its last shard.
    with locked(directory, lambda: None):
        if not is_whole(directory, bits=True):
            with staged(directory) as folder:
                _fill(folder, plan, number, tokenizer, on_documents)


def _fill(
    folder: Path,
    plan: ShardPlan,
    number: int,
    tokenizer: "PreTrainedTokenizerBase | Backend",
    on_documents: Callable[[int], None],
) -> None:
    first, last = plan.bounds[number : number + 2]
    counts = np.zeros(plan.vocab_size, dtype=np.int64)
    lengths: list[int] = []
    length = 0
    with open(folder / "train.bin", "wb") as train, open(folder / "held_out.bin", "wb") as held_out:
        for batch in _encoded(plan.documents, first, last, tokenizer):
            tokens = [
                np.array([*ids, plan.end_of_text] if is_last else ids, dtype=np.int64)
                for ids, is_last in batch
            ]
            together, before = np.concatenate(tokens), len(lengths)
            if together.max(initial=0) >= plan.vocab_size:
                # Names are looked up only where one is needed.
                for index, ids in enumerate(tokens, start=first + before):
                    check_ids(ids, plan.vocab_size, plan.documents.name(index))
            counts += np.bincount(together, minlength=plan.vocab_size)
            whole = plan.held_out[first + before : first + before + len(batch)]
            apart = np.repeat(whole, [len(ids) for ids in tokens])
            stored = together.astype(plan.dtype)
            stored[~apart].tofile(train)
            stored[apart].tofile(held_out)
            for ids, (_, is_last) in zip(tokens, batch, strict=True):
                length += len(ids)
                if is_last:
                    lengths.append(length)
                    length = 0
            on_documents(len(lengths) - before)
    np.save(folder / "lengths.npy", np.array(lengths, dtype=np.int64), allow_pickle=False)
    np.save(folder / "counts.npy", counts, allow_pickle=False)


def _encoded(
    documents: Documents,
    first: int,
    last: int,
    tokenizer: "PreTrainedTokenizerBase | Backend",
) -> Iterator[list[tuple[list[int], bool]]]:
    """The ids of documents first .. last - 1, about BATCH_BYTES of text at a time.

    Those of a long document come in pieces; with each, whether it is the document's last one.
    One batch is encoded in a thread while the next one is read and the one before is written.
    """
    pieces = documents.pieces(np.arange(first, last))
    with ThreadPoolExecutor(1) as thread:
        ahead: deque[Future[list[list[int]]]] = deque()
        for texts, start in chain(_batches(pieces), [([], "")]):
            if texts:
                ahead.append(thread.submit(encode, tokenizer, texts))
            # A tokenizer cannot be used by two threads: before a long text, as at the end, the
            # thread is done.
            while len(ahead) > (1 if texts and not start else 0):
                yield [(ids, True) for ids in ahead.popleft().result()]
            if start:
                found = None
                for ids in encode_long(tokenizer, _rest(start, pieces)):
                    if found is not None:
                        yield [(found, False)]
                    found = ids
                yield [(found or [], True)]


def _batches(pieces: Iterator[tuple[str, bool]]) -> Iterator[tuple[list[str], str]]:
    """Documents together, and the first piece of a long one if that is what comes next."""
    texts: list[str] = []
    size = 0
    for text, is_last in pieces:
        if is_last:
            texts.append(text)
            size += len(text)
        if size >= BATCH_BYTES or not is_last:
            yield texts, "" if is_last else text
            texts, size = [], 0
    if texts:
        yield texts, ""


def _rest(text: str, pieces: Iterator[tuple[str, bool]]) -> Iterator[str]:
    """The pieces of one document, of which `text` is the first."""
    yield text
    for piece, is_last in pieces:
        yield piece
        if is_last:
            return
