"""Tokenising shard by shard: the working folder of a preparation.

plan.json, table.npy, held_out.npy    the work to do, read by the workers
tokenizer/                            published atomically
shards/<first>-<last>/                tokens of documents first .. last - 1, published atomically
    train.bin, held_out.bin           ids of each part's documents, with end-of-text
    lengths.npy                       int64 [documents]: tokens of each, including end-of-text
    counts.npy                        int64 [vocabulary]: occurrences of each id

The folder has the corpus's name, so after a crash the next preparation of the same content
continues from the completed shards.

A worker process (`python -m parallel3d.data.shards`; worker i of n makes every n-th shard) reports
in lines of JSON. `multiprocessing` would run the caller's main script again, and its children would
survive if the caller is killed. These workers exit when their output is no longer read.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import parallel3d
from parallel3d.base.errors import DataError
from parallel3d.data.cache import is_complete, locked, staged
from parallel3d.data.documents import Documents
from parallel3d.data.lines import Piece
from parallel3d.data.sources import Files, OnCount
from parallel3d.data.tokenizer import cut_long, encode, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A killed preparation loses a few seconds of one core's work at most. A small corpus is divided
# into PARTS shards, so that workers can share it, but not into smaller ones than SMALL_SHARD_BYTES.
SHARD_BYTES = 16 * 2**20
SMALL_SHARD_BYTES = 3 * 2**20
PARTS = 8
BATCH_BYTES = 2**19
# On two cores, one process with two threads is as fast (7.4 MB/s) and starts two seconds sooner.
# With many cores, processes are faster, since reading and converting are not multithreaded.
CORES_FOR_THREADS = 4


@dataclass(frozen=True)
class ShardPlan:
    """The work to do in the folder `work`."""

    work: Path
    documents: Documents
    held_out: np.ndarray
    """bool [documents]"""
    bounds: list[int]
    """Shard i has the documents bounds[i] .. bounds[i + 1] - 1."""
    todo: list[int]
    """Numbers of the missing shards."""
    vocab_size: int
    end_of_text: int

    def save(self) -> None:
        """Write the plan to its folder, for the workers."""
        np.save(self.work / "table.npy", self.documents.table, allow_pickle=False)
        np.save(self.work / "held_out.npy", self.held_out, allow_pickle=False)
        names = ("bounds", "todo", "vocab_size", "end_of_text")
        settings = {name: getattr(self, name) for name in names}
        settings["files"] = asdict(self.documents.files)
        (self.work / "plan.json").write_text(json.dumps(settings))

    @classmethod
    def open(cls, work: Path) -> "ShardPlan":
        """Return the plan saved in `work`; its arrays are memory-mapped."""
        settings = json.loads((work / "plan.json").read_text())
        table = np.load(work / "table.npy", mmap_mode="r", allow_pickle=False)
        held_out = np.load(work / "held_out.npy", mmap_mode="r", allow_pickle=False)
        documents = Documents(Files(**settings.pop("files")), table)
        return cls(work, documents, held_out, **settings)

    @property
    def dtype(self) -> np.dtype:
        """The type of the ids on disk."""
        return np.dtype(np.uint16 if self.vocab_size <= 2**16 else np.uint32)

    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """Load the tokenizer for `encode`."""
        return load_tokenizer(self.work / "tokenizer")


def shard_folders(work: Path, bounds: list[int]) -> list[Path]:
    """Return the folders of the shards with these bounds."""
    return [work / "shards" / f"{first}-{last}" for first, last in pairwise(bounds)]


def cut(num_bytes: np.ndarray) -> list[int]:
    """Return the bounds of shards of about equal size; a larger document is a shard of its own.

    The size depends only on the text, so after a crash any number of workers can continue.
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
    tokenizer: "PreTrainedTokenizerBase",
    on_documents: OnCount,
) -> None:
    """Tokenise and publish one shard; call `on_documents` with the number of documents of a batch.

    Raises DataError if a document changed, or for an id outside the vocabulary.
    """
    directory = shard_folders(plan.work, plan.bounds)[number]
    # A worker of a killed preparation may still be writing it.
    with locked(directory, lambda: None):
        if not is_complete(directory, bits=True):
            with staged(directory) as folder:
                fill_shard(folder, plan, number, tokenizer, on_documents)


