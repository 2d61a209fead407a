"""Corpora tokenised by other programs: files found and checked, documents indexed.

The ids stay where they are. A corpus of them has, in its directory in the cache, in place of
tokens.bin:

    starts.bin    int64 [documents]: where in its file each document begins, counted in ids;
                  the file is that of places.npy, whose row is the document's number there

and in its meta.json the files: name, path, dtype, offset, size. Its bounds count an end-of-text
after each document, whether the file has one or not. `key` stands for the contents alone; the
directory's name for the files too, so that each finds its own.
"""

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from parallel3d.atomic import replaced
from parallel3d.config.data import DataConfig, PartConfig
from parallel3d.data.build import FORMAT, contents_of, digest_of, seen
from parallel3d.data.cache import prune
from parallel3d.data.corpus import PLACE, entropy
from parallel3d.data.documents import DAYS_KEPT, ENTRY, SECONDS_UNTIL_SETTLED
from parallel3d.data.foreign import arrays, arrow, datatrove, megatron
from parallel3d.data.foreign.check import Checked, Vocabulary, check
from parallel3d.data.foreign.files import INTEGERS, TokenFile, is_file
from parallel3d.data.foreign.remote import is_url, matching, version_of
from parallel3d.data.foreign.spans import Spans
from parallel3d.data.sources import Progress, matching_files
from parallel3d.data.statistics import save_held_out
from parallel3d.data.tokenizer import load_tokenizer, num_tokens, save_tokenizer
from parallel3d.errors import DataError

# Part of an index's name: raise it when what is found in the same file changes.
INDEX_FORMAT = 1
MEGA = 1_000_000


@dataclass(frozen=True, eq=False)
class Tokenised:
    """The documents of a source of token ids, in order.

    `table` [n] of documents.ENTRY: `offset` counts ids of the file, without end-of-text; num_bytes
    is that of the ids as uint32, which the digest is of.
    """

    files: tuple[TokenFile, ...]
    table: np.ndarray
    counts: np.ndarray
    vocabulary: Vocabulary
    found: dict[str, Any]

    def __len__(self) -> int:
        return len(self.table)


@dataclass(frozen=True, eq=False)
class TokenRecipe:
    """Everything that the bytes of a corpus of ids depend on. `held_out` bool [documents]."""

    tokens: Tokenised
    held_out: np.ndarray
    tokenizer: Path | None

    def content(self) -> str:
        """The digest of the ids of both parts, whatever files and formats hold them."""
        vocabulary, contents = self.tokens.vocabulary, contents_of(self.tokens.table, self.held_out)
        return digest_of(FORMAT, "ids", vocabulary.size, vocabulary.end_of_text, *contents)

    def key(self) -> str:
        """The name of the corpus in the cache, by its contents and its files."""
        files = [
            (_place(file), file.size, file.offset, file.dtype.str) for file in self.tokens.files
        ]
        return digest_of(self.content(), self.tokens.found["check_ids"], *files)

    def fill(self, folder: Path) -> None:
        """Fill the folder of the corpus."""
        tokens, held_out = self.tokens, self.held_out
        order = np.argsort(held_out, kind="stable")
        table = tokens.table[order]
        lengths = table["num_bytes"] // 4 + 1
        bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        bounds.tofile(folder / "bounds.bin")
        table["offset"].astype(np.int64).tofile(folder / "starts.bin")
        places = table[["file", "row"]].astype(PLACE)
        np.save(folder / "places.npy", places, allow_pickle=False)
        np.save(folder / "counts.npy", tokens.counts, allow_pickle=False)
        (folder / "tokenizer").mkdir()
        if self.tokenizer:
            save_tokenizer(load_tokenizer(self.tokenizer), folder / "tokenizer")
        size = tokens.vocabulary.size
        meta: dict[str, Any] = {
            "dtype": "uint16" if size <= 2**16 else "uint32",
            "end_of_text": tokens.vocabulary.end_of_text,
            "files": [
                {
                    "name": file.name,
                    "path": _place(file),
                    "dtype": file.dtype.name,
                    "offset": file.offset,
                    "size": file.size,
                }
                for file in tokens.files
            ],
            "format": FORMAT,
            "found": tokens.found | seen(tokens.table),
            "key": self.content(),
            "num_documents": len(tokens),
            "num_tokens": int(lengths.sum()),
            "num_train_documents": int((~held_out).sum()),
            "unigram_entropy": entropy(tokens.counts),
            "vocab_size": size,
        }
        names = {"kind": "ids", "names": [file.name for file in tokens.files]}
        (folder / "names.json").write_text(json.dumps(names))
        (folder / "meta.json").write_text(json.dumps(meta, indent=1))
        if tokens.found["check_ids"] == "full":
            first = meta["num_train_documents"]
            ids = Spans(
                files=meta["files"],
                places=table["file"][first:],
                starts=table["offset"][first:],
                bounds=bounds[first:],
                end_of_text=meta["end_of_text"],
                dtype=np.dtype(meta["dtype"]),
            )
            save_held_out(folder, ids, size)


def vocabulary_of(config: DataConfig, tokenizer: Path | None) -> Vocabulary:
    """The allowed ids, by the tokenizer and the config's own words; these must agree."""
    end = config.end_of_text_id
    if tokenizer is None:
        assert end is not None, "the config was checked"
        return Vocabulary(config.vocab_size, end, is_sure=True)
    loaded = load_tokenizer(tokenizer)
    own = loaded.eos_token_id
    if end not in (None, own):
        raise DataError(
            f"data.end_of_text_id = {end}: data.tokenizer={config.tokenizer!r} ends documents with"
            f" id {own}; remove it, or set eos_token in its tokenizer_config.json"
        )
    return Vocabulary(num_tokens(loaded), own, is_sure=end is not None)


