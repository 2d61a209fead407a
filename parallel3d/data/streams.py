"""Streams: a manifest of shards is made once, and a run fetches the shards that it needs.

A manifest is a folder that looks like a corpus (`corpus`) without its tokens:

    shards.json   for each shard its files (URL, bytes, BLAKE2 hash), tokens, documents, key
    heads.bin     [shards, head_length]: the ids from the beginning of each shard on
    bounds.bin, places.npy, names.json, counts.npy, tokenizer/, meta.json   as in a corpus

It has 20 bytes for each document. A shard's ids are those that its documents have in a local
corpus: of text after tokenising, of other programs' ids with one end-of-text after each document.
With `data.count` "as-read" only the first shard is tokenised, tokens of all other documents are
estimated from their bytes, and heads.bin is empty (`sharded`).
"""

import json
import logging
import shutil
import time
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from parallel3d.base.errors import DataError
from parallel3d.config.data import DataConfig, PartConfig, SourceConfig, yields_token_ids
from parallel3d.data.cache import cache_root, digest_of, file_digest, is_complete, locked, staged
from parallel3d.data.corpus import Corpus
from parallel3d.data.corpus_folder import FORMAT, Recipe, write_facts
from parallel3d.data.documents import Documents, Skips, find_documents
from parallel3d.data.facts import Facts
from parallel3d.data.ids import megatron
from parallel3d.data.ids.id_file import BLOCK
from parallel3d.data.ids.spans import Spans
from parallel3d.data.ids.validate import Vocabulary
from parallel3d.data.order import bounds_of
from parallel3d.data.remote import ask, is_file, is_url
from parallel3d.data.sharded import HEADS, IDS, SHARDS, LostShard, Shard, ShardCache, ShardedTokens
from parallel3d.data.shards import ShardPlan, fill_shard
from parallel3d.data.sources import KINDS, Files, Progress, find_files, no_progress
from parallel3d.data.tokenised import (
    Source,
    Tokenised,
    TokenRecipe,
    find_tokens,
    in_json,
    paths_of,
    vocabulary_of,
)
from parallel3d.data.tokenizer import directory_digest, load_tokenizer, save_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ATTEMPTS = 5
_log = logging.getLogger(__name__)
FIRST_PAUSE_SECONDS = 0.5
# Settings that determine the ids of a shard.
_SETTINGS = ("source", "documents", "text_field", "token_field", "token_dtype", "count")


# A file of a shard, as shards.json has it: `path` (its URL), `size`, and `hash` (BLAKE2).
_File = dict[str, Any]


@dataclass(frozen=True, eq=False)
class _Converted:
    """The documents of one shard, whose ids were written."""

    table: np.ndarray
    """[documents] of documents.ENTRY"""
    lengths: np.ndarray
    """int64 [documents]: the number of ids of each, with its end-of-text."""
    counts: np.ndarray
    """int64 [vocabulary]"""
    skips: Skips = field(default_factory=Skips)
    num_checked_ids: int = 0
    num_empty_documents: int = 0


def open_shard_cache(config: DataConfig) -> ShardCache | None:
    """Return the node's cache for the streams of a config; None if it has none."""
    if not config.streams:
        return None
    for part in config.streams:
        folder = _folder(part)
        if not yields_token_ids(part) and (folder / SHARDS).is_file():
            # Here, since transformers must not be imported by two threads at once.
            _tokenizer(folder)
    return ShardCache(
        cache_root(config.cache) / "streams",
        config.stream_cache_bytes,
        fetch_shard,
        window=None if config.stream_window == "all" else config.stream_window,
        # With a lost shard's samples unknown, nodes would count the others differently.
        skips=config.on_error == "skip" and not config.counts_as_read,
    )


