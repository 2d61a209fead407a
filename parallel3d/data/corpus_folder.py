"""Writing a corpus's folder: tokenizer, tokens, places, counts."""

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import chain
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from parallel3d.data.cache import DAYS_KEPT, MANIFEST, digest_of, is_complete, prune, staged
from parallel3d.data.corpus import HELD_OUT_BYTES, HELD_OUT_COUNTS, PLACE, entropy, streams_of
from parallel3d.data.documents import Documents
from parallel3d.data.facts import Facts
from parallel3d.data.ids.id_file import spread
from parallel3d.data.lines import PIECE_BYTES
from parallel3d.data.order import bounds_of
from parallel3d.data.shards import ShardPlan, cut, make_shards, num_workers, shard_folders
from parallel3d.data.sources import Progress
from parallel3d.data.tokenizer import (
    directory_digest,
    load_tokenizer,
    lost_share,
    num_tokens,
    save_tokenizer,
    train_tokenizer,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Part of the cache key; raise it when the bytes that are written for the same corpus change.
FORMAT = 3
# Training takes about 0.1 s per megabyte on two cores, and merges converge long before 64 MB.
TRAINING_BYTES = 64 * 2**20
# Longer runs of letters are cut, since training time grows with the square of a word's length.
LONG_WORD = 64
# Warn if this share of the first EXCERPT characters of EXCERPTS documents is lost by encoding.
LOST = 0.05
EXCERPTS = 64
EXCERPT = 2000
IDS_AT_ONCE = 2**20
KINDS = (r"[^\W\d_]", r"\d", r"[^\w\s]", r"\s")
LONG_RUN = re.compile("|".join(f"{kind}{{{LONG_WORD + 1},}}" for kind in KINDS))


@dataclass(frozen=True)
class Recipe:
    """Everything that determines the bytes of a corpus."""

    documents: Documents
    held_out: np.ndarray
    """bool [documents]"""
    tokenizer: Path | None
    """The tokenizer's directory; None trains one with at most `vocab_size` tokens."""
    vocab_size: int

    def key(self) -> str:
        """Return the corpus's name in the cache: a digest of its contents, not of file names."""
        tokenizer = f"trained to {self.vocab_size}"
        if self.tokenizer:
            tokenizer = directory_digest(self.tokenizer)
        return digest_of(FORMAT, tokenizer, *contents_of(self.documents.table, self.held_out))

    def fill(self, folder: Path, unfinished: Path, workers: int | str, progress: Progress) -> None:
        """Write the corpus to `folder`, and intermediate shards to `unfinished`.

        A single shard is written within `folder`, as there would be nothing to continue from.
        """
        documents = self.documents
        bounds = cut(documents.table["num_bytes"])
        work = unfinished if len(bounds) > 2 else folder / "work"
        work.mkdir(parents=True, exist_ok=True)
        if work == unfinished:
            os.utime(work)
            prune(work.parent, DAYS_KEPT)
        tokenizer = self._make_tokenizer(work / "tokenizer", progress)
        shards = shard_folders(work, bounds)
        todo = [number for number, shard in enumerate(shards) if not is_complete(shard, bits=True)]
        num_processes = num_workers(workers, len(todo))
        plan = ShardPlan(
            work=work,
            documents=documents,
            held_out=self.held_out,
            bounds=bounds,
            todo=todo,
            vocab_size=num_tokens(tokenizer),
            end_of_text=tokenizer.eos_token_id,
        )
        plan.save()
        facts = Facts(num_bytes=int(documents.table["num_bytes"].sum()))
        lost = lost_share(tokenizer, _excerpts(documents))
        if lost > LOST:
            progress(f"warning: the tokenizer does not cover {lost:.0%} of the text", 0, 1)
            facts = replace(facts, unknown_share=round(lost, 4))
        _tokenise(plan, num_processes, progress)
        with open(folder / "tokens.bin", "wb") as file:
            # In one file, a sample that spans two shards is a slice like any other.
            for number, name in enumerate(("train.bin", "held_out.bin")):
                for index, shard in enumerate(shards, start=number * len(shards) + 1):
                    with open(shard / name, "rb") as part:
                        shutil.copyfileobj(part, file, 2**20)
                    if len(shards) > 1:
                        progress("joining shards", index, 2 * len(shards))
        copy_tokenizer(work / "tokenizer", folder / "tokenizer")
        lengths = np.concatenate([np.load(shard / "lengths.npy") for shard in shards])
        counts = np.sum([np.load(shard / "counts.npy") for shard in shards], axis=0)
        if work != unfinished:
            shutil.rmtree(work)
        write_facts(
            folder,
            documents.table,
            self.held_out,
            lengths,
            counts,
            names={"kind": documents.files.kind, "names": documents.files.names},
            meta={
                "dtype": plan.dtype.name,
                "end_of_text": plan.end_of_text,
                "found": facts.to_json(),
            },
        )

    def _make_tokenizer(self, directory: Path, progress: Progress) -> "PreTrainedTokenizerBase":
        """Write the corpus's tokenizer to `directory`, unless it is there, and return it."""
        if not is_complete(directory, bits=True):
            with staged(directory) as folder:
                if self.tokenizer:
                    tokenizer = load_tokenizer(self.tokenizer)
                else:
                    sources = [(self.documents, self.held_out, float(TRAINING_BYTES))]
                    tokenizer = train(sources, self.vocab_size, progress)
                save_tokenizer(tokenizer, folder)
        return load_tokenizer(directory)


def _tokenise(plan: ShardPlan, num_processes: int, progress: Progress) -> None:
    """Make the missing shards."""
    total = len(plan.documents)
    done = total - sum(plan.bounds[n + 1] - plan.bounds[n] for n in plan.todo)
    if done:
        progress("tokenising documents", done, total)

    def on_documents(count: int) -> None:
        nonlocal done
        done += count
        progress("tokenising documents", done, total)

    make_shards(plan, num_processes, on_documents)


def write_facts(
    folder: Path,
    table: np.ndarray,
    held_out: np.ndarray,
    lengths: np.ndarray,
    counts: np.ndarray,
    *,
    names: Mapping[str, object],
    meta: dict[str, Any],
) -> None:
    """Write bounds, places, counts, names.json and meta.json of a corpus.

    - `table`, `held_out`, `lengths` [documents]: the documents, and their lengths in tokens
    - `counts` [vocabulary]: occurrences of each id
    - `meta`: the fields that are specific to this kind of corpus; the common ones are added
    """
    # Stable, so that each part keeps its order; training documents come first.
    order = np.argsort(held_out, kind="stable")
    bounds_of(lengths[order]).tofile(folder / "bounds.bin")
    np.save(folder / "counts.npy", counts, allow_pickle=False)
    np.save(folder / "places.npy", table[["file", "row"]][order].astype(PLACE), allow_pickle=False)
    (folder / "names.json").write_text(json.dumps(names))
    repeated = len(table) - len(np.unique(table["digest"]))
    meta |= {
        "format": FORMAT,
        "found": {**meta["found"], "num_repeated_documents": repeated},
        "num_documents": len(table),
        "num_tokens": int(lengths.sum()),
        "num_train_documents": int((~held_out).sum()),
        "unigram_entropy": entropy(counts),
        "vocab_size": len(counts),
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=1))
    if meta["found"].get("check_ids") != "sample":
        held_out_counts = np.zeros_like(counts)
        tokens = streams_of(folder, meta)[1].tokens
        for first in range(0, len(tokens), IDS_AT_ONCE):
            held_out_counts += np.bincount(
                tokens[first : first + IDS_AT_ONCE], minlength=len(counts)
            )
        np.save(folder / HELD_OUT_COUNTS, held_out_counts, allow_pickle=False)
    if "files" not in meta:
        texts = table["num_bytes"][held_out].astype(np.int64)
        np.save(folder / HELD_OUT_BYTES, texts, allow_pickle=False)