def fill_shard(
    folder: Path,
    plan: ShardPlan,
    number: int,
    tokenizer: "PreTrainedTokenizerBase",
    on_documents: OnCount,
) -> None:
    """Write the files of a shard to `folder`; see make_shard."""
    first, end = plan.bounds[number : number + 2]
    counts = np.zeros(plan.vocab_size, dtype=np.int64)
    lengths = np.zeros(end - first, dtype=np.int64)
    document = first
    pieces = cut_long(plan.documents.pieces(np.arange(first, end)))
    with open(folder / "train.bin", "wb") as train, open(folder / "held_out.bin", "wb") as held_out:
        for encoded, are_last in _encoded(pieces, tokenizer):
            tokens = []
            for ids, is_last in zip(encoded, are_last, strict=True):
                if is_last:
                    ids.append(plan.end_of_text)
                tokens.append(np.array(ids, dtype=np.int64))
            together = np.concatenate(tokens)
            sizes = list(map(len, tokens))
            documents = document + np.cumsum([0, *are_last[:-1]])
            if together.max(initial=0) >= plan.vocab_size:
                are_wrong = [ids.max(initial=0) >= plan.vocab_size for ids in tokens]
                wrong = are_wrong.index(True)
                raise DataError(
                    f"document {plan.documents.name(documents[wrong])} has the token id"
                    f" {tokens[wrong].max()}, outside the vocabulary of {plan.vocab_size}; use"
                    " another tokenizer"
                )
            counts += np.bincount(together, minlength=plan.vocab_size)
            np.add.at(lengths, documents - first, sizes)
            is_held_out = np.repeat(plan.held_out[documents], sizes)
            stored = together.astype(plan.dtype)
            stored[~is_held_out].tofile(train)
            stored[is_held_out].tofile(held_out)
            document += sum(are_last)
            on_documents(sum(are_last))
    np.save(folder / "lengths.npy", lengths, allow_pickle=False)
    np.save(folder / "counts.npy", counts, allow_pickle=False)


def _encoded(
    pieces: Iterable[Piece], tokenizer: "PreTrainedTokenizerBase"
) -> Iterator[tuple[list[list[int]], tuple[bool, ...]]]:
    """Yield the ids of batches of pieces, and which pieces are the last of a document.

    A thread encodes one batch while the next is read and the previous one is written.
    """
    with ThreadPoolExecutor(1) as thread:
        ahead = None
        for batch in chain(_batches(pieces), [None]):
            before = ahead
            ahead = None
            if batch:
                texts, are_last = zip(*batch, strict=True)
                ahead = thread.submit(encode, tokenizer, list(texts)), are_last
            if before:
                yield before[0].result(), before[1]


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Yield batches of pieces of about BATCH_BYTES of text."""
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece[0])
        if size >= BATCH_BYTES:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


def num_workers(setting: int | str, num_shards: int) -> int:
    """Return the number of tokenising processes; 1 means this one, with a thread per core."""
    if setting != "auto":
        return min(int(setting), num_shards)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return 1 if not cores or cores <= CORES_FOR_THREADS else min(cores, num_shards)


def make_shards(plan: ShardPlan, workers: int, on_documents: OnCount) -> None:
    """Make the missing shards, and call `on_documents` with the number of documents in each batch.

    All workers have ended when this returns. Raises DataError if `make_shard` does or a worker
    dies.
    """
    if workers <= 1:
        tokenizer = plan.tokenizer() if plan.todo else None
        for number in plan.todo:
            assert tokenizer
            make_shard(plan, number, tokenizer, on_documents)
        return
    processes: list[subprocess.Popen[bytes]] = []
    read, write = os.pipe()
    try:
        with open(read) as messages:
            for number in range(workers):
                processes.append(_start(plan.work, number, workers, write))
            os.close(write)
            for line in messages:
                message = json.loads(line)
                if "error" in message:
                    raise DataError(message["error"])
                on_documents(message["documents"])
                _check(process.poll() for process in processes)
        _check(process.wait() for process in processes)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


def _start(work: Path, number: int, workers: int, write: int) -> "subprocess.Popen[bytes]":
    root = str(Path(parallel3d.__file__).parents[1])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        # There is a process per core already.
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "parallel3d.data.shards", str(work), str(number), str(workers)]
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=write)


def _check(codes: Iterable[int | None]) -> None:
    """Raise DataError if an exit code of a worker is neither None (running) nor 0."""
    for code in codes:
        if code:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            raise DataError(
                f"a tokenising process {how}, often for lack of memory; lower data.workers. The"
                " next run continues from the completed shards"
            )


def work(folder: Path, number: int, workers: int) -> None:
    """Make the shards of worker `number` of `workers`."""
    # Ctrl-C reaches all processes; the parent handles it and ends the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Send the output of libraries to standard error, to keep it out of the messages.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def send(**message: int | str) -> None:
        print(json.dumps(message), file=out)

    try:
        plan = ShardPlan.open(folder)
        tokenizer = plan.tokenizer()
        for shard in plan.todo[number::workers]:
            make_shard(plan, shard, tokenizer, lambda documents: send(documents=documents))
    except DataError as error:
        send(error=str(error))
    except BrokenPipeError:
        # The parent is gone. Skip the flush at exit, which would fail again.
        os._exit(1)


if __name__ == "__main__":
    work(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