def open_stream(
    config: DataConfig,
    section: Source,
    tokenizer: Path | None,
    cache: ShardCache | None,
) -> Corpus:
    """Return the corpus of a manifest; raise DataError if the config differs from it."""
    folder = _folder(section)
    remedy = "run `parallel3d prepare --config ... --manifest`"
    if not is_complete(folder) or not (folder / SHARDS).is_file():
        raise DataError(
            f"data.manifest = {section.manifest!r} is not a complete manifest; {remedy}"
        )
    made = _meta(folder)["stream"]
    for name, value in _identity(config, section, tokenizer).items():
        before = made["identity"].get(name, "manifest")
        if before != value:
            raise DataError(
                f"data.{name} = {value!r}: the manifest {section.manifest!r} was made with"
                f" {before!r}; set it back, or {remedy} again"
            )
    if section.count == "manifest" and config.sequence_length > made["head_length"]:
        raise DataError(
            f"data.sequence_length = {config.sequence_length}: the manifest {section.manifest!r}"
            f" was made for samples of at most {made['head_length']} tokens; {remedy} again"
        )
    return Corpus.open(folder, shards=cache)


def check_room(config: DataConfig, corpora: list[Corpus]) -> None:
    """Raise DataError unless two windows of each stream fit into data.stream_cache_bytes."""
    tokens = [part.stream("train").tokens for part in corpora]
    needed = sum(part.num_bytes_needed for part in tokens if isinstance(part, ShardedTokens))
    if needed > config.stream_cache_bytes:
        raise DataError(
            f"data.stream_cache_bytes = {config.stream_cache_bytes:,}: two windows of"
            f" data.stream_window = {config.stream_window} shards need {needed:,} bytes; raise it,"
            " lower stream_window, or write smaller shards"
        )


def make_manifest(
    config: DataConfig,
    section: Source,
    tokenizer: Path | None,
    progress: Progress = no_progress,
) -> None:
    """Read every shard of a stream once, and write its manifest, which replaces an earlier one.

    Raises DataError for unusable shards, and if another folder has the manifest's name.
    """
    target = _folder(section)
    phase = f"waiting for another process to write {section.manifest}"
    with locked(target, lambda: progress(phase, 0, 1)):
        if target.is_file() or (any(target.glob("*")) and not (target / SHARDS).is_file()):
            raise DataError(
                f"data.manifest = {section.manifest!r} is not a manifest; use a new folder"
            )
        with staged(target, in_cache=False) as folder:
            (folder / "tokenizer").mkdir()
            _fill(folder, config, section, tokenizer, progress)