def train(
    sources: Sequence[tuple[Documents, np.ndarray, float]], vocab_size: int, progress: Progress
) -> "PreTrainedTokenizerBase":
    """Train a tokenizer on `sources`: documents, held-out mask, and budget in bytes of each."""
    progress("training the tokenizer", 0, 1)
    texts = chain.from_iterable(_sample(*source) for source in sources)
    tokenizer = train_tokenizer(texts, vocab_size)
    progress("training the tokenizer", 1, 1)
    return tokenizer


def _sample(documents: Documents, held_out: np.ndarray, budget: float) -> Iterator[str]:
    """Yield every n-th training document, with n such that the budget is not exceeded.

    Of documents that come in pieces, an n-th of each piece is used, with long words cut.
    """
    training = np.flatnonzero(~held_out)
    sizes = documents.table["num_bytes"][training]
    stride = max(1, ceil(sizes.sum() / budget))
    is_chosen = sizes > PIECE_BYTES
    is_chosen[np.flatnonzero(~is_chosen)[::stride]] = True
    in_long = False
    for text, last in documents.pieces(training[is_chosen]):
        in_long = in_long or not last
        yield _shortened(text[: len(text) // stride + 1]) if in_long else text
        in_long = in_long and not last


def _shortened(text: str) -> str:
    """Return `text` with runs of letters, digits or signs cut to LONG_WORD characters."""
    if max(map(len, text.split()), default=0) <= LONG_WORD and " " * LONG_WORD not in text:
        return text
    return LONG_RUN.sub(lambda run: run[0][:LONG_WORD], text)


def _excerpts(documents: Documents) -> list[str]:
    """Return the first EXCERPT characters of EXCERPTS documents."""

    excerpts = []
    is_start = True
    for text, last in documents.pieces(spread(len(documents), EXCERPTS)):
        if is_start:
            excerpts.append(text[:EXCERPT])
        is_start = last
    return excerpts


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy a published tokenizer's folder, without its manifest."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(MANIFEST))


def contents_of(table: np.ndarray, held_out: np.ndarray) -> list[str]:
    """Return sizes and digests of the training and the held-out contents."""
    digests = table["digest"]
    parts = [digests[~held_out], digests[held_out]]
    contents = []
    for own in parts:
        contents.append(str(len(own)))
        contents.append(blake2b(own.tobytes()).hexdigest())
    return contents
