"""Corpora tokenised by other programs: files found and checked, documents indexed.

The ids stay where they are. Their corpus has in the cache, in place of tokens.bin:

    starts.bin    int64 [documents]: where in its file each document begins, counted in ids;
                  the file is that of places.npy, whose row is the document's number there
    weight_starts.bin    the same in the files of how much ids count, where there are some

and in its meta.json the files: name, path, dtype, offset, size. Its bounds count an end-of-text
after each document, whether the file has one or not. `key` stands for the contents alone; the
directory's name for the files too.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from parallel3d.base.errors import DataError
from parallel3d.config.data import DataConfig, PartConfig
from parallel3d.data.cache import digest_of, is_settled, keep, load, state_of
from parallel3d.data.corpus_folder import FORMAT, contents_of, write_facts
from parallel3d.data.documents import ENTRY
from parallel3d.data.ids import arrow, datatrove, flat_arrays, megatron
from parallel3d.data.ids.counting import beside_ids
from parallel3d.data.ids.id_file import INTEGERS, TokenFile, is_file
from parallel3d.data.ids.remote import is_url, matching, version_of
from parallel3d.data.ids.validate import Checked, OnIds, Vocabulary, check
from parallel3d.data.sources import Progress, matching_files
from parallel3d.data.tokenizer import load_tokenizer, num_tokens, save_tokenizer

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
    weights: tuple[TokenFile, ...] = ()
    """Beside each file, how much its ids count in the loss; none where all count alike."""
    weight_starts: np.ndarray | None = None
    """int64 [n]: where there each document begins."""

    def __len__(self) -> int:
        return len(self.table)


@dataclass(frozen=True, eq=False)
class TokenRecipe:
    """Everything that the bytes of a corpus of ids depend on. `held_out` bool [documents]."""

    tokens: Tokenised
    held_out: np.ndarray
    tokenizer: Path | None

    def content(self) -> str:
        """Return the digest of the ids of both parts, whatever files and formats hold them."""
        vocabulary, contents = self.tokens.vocabulary, contents_of(self.tokens.table, self.held_out)
        own = [vocabulary.size, vocabulary.end_of_text, *contents]
        if weights := self.tokens.found.get("weights"):
            own += ["weights", weights, *(file.size for file in self.tokens.weights)]
        return digest_of(FORMAT, "ids", *own)

    def key(self) -> str:
        """Return the name of the corpus in the cache, by its contents and its files."""
        files = [(_place(x), x.size, x.offset, x.dtype.str) for x in self.tokens.files]
        return digest_of(self.content(), self.tokens.found["check_ids"], *files)

    def fill(self, folder: Path, *_: object) -> None:
        """Fill the folder of the corpus."""
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
            "files": _in_json(tokens.files),
            "found": tokens.found,
            "key": self.content(),
        }
        if tokens.weights:
            meta["weights"] = _in_json(tokens.weights)
        write_facts(
            folder,
            tokens.table,
            self.held_out,
            tokens.table["num_bytes"] // 4 + 1,
            tokens.counts,
            names={"kind": "ids", "names": [file.name for file in tokens.files]},
            meta=meta,
        )


def _in_json(files: Sequence[TokenFile]) -> list[dict[str, Any]]:
    """Return the files as a corpus's meta.json names them."""
    return [
        {
            "name": x.name,
            "path": _place(x),
            "dtype": x.dtype.name,
            "offset": x.offset,
            "size": x.size,
        }
        for x in files
    ]


