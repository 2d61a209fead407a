"""The contents of a corpus's folder: tokenizer, tokens, places, counts."""

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from parallel3d.data.cache import MANIFEST, is_whole, prune, staged
from parallel3d.data.corpus import PLACE, entropy
from parallel3d.data.documents import DAYS_KEPT, Documents
from parallel3d.data.pieces import PIECE_BYTES
from parallel3d.data.pool import make_shards, num_workers
from parallel3d.data.shards import ShardPlan, cut
from parallel3d.data.sources import Progress
from parallel3d.data.statistics import save_held_out
from parallel3d.data.tokenizer import (
    directory_digest,
    is_backend_enough,
    load_tokenizer,
    lost_share,
    num_tokens,
    save_tokenizer,
    train_tokenizer,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Part of the cache key: raise it when the bytes that a corpus is written with change.
FORMAT = 3
# Training takes about 0.1 s a megabyte on two cores; merges are settled long before 64 MB.
TRAINING_BYTES = 64 * 2**20
# What is longer is no word: a trainer's time grows with the square of its length.
LONG_WORD = 64
# Share of characters that a tokenizer may not know, in excerpts of so many documents.
LOST, EXCERPTS, EXCERPT = 0.05, 64, 2000
KINDS = (r"[^\W\d_]", r"\d", r"[^\w\s]", r"\s")
LONG_RUN = re.compile("|".join(f"{kind}{{{LONG_WORD + 1},}}" for kind in KINDS))


@dataclass(frozen=True)
class Recipe:
    """Everything that the bytes of a corpus depend on, and nothing else.

    `held_out` bool [documents]. `tokenizer` is a directory; None trains one of at most
    `vocab_size` tokens.
    """

    documents: Documents
    held_out: np.ndarray
    tokenizer: Path | None
    vocab_size: int

    def key(self) -> str:
        """The name of the corpus in the cache: a digest of contents, not of names or times."""
        trained = f"trained to {self.vocab_size}"
        parts = [FORMAT, directory_digest(self.tokenizer) if self.tokenizer else trained]
        return digest_of(*parts, *contents_of(self.documents.table, self.held_out))


def build(
    folder: Path, unfinished: Path, recipe: Recipe, workers: int | str, progress: Progress
) -> None:
    """Fill the folder of a corpus.

    What takes but one shard is made within the folder: there is nothing to go on with.
    """
    documents, held_out = recipe.documents, recipe.held_out
    bounds = cut(documents.table["num_bytes"])
    work = unfinished if len(bounds) > 2 else folder / "work"
    work.mkdir(parents=True, exist_ok=True)
    if work == unfinished:
        os.utime(work)
        prune(work.parent, DAYS_KEPT)
    tokenizer = _make_tokenizer(work / "tokenizer", recipe, progress)
    end_of_text = tokenizer.eos_token_id
    plan = ShardPlan(
        work=work,
        documents=documents,
        held_out=held_out,
        bounds=bounds,
        vocab_size=num_tokens(tokenizer),
        end_of_text=end_of_text,
        # Of one process nothing is gained: transformers is there already.
        backend_only=num_workers(workers, len(bounds) - 1) > 1
        and is_backend_enough(tokenizer, work / "tokenizer"),
    )
    plan.save()
    lost = lost_share(tokenizer, _excerpts(documents))
    if lost > LOST:
        progress(f"warning: the tokenizer does not know {lost:.0%} of the text", 0, 1)
    _tokenise(plan, workers, progress)
    counts = _join(folder, plan, progress)
    copy_tokenizer(work / "tokenizer", folder / "tokenizer")
    found: dict[str, float] = dict(seen(documents.table))
    if lost > LOST:
        found["unknown_share"] = round(lost, 4)
    found["num_bytes"] = int(documents.table["num_bytes"].sum())
    if work != unfinished:
        shutil.rmtree(work)
    meta = {
        "dtype": plan.dtype.name,
        "end_of_text": end_of_text,
        "format": FORMAT,
        "found": found,
        "num_documents": len(documents),
        "num_tokens": int(counts.sum()),
        "num_train_documents": int((~held_out).sum()),
        "unigram_entropy": entropy(counts),
        "vocab_size": plan.vocab_size,
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=1))


def _tokenise(plan: ShardPlan, workers: int | str, progress: Progress) -> None:
    """Make the shards that are not there yet."""
    missing = plan.missing()
    total = len(plan.documents)
    done = total - sum(map(plan.num_documents, missing))
    if done:
        progress("tokenising documents", done, total)

    def on_documents(count: int) -> None:
        nonlocal done
        done += count
        progress("tokenising documents", done, total)

    if missing:
        make_shards(plan, missing, num_workers(workers, len(missing)), on_documents)