def _fill(
    folder: Path,
    config: DataConfig,
    section: Source,
    tokenizer: Path | None,
    progress: Progress,
) -> None:
    if tokenizer:
        save_tokenizer(load_tokenizer(tokenizer), folder / "tokenizer")
    vocabulary = vocabulary_of(config, tokenizer)
    keys = {key: getattr(section, key) for key in SourceConfig.model_fields}
    part = PartConfig(**keys | {"source": section.source})
    as_read = section.count == "as-read"
    per_byte = 0.0
    head_length = 0 if as_read else config.sequence_length
    meta: dict[str, Any] = {
        "dtype": "uint16" if vocabulary.size <= 2**16 else "uint32",
        "end_of_text": vocabulary.end_of_text,
        "stream": {
            "head_length": head_length,
            "identity": _identity(config, section, tokenizer),
            "section": part.model_copy(update={"paths": ("a shard",)}).model_dump(mode="json"),
            "vocabulary": list(vars(vocabulary).values()),
            "rule": [config.on_error, config.max_skipped],
            "max_line_bytes": config.max_line_bytes,
        },
    }
    (folder / "meta.json").write_text(json.dumps(meta))
    shards = _shard_paths(part)
    entries = []
    heads = []
    converted = []
    for number, urls in enumerate(shards):
        progress("reading shards", number, len(shards))
        work = folder / "shard"
        (work / "raw").mkdir(parents=True)
        files = [_download(url, work / "raw") for url in urls]
        one = _convert(folder, work, [file["path"] for file in files], per_byte)
        one.table["file"] = number
        entries.append(_entry(files, one, meta))
        heads.append(np.fromfile(work / IDS, meta["dtype"], count=head_length))
        if as_read and not per_byte:
            per_byte = one.lengths.sum() / one.table["num_bytes"].sum()
        converted.append(one)
        shutil.rmtree(work)
    progress("reading shards", len(shards), len(shards))
    (folder / SHARDS).write_text(json.dumps(entries, indent=1))
    with open(folder / HEADS, "wb") as file:
        rows = [np.zeros(head_length, meta["dtype"])]
        for head in reversed(heads):
            rows.append(np.concatenate([head, rows[-1]])[:head_length])
        np.stack(rows[:0:-1]).tofile(file)
    table = np.concatenate([one.table for one in converted])
    lengths = np.concatenate([one.lengths for one in converted])
    held_out = np.zeros(len(table), dtype=bool)
    skips = Skips()
    counts = np.sum([one.counts for one in converted], axis=0)
    for one in converted:
        skips.add_all(one.skips)
    skips.check_share(skips.num_flawed, len(table), config.max_skipped)
    names = [urls[0] for urls in shards]
    if yields_token_ids(section):
        # In the order of manifests made before.
        facts = Facts.from_json(
            {
                "num_checked_ids": sum(one.num_checked_ids for one in converted),
                "num_empty_documents": sum(one.num_empty_documents for one in converted),
                "check_ids": section.check_ids,
            }
        )
        tokens = Tokenised((), table, counts, vocabulary, facts)
        meta["key"] = TokenRecipe(tokens, held_out, tokenizer).content()
        kind = "ids"
    else:
        facts = Facts(count=section.count, num_bytes=int(table["num_bytes"].sum()))
        facts = skips.add_to(facts)
        kind = KINDS[part.documents] if part.source == "text" else part.source
        documents = Documents(Files(kind, (), ()), table)
        key = Recipe(documents, held_out, tokenizer, vocabulary.size).key()
        meta["key"] = digest_of(key, "as-read") if as_read else key
    write_facts(
        folder,
        table,
        held_out,
        lengths,
        counts,
        names={"kind": kind, "names": names},
        meta=meta | {"found": facts.to_json()},
    )


def fetch_shard(shard: Shard, folder: Path) -> None:
    """Write the ids of a shard of a manifest to `folder`/ids.bin.

    Raises LostShard if it is missing or differs from the manifest, DataError if it cannot be read.
    """
    entry = shard.entry
    (folder / "raw").mkdir()
    for file in entry["files"]:
        _download(file["path"], folder / "raw", file)
    one = _convert(shard.manifest, folder, [file["path"] for file in entry["files"]])
    what = "tokens"
    count = int(one.lengths.sum())
    if entry.get("beside_ids"):  # counted as read
        what = "documents"
        count = len(one.lengths)
        with open(folder / IDS, "ab") as ids:
            one.lengths.tofile(ids)
    if count != entry[what]:
        raise DataError(
            f"{shard.name} has {count:,} {what}, but its manifest says {entry[what]:,}, made"
            " with another version of the tokenizers; make it again"
        )
    for path in folder.iterdir():
        if path.name != IDS:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _download(url: str, folder: Path, expected: _File | None = None) -> _File:
    """Fetch a file to `folder`; return its path, size and hash.

    Failures, and files that differ from `expected`, are tried again with growing pauses. Raises
    LostShard if the file is missing or differs, DataError if it cannot be read.
    """
    target = folder / _file_name(url)
    error: DataError | None = None
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(FIRST_PAUSE_SECONDS * 2 ** (attempt - 1))
        # A server that answers after all writes to the file of its own attempt.
        arriving = folder / f"{target.name}.{attempt}"
        try:
            _receive(url, arriving)
            arriving.replace(target)
        except DataError as failed:
            error = failed
            if isinstance(failed.__cause__, TimeoutError):
                _log.warning("attempt %d of %d: %s", attempt + 1, ATTEMPTS, failed)
            if isinstance(failed.__cause__, FileNotFoundError):
                error = _lost(url, "does not exist", expected) if expected else failed
            continue
        size = target.stat().st_size
        digest = file_digest(target)
        actual: _File = {"path": url, "size": size, "hash": digest}
        if expected in (None, actual):
            return actual
        error = _lost(url, f"has {size:,} bytes with the hash {digest}", expected or actual)
    assert error
    if isinstance(error, LostShard) or expected is None:
        raise error
    raise DataError(f"after {ATTEMPTS} attempts: {error} (expected {_described(expected)})")