def find_tokens(
    section: DataConfig | PartConfig, vocabulary: Vocabulary, cache: Path, progress: Progress
) -> Tokenised:
    """The documents of a source of ids.

    Every file is looked through once; what was found is kept in `cache`/indexes for as long as the
    file is untouched. Raises DataError for what cannot be used.
    """
    files = _files(section, vocabulary)
    total = ceil(sum(file.num_tokens for file in files) / MEGA)
    tables, done = [], 0
    counts = np.zeros(vocabulary.size, dtype=np.int64)
    found: dict[str, Any] = {
        "check_ids": section.check_ids,
        "num_checked_ids": 0,
        "num_empty_documents": 0,
    }
    for number, file in enumerate(files):
        heard = done

        def on_ids(count: int) -> None:
            nonlocal heard
            heard += count
            progress("checking ids (M)", min(heard // MEGA, total), total)

        checked = _indexed(file, section, vocabulary, cache / "indexes", on_ids)
        done += file.num_tokens
        progress("checking ids (M)", min(ceil(done / MEGA), total), total)
        table = np.zeros(len(checked.rows), dtype=ENTRY)
        table["file"], table["row"] = number, checked.rows
        table["offset"], table["num_bytes"] = checked.starts, 4 * checked.lengths
        table["digest"] = checked.digests
        tables.append(table)
        counts += checked.counts
        found["num_checked_ids"] += int(checked.num_checked)
        found["num_empty_documents"] += int(checked.num_empty)
        if not len(table):
            raise DataError(f"{file.name} has no document with ids; leave it out")
    return Tokenised(tuple(files), np.concatenate(tables), counts, vocabulary, found)


def _files(section: DataConfig | PartConfig, vocabulary: Vocabulary) -> list[TokenFile]:
    """Read what the files of a source say of themselves."""
    if section.token_field is not None:
        # Takes a second to import.
        from parallel3d.data.hub import arrow_files, arrow_files_of_parquet

        if section.source == "parquet":
            found = [*arrow_files_of_parquet(tuple(matching_files(section.paths, "parquet")))]
        else:
            *found, cut = arrow_files(section.name, section.subset, section.split)
            if cut:
                rule = "token ids are read of whole splits alone"
                raise DataError(f"data.split = {section.split!r}: {rule}; name one")
        return [
            arrow.read(*pair, section.token_field) for pair in zip(found[0], found[1], strict=True)
        ]
    if section.source == "megatron":
        roots = [path.removesuffix(".bin").removesuffix(".idx") for path in section.paths]
        paths = _matching([f"{root}.bin" for root in roots], "bin")
        return [megatron.read(path) for path in paths]
    dtype = section.token_dtype
    if dtype == "auto":
        dtype = "uint16" if vocabulary.size <= 2**16 else "uint32"
    if section.source == "tokens":
        paths = _matching(section.paths, "npy")
        return [arrays.read(path, INTEGERS[dtype]) for path in paths]
    paths = [p for p in _matching(section.paths, "ds") if not p.endswith(datatrove.BESIDE)]
    if not paths:
        raise DataError("data.paths matches no .ds file; give their paths, or corpus/**/*.ds")
    return [datatrove.read(path, INTEGERS[dtype]) for path in paths]


def _matching(paths: Sequence[str], suffix: str) -> list[str]:
    """The files that paths, URLs and globs of either name."""
    local = [path for path in paths if not is_url(path)]
    found = [url for path in paths if is_url(path) for url in matching(path)]
    return [*(matching_files(local, suffix) if local else ()), *sorted(set(found))]


def _place(file: TokenFile) -> str:
    return file.path if is_url(file.path) else os.path.abspath(file.path)


def _indexed(
    file: TokenFile,
    section: DataConfig | PartConfig,
    vocabulary: Vocabulary,
    indexes: Path,
    on_ids: Any,
) -> Checked:
    """Look through a file, unless that was done before and is known of the file as it is."""
    settings = (section.source, section.token_field, section.check_ids, file.dtype.str, vocabulary)
    before = _signature(file, settings)
    index = indexes / f"{before}.npz"
    with suppress(OSError, ValueError, KeyError, TypeError), np.load(index) as kept:
        checked = Checked(**{name: kept[name][()] for name in kept.files})
        os.utime(index)
        return checked
    started = time.time()
    checked = check(file, vocabulary, sample=section.check_ids == "sample", on_ids=on_ids)
    if _signature(file, settings) != before:
        raise DataError(f"{file.name} changed while it was read; run it again")
    # A cache that cannot be written is no matter here: it only saves time.
    with suppress(OSError):
        if is_url(file.path) or _settled(file.path, started):
            indexes.mkdir(parents=True, exist_ok=True)
            with replaced(index, shared=True) as partial, open(partial, "wb") as opened:
                np.savez(opened, **vars(checked))
            prune(indexes, DAYS_KEPT)
    return checked


def _settled(path: str, started: float) -> bool:
    state = os.stat(path)
    return started - max(state.st_mtime, state.st_ctime) > SECONDS_UNTIL_SETTLED


def _signature(file: TokenFile, settings: tuple[Any, ...]) -> str:
    """What stands for a file and what lies beside it, as they are now."""
    remote = is_url(file.path)
    name = file.path if remote else os.path.realpath(file.path)
    parts: list[Any] = [INDEX_FORMAT, name, *settings]
    for path in (file.path, megatron.index_of(file.path), f"{file.path}.index"):
        if remote:
            parts.append(version_of(path) if is_file(path) else None)
            continue
        with suppress(OSError):
            state = os.stat(path)
            parts += state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns
    return digest_of(*parts)
