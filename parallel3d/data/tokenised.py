"""Corpora tokenised by other programs: their files are found and checked, documents indexed.

The ids are not copied. In the cache, such a corpus has instead of tokens.bin:

    starts.bin    int64 [documents]: each document's first id, counted in ids of its file
    weight_starts.bin    the same for the columns of token weights, if there are any

places.npy has the file of each document, and its number there as the row. meta.json lists the
files: name, path, dtype, offset, size. The bounds include an end-of-text after each document,
whether or not the file has one. `key` is a digest of the contents; the directory's name also
depends on the files.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import ceil
from pathlib import Path

import numpy as np

from parallel3d.base.errors import DataError
from parallel3d.config.data import DataConfig, PartConfig
from parallel3d.data.cache import digest_of, load_index, save_index, state_of
from parallel3d.data.corpus_folder import FORMAT, contents_of, write_facts
from parallel3d.data.documents import ENTRY, Skips
from parallel3d.data.facts import Facts
from parallel3d.data.ids import arrow, flat_arrays, megatron
from parallel3d.data.ids.id_file import INTEGERS, TokenFile
from parallel3d.data.ids.spans import SpanFile, beside_ids
from parallel3d.data.ids.validate import Checked, OnIds, Vocabulary, check
from parallel3d.data.remote import is_url, matching_urls
from parallel3d.data.sources import (
    SUFFIX,
    Progress,
    arrow_files,
    arrow_files_of_parquet,
    matching_files,
)
from parallel3d.data.tokenizer import load_tokenizer, num_tokens, save_tokenizer

# Part of an index's name; raise it when scanning the same file yields something else.
INDEX_FORMAT = 1
MEGA = 1_000_000


Source = DataConfig | PartConfig
"""The settings of one source of documents."""


@dataclass(frozen=True, eq=False)
class Tokenised:
    """The documents of a source of token ids, in order."""

    files: tuple[TokenFile, ...]
    table: np.ndarray
    """[n] of documents.ENTRY: `offset` in ids of the file; `num_bytes` and `digest` of the ids as
    uint32, without end-of-text."""
    counts: np.ndarray
    """int64 [vocabulary]"""
    vocabulary: Vocabulary
    facts: Facts
    """Facts about the check, for the corpus's summary."""
    weights: tuple[TokenFile, ...] = ()
    """For each file, the weights of its ids in the loss; empty if all ids count equally."""
    weight_starts: np.ndarray | None = None
    """int64 [n]: each document's first weight in its file of weights."""
    skips: Skips | None = None
    """The conversations that were left out."""

    def __len__(self) -> int:
        return len(self.table)


@dataclass(frozen=True, eq=False)
class TokenRecipe:
    """Everything that determines the bytes of a corpus of ids; `held_out` is bool [documents]."""

    tokens: Tokenised
    held_out: np.ndarray
    tokenizer: Path | None

    def content(self) -> str:
        """Return a digest of the ids of both parts, independent of files and formats."""
        vocabulary = self.tokens.vocabulary
        contents = contents_of(self.tokens.table, self.held_out)
        own = [vocabulary.size, vocabulary.end_of_text, *contents]
        weights = self.tokens.facts.weights
        if weights:
            own += ["weights", weights, *(file.size for file in self.tokens.weights)]
        return digest_of(FORMAT, "ids", *own)

    def key(self) -> str:
        """Return the corpus's name in the cache, which depends on its contents and its files."""
        files = [
            (os.path.abspath(x.path), x.size, x.offset, x.dtype.str) for x in self.tokens.files
        ]
        return digest_of(self.content(), self.tokens.facts.check_ids, *files)

    def fill(self, folder: Path, *_: object) -> None:
        """Write the corpus to `folder`."""
        tokens = self.tokens
        order = np.argsort(self.held_out, kind="stable")
        tokens.table["offset"][order].astype(np.int64).tofile(folder / "starts.bin")
        if tokens.weight_starts is not None:
            tokens.weight_starts[order].astype(np.int64).tofile(folder / "weight_starts.bin")
        (folder / "tokenizer").mkdir()
        if self.tokenizer:
            save_tokenizer(load_tokenizer(self.tokenizer), folder / "tokenizer")
        meta = {
            "dtype": "uint16" if tokens.vocabulary.size <= 2**16 else "uint32",
            "end_of_text": tokens.vocabulary.end_of_text,
            "files": in_json(tokens.files),
            "found": tokens.facts.to_json(),
            "key": self.content(),
        }
        if tokens.weights:
            meta["weights"] = in_json(tokens.weights)
        write_facts(
            folder,
            tokens.table,
            self.held_out,
            tokens.table["num_bytes"] // 4 + 1,
            tokens.counts,
            names={"kind": "ids", "names": [file.name for file in tokens.files]},
            meta=meta,
        )