def _receive(url: str, target: Path) -> None:
    """Fetch a file; raise DataError if it cannot be read, or its server is silent."""

    def received_bytes() -> int:
        return target.stat().st_size if target.exists() else 0

    ask(url, lambda system, path: system.get_file(path, str(target)), received_bytes)


def _file_name(url: str) -> str:
    """Return the file's name without the query of a URL, since its ending says how it is read."""
    name = url.rpartition("/")[2]
    return name.partition("?")[0] if is_url(url) else name


def _lost(url: str, what: str, expected: _File) -> LostShard:
    return LostShard(
        f"{url} {what}, but its manifest expects {_described(expected)}; restore it, make the"
        ' manifest again, or set data.on_error to "skip" (not with data.count "as-read")'
    )


def _described(expected: _File) -> str:
    return f"{expected['size']:,} bytes with the hash {expected['hash']}"


def _convert(manifest: Path, folder: Path, urls: list[str], per_byte: float = 0.0) -> _Converted:
    """Write the ids of the shard whose files are in `folder`/raw to `folder`/ids.bin.

    With `per_byte`, tokens per byte, the lengths are estimates and no ids are written.
    """
    meta = _meta(manifest)
    stream = meta["stream"]
    dtype = np.dtype(meta["dtype"])
    section = PartConfig.model_validate(stream["section"])
    vocabulary = Vocabulary(*stream["vocabulary"])
    local = str(folder / "raw" / _file_name(urls[0]))
    try:
        if yields_token_ids(section):
            return _convert_ids(section, local, folder, vocabulary, dtype)
        found = find_files(section.model_copy(update={"paths": (local,)}), stream["max_line_bytes"])
        documents = find_documents(
            replace(found, names=(urls[0],)),
            folder,
            # The share of skipped documents is that of all shards; `make_manifest` checks it.
            rule=(stream["rule"][0], 1.0),
        )
        if per_byte:
            lengths = np.ceil(documents.table["num_bytes"] * per_byte).astype(np.int64)
            counts = np.zeros(vocabulary.size, np.int64)
            (folder / IDS).touch()
            return _Converted(documents.table.copy(), lengths, counts, documents.skips)
        count = len(documents)
        plan = ShardPlan(
            work=folder,
            documents=documents,
            held_out=np.zeros(count, dtype=bool),
            bounds=[0, count],
            todo=[0],
            vocab_size=vocabulary.size,
            end_of_text=vocabulary.end_of_text,
        )
        fill_shard(folder, plan, 0, _tokenizer(manifest), lambda _: None)
        (folder / "train.bin").rename(folder / IDS)
        lengths = np.load(folder / "lengths.npy")
        counts = np.load(folder / "counts.npy")
        return _Converted(documents.table.copy(), lengths, counts, documents.skips)
    except DataError as error:
        raise DataError(str(error).replace(local, urls[0])) from error