def _join(folder: Path, plan: ShardPlan, progress: Progress) -> np.ndarray:
    """Write tokens.bin, bounds.bin, the counts and the documents' places; give the counts.

    One file, not one a shard: copying takes a hundredth of the time of tokenising, and a sample
    that crosses from shard to shard is then a slice like any other.
    """
    shards = [plan.shard(number) for number in range(plan.num_shards)]
    with open(folder / "tokens.bin", "wb") as file:
        for number, name in enumerate(("train.bin", "held_out.bin")):
            for index, shard in enumerate(shards):
                with open(shard / name, "rb") as part:
                    shutil.copyfileobj(part, file, 2**20)
                if len(shards) > 1:
                    done, total = number * len(shards) + index + 1, 2 * len(shards)
                    progress("joining shards", done, total)
    lengths = np.concatenate([np.load(shard / "lengths.npy") for shard in shards])
    # A stable sort: training documents first, each part in its own order.
    order = np.argsort(plan.held_out, kind="stable")
    bounds = np.concatenate([[0], np.cumsum(lengths[order])]).astype(np.int64)
    bounds.tofile(folder / "bounds.bin")
    counts = sum(np.load(shard / "counts.npy") for shard in shards)
    np.save(folder / "counts.npy", counts, allow_pickle=False)
    num_train = int((~plan.held_out).sum())
    tokens = np.memmap(folder / "tokens.bin", dtype=plan.dtype, mode="r")
    texts = plan.documents.table["num_bytes"][order[num_train:]]
    save_held_out(folder, tokens[bounds[num_train] :], plan.vocab_size, texts)
    places = plan.documents.table[["file", "row"]][order]
    np.save(folder / "places.npy", places.astype(PLACE), allow_pickle=False)
    files = plan.documents.files
    names = {"kind": files.kind, "names": files.names}
    (folder / "names.json").write_text(json.dumps(names))
    return np.asarray(counts)


def _make_tokenizer(
    directory: Path, recipe: Recipe, progress: Progress
) -> "PreTrainedTokenizerBase":
    """The corpus's tokenizer, which `directory` then holds."""
    if not is_whole(directory, bits=True):
        with staged(directory) as folder:
            if recipe.tokenizer:
                tokenizer = load_tokenizer(recipe.tokenizer)
            else:
                documents, held_out = [recipe.documents], [recipe.held_out]
                tokenizer = train(
                    documents, held_out, [TRAINING_BYTES], recipe.vocab_size, progress
                )
            save_tokenizer(tokenizer, folder)
    return load_tokenizer(directory)


def train(
    documents: Sequence[Documents],
    held_out: Sequence[np.ndarray],
    budgets: Sequence[float],
    vocab_size: int,
    progress: Progress,
) -> "PreTrainedTokenizerBase":
    """A tokenizer trained on a budget of bytes from each source, or on all of a smaller source.

    On the training parts alone: what is held out shall be new to the tokenizer too.
    """
    progress("training the tokenizer", 0, 1)
    tokenizer = train_tokenizer(_sample(documents, held_out, budgets), vocab_size)
    progress("training the tokenizer", 1, 1)
    return tokenizer


def _sample(
    documents: Sequence[Documents], held_out: Sequence[np.ndarray], budgets: Sequence[float]
) -> Iterator[str]:
    """Every n-th training document of each source, n such that the budget is not exceeded.

    Of the documents that come in pieces, all, it is an n-th of each piece, without long words.
    """
    for part, apart, budget in zip(documents, held_out, budgets, strict=True):
        training = np.flatnonzero(~apart)
        sizes = part.table["num_bytes"][training]
        stride = ceil(sizes.sum() / budget)
        is_long = sizes > PIECE_BYTES
        if not is_long.any():
            yield from part.read(training[::stride])
            continue
        short = np.flatnonzero(~is_long)[::stride]
        in_long = False
        for text, last in part.pieces(training[np.sort([*short, *np.flatnonzero(is_long)])]):
            in_long = in_long or not last
            yield _shortened(text[: len(text) // stride + 1]) if in_long else text
            in_long = in_long and not last


def _shortened(text: str) -> str:
    """A text with runs of letters, digits or signs cut to LONG_WORD characters."""
    if max(map(len, text.split()), default=0) <= LONG_WORD and " " * LONG_WORD not in text:
        return text
    return LONG_RUN.sub(lambda run: run[0][:LONG_WORD], text)


def _excerpts(documents: Documents) -> list[str]:
    """The starts of some documents."""
    indices = np.unique(np.linspace(0, len(documents) - 1, EXCERPTS).astype(int))
    found, starts = [], True
    for text, last in documents.pieces(indices):
        if starts:
            found.append(text[:EXCERPT])
        starts = last
    return found


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy a published tokenizer, without the list of its files."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(MANIFEST))


def seen(table: np.ndarray) -> dict[str, int]:
    """The part of a corpus's summary that a table of documents gives."""
    return {"num_repeated_documents": len(table) - len(np.unique(table["digest"]))}


def contents_of(table: np.ndarray, held_out: np.ndarray) -> list[str]:
    """Digests that tell the training and held-out contents from all others, in order."""
    digests = table["digest"]
    parts = [digests[~held_out], digests[held_out]]
    return [str(part) for d in parts for part in (len(d), blake2b(d.tobytes()).hexdigest())]


def digest_of(*parts: object) -> str:
    """A digest of several parts, usable as a file name."""
    return blake2b("\n".join(map(str, parts)).encode(), digest_size=16).hexdigest()