def in_json(files: Sequence[TokenFile]) -> list[SpanFile]:
    """Return the files as a corpus's meta.json lists them."""
    return [
        {
            "name": x.name,
            "path": os.path.abspath(x.path),
            "dtype": x.dtype.name,
            "offset": x.offset,
            "size": x.size,
        }
        for x in files
    ]


def vocabulary_of(config: DataConfig, tokenizer: Path | None) -> Vocabulary:
    """Return the vocabulary; raise DataError if tokenizer and config disagree on end-of-text."""
    end = config.end_of_text_id
    if tokenizer is None:
        assert end is not None, "the config was checked"
        return Vocabulary(config.vocab_size, end, is_sure=True)
    loaded = load_tokenizer(tokenizer)
    own = loaded.eos_token_id
    if end not in (None, own):
        raise DataError(
            f"data.end_of_text_id = {end}: the tokenizer {config.tokenizer!r} ends documents with"
            f" id {own}; remove the setting, or set eos_token in its tokenizer_config.json"
        )
    return Vocabulary(num_tokens(loaded), own, is_sure=end is not None)


def find_tokens(
    section: Source, vocabulary: Vocabulary, cache: Path, progress: Progress
) -> Tokenised:
    """Return the documents of a source of ids; raise DataError if some are unusable.

    Every file is checked once; the result is cached in `cache`/indexes until the file changes.
    """
    files = _files(section, vocabulary)
    field = section.label_field or section.weight_field
    are_labels = section.label_field is not None
    weights = tuple(beside_ids(file, field, are_labels) for file in files) if field else ()

    def check_file(file: TokenFile, on_ids: OnIds) -> Checked:
        return _check_cached(file, section, vocabulary, cache / "indexes", on_ids)

    tokens = index_files(files, weights, vocabulary, check_file, progress)
    facts = replace(tokens.facts, check_ids=section.check_ids)
    if field:
        kind = "labels" if are_labels else "weights"
        facts = replace(facts, weights=f"{kind} {field}")
    return replace(tokens, facts=facts)


def index_files(
    files: Sequence[TokenFile],
    weights: Sequence[TokenFile],
    vocabulary: Vocabulary,
    check_file: Callable[[TokenFile, OnIds], Checked],
    progress: Progress,
) -> Tokenised:
    """Return the documents of files that `check_file` checks, one after another."""
    total = ceil(sum(file.num_tokens for file in files) / MEGA)
    tables = []
    weight_starts = []
    done = 0
    counts = np.zeros(vocabulary.size, dtype=np.int64)
    num_checked = 0
    num_empty = 0
    for number, file in enumerate(files):

        def on_ids(count: int, before: int = done, most: int = file.num_tokens) -> None:
            progress("checking ids (M)", ceil((before + min(count, most)) / MEGA), total)

        checked = check_file(file, on_ids)
        on_ids(file.num_tokens)
        done += file.num_tokens
        table = np.zeros(len(checked.rows), dtype=ENTRY)
        table["file"] = number
        table["row"] = checked.rows
        table["offset"] = checked.starts
        table["num_bytes"] = 4 * checked.lengths
        table["digest"] = checked.digests
        tables.append(table)
        if weights:
            starts = weights[number].starts
            assert starts is not None, "a column has rows"
            weight_starts.append(starts[checked.rows - 1])
        counts += checked.counts
        num_checked += int(checked.num_checked)
        num_empty += int(checked.num_empty)
        if not len(table):
            raise DataError(f"{file.name}: all documents are empty; leave it out of the source")
    return Tokenised(
        files=tuple(files),
        table=np.concatenate(tables),
        counts=counts,
        vocabulary=vocabulary,
        facts=Facts(num_checked_ids=num_checked, num_empty_documents=num_empty),
        weights=tuple(weights),
        weight_starts=np.concatenate(weight_starts) if weights else None,
    )