def _convert_ids(
    section: PartConfig, local: str, folder: Path, vocabulary: Vocabulary, dtype: np.dtype
) -> _Converted:
    if section.token_field is not None:
        local = _to_arrow(local, section.token_field)
    part = section.model_copy(update={"paths": (local,)})
    tokens = find_tokens(part, vocabulary, folder, no_progress)
    lengths = tokens.table["num_bytes"] // 4 + 1
    spans = Spans(
        files=in_json(tokens.files),
        places=np.zeros(len(lengths), np.int64),
        starts=tokens.table["offset"].astype(np.int64),
        bounds=bounds_of(lengths),
        end_of_text=vocabulary.end_of_text,
        dtype=dtype,
    )
    with open(folder / IDS, "wb") as file:
        for first in range(0, len(spans), BLOCK):
            spans[first : first + BLOCK].tofile(file)
    facts = tokens.facts
    return _Converted(
        tokens.table,
        lengths,
        tokens.counts,
        num_checked_ids=facts.num_checked_ids or 0,
        num_empty_documents=facts.num_empty_documents or 0,
    )


def _to_arrow(path: str, column: str) -> str:
    """Write a column of a Parquet file as an uncompressed Arrow stream; return its path."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            schema = pa.schema([field for field in file.schema_arrow if field.name == column])
            with pa.ipc.new_stream(f"{path}.arrow", schema) as stream:
                for batch in file.iter_batches(columns=[column]):
                    stream.write_batch(batch)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read ({error}); write it again") from error
    return f"{path}.arrow"


def _shard_paths(section: PartConfig) -> list[list[str]]:
    """Return the files of each shard; the first one has the ids or the text."""
    paths = paths_of(section)
    if section.source == "megatron":
        return [[path, megatron.index_of(path)] for path in paths]
    if section.source == "datatrove":
        shards = []
        for path in paths:
            index = f"{path}.index"
            shards.append([path, index] if is_file(index) else [path])
        return shards
    return [[path] for path in paths]


def _entry(files: list[_File], one: _Converted, meta: dict[str, Any]) -> dict[str, object]:
    tokens = int(one.lengths.sum())
    stream = meta["stream"]
    hashes = [file["hash"] for file in files]
    key = digest_of(FORMAT, *hashes, *stream["identity"].values(), *stream["rule"])
    beside = 64 * len(one.table) + 16 * len(one.counts)
    if stream["section"]["token_field"]:
        beside += 16 * tokens  # the column in Arrow, of int64 at most
    beside_ids = 0
    if stream["section"]["count"] == "as-read":
        # The number of tokens is an estimate. No document has more than its bytes, and two.
        beside += 4 * (int(one.table["num_bytes"].sum()) + 2 * len(one.table))
        beside_ids = 8 * len(one.table)
    return {
        "files": files,
        "tokens": tokens,
        "documents": len(one.table),
        "beside_ids": beside_ids,
        "key": key,
        "fetch_bytes": sum(file["size"] for file in files) + beside,
    }


def _identity(config: DataConfig, section: Source, tokenizer: Path | None) -> dict[str, Any]:
    """Return the settings that determine the ids of a stream, as JSON values."""
    own: dict[str, Any] = {name: getattr(section, name) for name in _SETTINGS}
    own["tokenizer"] = directory_digest(tokenizer) if tokenizer else "none"
    if tokenizer is None:
        own["vocab_size"] = config.vocab_size
    return own | {"end_of_text_id": config.end_of_text_id}


def _meta(manifest: Path) -> dict[str, Any]:
    meta: dict[str, Any] = json.loads((manifest / "meta.json").read_text())
    return meta


def _folder(section: SourceConfig) -> Path:
    """Return the folder of a stream's manifest."""
    return Path(section.manifest).absolute()


def _tokenizer(manifest: Path) -> "PreTrainedTokenizerBase":
    """Return the tokenizer of a manifest."""
    # Its digest tells it from an earlier one in its place.
    return _load(manifest / "tokenizer", _meta(manifest)["stream"]["identity"]["tokenizer"])


@cache
def _load(directory: Path, digest: str) -> "PreTrainedTokenizerBase":
    return load_tokenizer(directory)