def vocabulary_of(config: DataConfig, tokenizer: Path | None) -> Vocabulary:
    """Return the allowed ids, by the tokenizer and the config, which must agree."""
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
    """Return the documents of a source of ids; raises DataError for what cannot be used.

    Every file is looked through once; the findings are kept in `cache`/indexes until it changes.
    """
    files = _files(section, vocabulary)
    total = ceil(sum(file.num_tokens for file in files) / MEGA)
    field = section.label_field or section.weight_field
    are_labels = section.label_field is not None
    weights = tuple(beside_ids(file, field, are_labels) for file in files) if field else ()
    tables, weight_starts, done = [], [], 0
    counts = np.zeros(vocabulary.size, dtype=np.int64)
    num_checked = num_empty = 0
    for number, file in enumerate(files):

        def on_ids(count: int, before: int = done, most: int = file.num_tokens) -> None:
            progress("checking ids (M)", ceil((before + min(count, most)) / MEGA), total)

        checked = _checked(file, section, vocabulary, cache / "indexes", on_ids)
        on_ids(file.num_tokens)
        done += file.num_tokens
        table = np.zeros(len(checked.rows), dtype=ENTRY)
        table["file"], table["row"] = number, checked.rows
        table["offset"], table["num_bytes"] = checked.starts, 4 * checked.lengths
        table["digest"] = checked.digests
        tables.append(table)
        if weights:
            starts = weights[number].starts
            # Without an index the ids say where documents are; a byte stands beside each.
            weight_starts.append(checked.starts if starts is None else starts[checked.rows - 1])
        counts += checked.counts
        num_checked += int(checked.num_checked)
        num_empty += int(checked.num_empty)
        if not len(table):
            raise DataError(f"{file.name} has no document with ids; leave it out")
    found: dict[str, Any] = {
        "check_ids": section.check_ids,
        "num_checked_ids": num_checked,
        "num_empty_documents": num_empty,
    }
    if field:
        found["weights"] = f"{'labels' if are_labels else 'weights'} {field}"
    return Tokenised(
        tuple(files),
        np.concatenate(tables),
        counts,
        vocabulary,
        found,
        weights,
        np.concatenate(weight_starts) if weights else None,
    )


def _checked(
    file: TokenFile,
    section: DataConfig | PartConfig,
    vocabulary: Vocabulary,
    indexes: Path,
    on_ids: OnIds,
) -> Checked:
    """Look through a file, unless that was done before and is known of the file as it is."""
    settings = (section.source, section.token_field, section.check_ids, file.dtype.str, vocabulary)
    before = _signature(file, settings)
    index = indexes / f"{before}.npz"
    if kept := load(index):
        return Checked(**kept)
    settled = is_url(file.path) or is_settled(file.path)
    checked = check(file, vocabulary, sample=section.check_ids == "sample", on_ids=on_ids)
    if _signature(file, settings) != before:
        raise DataError(f"{file.name} changed while it was read; run it again")
    if settled:
        keep(index, vars(checked))
    return checked


def _signature(file: TokenFile, settings: tuple[Any, ...]) -> str:
    """Return a digest of a file and what lies beside it, as they are now."""
    paths = file.path, megatron.index_of(file.path), f"{file.path}.index"
    if is_url(file.path):
        versions = [version_of(path) if is_file(path) else None for path in paths]
        return digest_of(INDEX_FORMAT, file.path, *settings, *versions)
    states = [part for path in paths for part in state_of(path)]
    return digest_of(INDEX_FORMAT, os.path.realpath(file.path), *settings, *states)


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
        return [megatron.read(path) for path in _matching([f"{root}.bin" for root in roots], "bin")]
    dtype = section.token_dtype
    if dtype == "auto":
        dtype = "uint16" if vocabulary.size <= 2**16 else "uint32"
    if section.source == "tokens":
        return [flat_arrays.read(path, INTEGERS[dtype]) for path in _matching(section.paths, "npy")]
    paths = [p for p in _matching(section.paths, "ds") if not p.endswith(datatrove.BESIDE)]
    if not paths:
        raise DataError("data.paths matches no .ds file; give their paths, or corpus/**/*.ds")
    return [datatrove.read(path, INTEGERS[dtype]) for path in paths]


def _matching(paths: Sequence[str], suffix: str) -> list[str]:
    """Return the files that paths, URLs and globs of either name."""
    local = [path for path in paths if not is_url(path)]
    found = [url for path in paths if is_url(path) for url in matching(path)]
    return [*(matching_files(local, suffix) if local else ()), *sorted(set(found))]


def _place(file: TokenFile) -> str:
    return file.path if is_url(file.path) else os.path.abspath(file.path)