def _check_cached(
    file: TokenFile,
    section: Source,
    vocabulary: Vocabulary,
    indexes: Path,
    on_ids: OnIds,
) -> Checked:
    """Return the checked documents of a file, from the cache if the file is unchanged."""
    settings = (section.source, section.token_field, section.check_ids, file.dtype.str, vocabulary)
    before = _signature(file, settings)
    index = indexes / f"{before}.npz"
    if saved := load_index(index):
        return Checked(**saved)
    checked = check(file, vocabulary, sample=section.check_ids == "sample", on_ids=on_ids)
    if _signature(file, settings) != before:
        raise DataError(f"{file.name} changed while it was read; run the preparation again")
    save_index(index, vars(checked))
    return checked


def _signature(file: TokenFile, settings: tuple[object, ...]) -> str:
    """Return a digest of the current state of a file and its index files."""
    paths = file.path, megatron.index_of(file.path), f"{file.path}.index"
    states = chain.from_iterable(map(state_of, paths))
    return digest_of(INDEX_FORMAT, os.path.realpath(file.path), *settings, *states)


def _files(section: Source, vocabulary: Vocabulary) -> list[TokenFile]:
    """Return the files of a source with the layout that their headers and indexes describe."""
    if section.token_field is not None:
        if section.stream:
            paths = section.paths  # an Arrow file that was made from a shard
            names = paths
        elif section.source == "parquet":
            paths, names = arrow_files_of_parquet(matching_files(section.paths, "parquet"))
        else:
            paths, names, rows = arrow_files(section.name, section.subset, section.split)
            if rows:
                raise DataError(
                    f"data.split = {section.split!r}: token ids can only be read from complete"
                    " splits; name one split"
                )
        return [arrow.read(*pair, section.token_field) for pair in zip(paths, names, strict=True)]
    if section.source == "megatron":
        return [megatron.read(path) for path in paths_of(section)]
    dtype = section.token_dtype
    if dtype == "auto":
        dtype = "uint16" if vocabulary.size <= 2**16 else "uint32"
    read = flat_arrays.read if section.source == "tokens" else flat_arrays.read_datatrove
    return [read(path, INTEGERS[dtype]) for path in paths_of(section)]


def paths_of(section: Source) -> list[str]:
    """Return the files with the ids or the text of a source, without those beside them."""
    if section.source == "megatron":
        roots = [path.removesuffix(".bin").removesuffix(".idx") for path in section.paths]
        return _matching([f"{root}.bin" for root in roots], "bin")
    suffix = {"datatrove": "ds", "tokens": "npy", **SUFFIX}[section.source]
    paths = _matching(section.paths, suffix)
    if section.source != "datatrove":
        return paths
    # datatrove writes files with these endings beside NAME.ds.
    ids = [path for path in paths if not path.endswith((".index", ".metadata", ".loss"))]
    if not ids:
        raise DataError("data.paths matches no .ds file; use their paths, or corpus/**/*.ds")
    return ids


def _matching(paths: Sequence[str], suffix: str) -> list[str]:
    """Return the files that match the paths, URLs and globs."""
    local = []
    urls: set[str] = set()
    for path in paths:
        if is_url(path):
            urls.update(matching_urls(path))
        else:
            local.append(path)
    files = matching_files(local, suffix) if local else []
    return [*files, *sorted(urls)]
