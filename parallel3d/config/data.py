"""The "data" section: the corpus or mixture, its tokenizer, and how it is cut into samples."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, Strict
from pydantic_core import to_jsonable_python

from parallel3d.base.section import (
    ABSENT,
    Count,
    FolderText,
    Items,
    NaturalCount,
    PathText,
    Positive,
    Problem,
    Section,
    Share,
    Size,
    Tokens,
)

# Files of token ids written by other programs: Megatron-LM, datatrove, flat arrays.
ID_SOURCES = ("megatron", "datatrove", "tokens")
Source = Literal[
    "python-stdlib", "text", "jsonl", "parquet", "hub", "chat", "megatron", "datatrove", "tokens"
]
# A single path may be written without a list.
Paths = Annotated[
    tuple[PathText, ...],
    BeforeValidator(lambda value: (value,) if isinstance(value, str) else value),
    Strict(False),
]
TokenDtype = Literal["auto", "uint8", "uint16", "int16", "uint32", "int32", "int64"]
# The sources that read each key; with any other source the key is an error.
_READ_BY = {
    "paths": ("text", "jsonl", "parquet", "chat", *ID_SOURCES), "documents": ("text",),
    "text_field": ("jsonl", "parquet", "hub"), "name": ("hub",), "subset": ("hub",),
    "split": ("hub",), "token_field": ("parquet", "hub"), "label_field": ("parquet", "hub"),
    "weight_field": ("parquet", "hub"), "token_dtype": ("datatrove", "tokens"),
    "check_ids": ("parquet", "hub", *ID_SOURCES), "mixture": ("mixture",),
    "validation_split": ("hub", "mixture"), "stream": ("text", "jsonl", "parquet", *ID_SOURCES),
    "manifest": ("text", "jsonl", "parquet", *ID_SOURCES), "count": ("text", "jsonl", "parquet"),
}  # fmt: skip
# Names of the built-in evaluations: held-out text, and the parts of a mixture.
_BUILT_IN = re.compile(r"held_out|mixture\..*")
_NAME = re.compile(r"[\w.\-]+")
# The key that each source requires, and an example that the error message shows.
_REQUIRED_KEYS = {
    "text": ("paths", '"paths": ["corpus/*.txt"]'),
    "jsonl": ("paths", '"paths": ["corpus/*.jsonl"]'),
    "parquet": ("paths", '"paths": ["corpus/*.parquet"]'),
    "chat": ("paths", '"paths": ["chats/*.jsonl"]'),
    "megatron": ("paths", '"paths": ["corpus_text_document"]'),
    "datatrove": ("paths", '"paths": ["corpus/*.ds"]'),
    "tokens": ("paths", '"paths": ["corpus/*.npy"]'),
    "hub": ("name", '"name": "owner/dataset" or a folder'),
    "mixture": ("mixture", '"mixture": [{"source": "text", "paths": ["a/*.txt"], "weight": 1}]'),
}


def _check_starts(weights: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
    starts = [start for start, _ in weights]
    if starts[:1] != [0] or starts != sorted(set(starts)):
        raise ValueError("must begin with [0, WEIGHT], and go on with more tokens in each entry")
    return weights


_Weight = Annotated[float, Field(gt=0, le=1e15)]  # so that their sum is finite
# Weights from a number of tokens on: [[0, 0.7], ["10B tokens", 0.3]].
_Change = Annotated[tuple[Tokens, _Weight], Strict(False)]
Weights = Annotated[Items[_Change], AfterValidator(_check_starts)]


def weight_changes(part: object) -> tuple[tuple[int, float], ...]:
    """Return (first token of the run, weight) for each weight of a part, from token 0 on."""
    weight = getattr(part, "weight", 1.0)
    return weight if isinstance(weight, tuple) else ((0, weight),)


def weights_at(data: "DataConfig", tokens: int) -> list[float]:
    """Return the weights of a mixture's parts after so many tokens of samples."""
    parts = map(weight_changes, data.mixture)
    return [max(own for own in part if own[0] <= tokens)[1] for part in parts]


class SourceConfig(Section):
    """A source of text or token ids, and the keys that it reads."""

    source: Source | Literal["mixture"] = "python-stdlib"
    """Where the text comes from. "python-stdlib": the source code of Python's standard library;
    "text", "jsonl", "parquet": the files in `paths`; "hub": the data set `name`, loaded by the
    datasets library; "chat": conversations in the files of `paths` (JSON lines or Parquet), which
    the tokenizer's chat template renders (docs/after-training.md); "mixture": several sources.
    Token ids from other programs are read in place: "megatron" (.bin with .idx), "datatrove" (.ds),
    "tokens" (.npy, llm.c's .bin, or raw arrays)."""
    paths: Paths = ()
    """Files and globs ("folder/**/*.txt"), as a list or a single string. A document is a line of
    "jsonl" or a row of "parquet". Files of "text" and "jsonl" may be compressed (gzip, bzip2,
    zstd, lz4, xz), by whatever name. "megatron" takes paths with or without .bin. URLs
    ("s3://bucket/*.npy") require `stream`."""
    documents: Literal["file", "line", "blank_line"] = "file"
    """For source "text": a document is a file, a line, or the lines between blank lines."""
    text_field: str = Field(default="text", min_length=1)
    """For "jsonl", "parquet" and "hub": the field or column with a document's text. "meta.text"
    selects the field text inside meta."""
    name: PathText = ""
    """For source "hub": a data set's name on the Hugging Face hub, or a local folder of one."""
    subset: str | None = None
    """Configuration of the data set `name`; null if it has only one."""
    split: str = Field(default="train", min_length=1)
    """Split of the data set `name`, or part of one: "train[:50%]", "train[1000:2000]"."""
    token_field: str | None = Field(default=None, min_length=1)
    """For "parquet" and "hub": the column with a document's token ids; replaces text_field."""
    label_field: str | None = Field(default=None, min_length=1)
    """Column of labels for token_field: -100 for tokens that do not count in the loss, the token's
    id for all others."""
    weight_field: str | None = Field(default=None, min_length=1)
    """Column of loss weights (0 or more) for token_field. The loss is divided by the sum of a
    batch's weights. An end-of-text token added after a document has weight 1."""
    token_dtype: TokenDtype = "auto"
    """Data type of "datatrove" and "tokens" files without a header; "auto" is uint16, or uint32 for
    vocabularies above 65536."""
    check_ids: Literal["full", "sample"] = "full"
    """How to check token ids from other programs against the vocabulary: "full" reads all of them
    once, "sample" those of 256 documents per file. Flat arrays are always read in full."""
    stream: bool = False
    """Fetch the files of `paths` (shards, also URLs) during the run, when only a few of them fit on
    the disk. Requires `manifest`, and holds nothing out: evaluate on `data.validation` sets."""
    manifest: PathText = ""
    """Folder of a stream's manifest, written by `prepare.py --manifest`; every node reads it."""
    count: Literal["manifest", "as-read"] = "manifest"
    """When the tokens of a stream of text are counted: by `prepare.py --manifest`, which tokenises
    all shards, or by the run as it reads them. "as-read" shuffles the documents of a window, then
    cuts them into samples; without `train.epochs` and `fim`, since their counts are estimates."""

    def _problems(self) -> Iterable[Problem]:
        return [*_check_keys(self), *_check_loss_columns(self), *_check_stream(self)]


class PartConfig(SourceConfig):
    """One part of a mixture: a source and its share of the samples."""

    source: Source
    """As data.source, such as "text"."""
    weight: _Weight | Weights = 1.0
    """Share of the samples, relative to the other parts' weights. It may change during the run:
    [[0, 0.7], ["10B tokens", 0.3]] has the weight 0.3 after 10^10 tokens of samples."""


class FimConfig(Section):
    """Fill-in-the-middle: documents with the middle moved to the end."""

    rate: Share = 0.5
    """Share of the documents that are rearranged."""
    spm_rate: Share = 0.5
    """Share of these with the suffix first (SPM); the others have the prefix first (PSM)."""
    by: Literal["document", "fragment"] = "document"
    """"document": only documents that are whole in their sample; "fragment": also the parts of
    documents that are cut."""
    tokens: Annotated[tuple[str, str, str], Strict(False)] | Literal["auto"] = "auto"
    """The tokenizer's special tokens before prefix, suffix and middle; "auto" knows those of
    StarCoder, Qwen, CodeLlama and DeepSeek."""


class ValidationConfig(PartConfig):
    """A validation set: a source used for evaluation only."""

    weight: Literal[1] = 1
    """No effect: every set is evaluated separately."""


class DataConfig(SourceConfig):
    """The corpus or mixture, its tokenizer, and how it is cut into samples."""

    max_line_bytes: Size = Field(default=64_000_000, gt=0)
    """Maximum bytes of a line of "jsonl", and of a document by "line" or "blank_line"; longer ones
    are errors (see on_error)."""
    end_of_text_id: int | None = Field(default=None, ge=0)
    """For token ids: the id that ends a document. null uses the tokenizer's; another id than the
    tokenizer's is an error."""
    mixture: Items[PartConfig] = ()
    """For source "mixture": [{"source": ..., "paths": ..., "weight": 0.7}, ...]. Each part takes
    the keys of its source, and a weight."""
    tokenizer: PathText = Field(default="train", min_length=1)
    """"train" trains a byte-level BPE on the corpus; "none" is for corpora of token ids only, with
    vocab_size and end_of_text_id; anything else is a folder or hub name for AutoTokenizer."""
    vocab_size: Count = Field(default=4096, ge=257)
    """Vocabulary size of tokenizer "train" (at least 257: all bytes and the end of text) and
    "none". Other tokenizers have their own."""
    sequence_length: Tokens = Field(gt=0)
    """Tokens per sample."""
    isolate_documents: bool = False
    """Isolate documents packed into one sample: attention stops at a document's end, and positions
    restart."""
    balance_microbatches: bool = False
    """Form the microbatches of each step so that attention has as much work in all of them and on
    all dp ranks, counted from the lengths of isolated documents. A step has the same samples; only
    the order in which they are added up changes."""
    packing: Literal["none", "best_fit"] = "none"
    """"none" cuts the documents, one after another, every sequence_length tokens. "best_fit" puts
    whole documents into samples, and cuts only documents that are longer than a sample; the padding
    counts neither in the loss nor in tokens and throughput (arXiv:2404.10830)."""
    fim: FimConfig | None = None
    """Fill-in-the-middle of the training samples; null disables it."""
    held_out_fraction: Annotated[float, Field(ge=0, lt=0.5)] | Literal["auto"] = "auto"
    """Fraction of the text, by size, that is held out for evaluation, in whole documents; 0 holds
    out none. "auto" is 5 %, at most 128 MiB. With fewer than 1,280 documents it is the share of 64
    documents, at most 10 % (20 % up to 256 KiB of text)."""
    held_out_seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the choice of held-out documents."""
    validation: Mapping[str, ValidationConfig] = {}
    """More sets to evaluate: {"web": {"source": "text", "paths": ...}}. Each takes the keys of its
    source. All use the training text's tokenizer."""
    validation_split: str | None = Field(default="validation", pattern=r"^[\w.\-]+$")
    """Split of the data set `name`, and of those in a mixture, to use as a validation set if it
    exists; null disables this."""
    on_error: Literal["stop", "skip"] = "stop"
    """Handling of unusable input (not UTF-8, not JSON, null, an unreadable file): "stop" the
    preparation and report all problems of the first files; or "skip" it, count it by reason and
    list the first 20. Documents without text are always skipped and counted."""
    max_skipped: Share = 0.1
    """Maximum fraction of a source's documents that on_error "skip" may skip."""
    workers: Positive | Literal["auto"] = "auto"
    """Tokenizer processes. 1 uses the calling process with one thread per core; "auto" picks the
    faster."""
    read_ahead: NaturalCount = 2
    """Steps whose samples a thread reads in advance; 0 reads each step's samples when it begins."""
    stream_cache_bytes: Size = Field(default=100 * 2**30, gt=0)
    """Maximum bytes of streamed shards that a node keeps in `cache`; the least recently used shards
    are removed first. Two windows of shards must fit, or all shards."""
    stream_window: Positive | Literal["all"] = 16
    """Shards of a stream whose samples are shuffled together. "all" (or as many) is the order that
    the same corpus has without `stream`."""
    cache: FolderText = Field(default="auto", min_length=1)
    """Folder for tokenized corpora; "auto" is $XDG_CACHE_HOME/parallel3d or ~/.cache/parallel3d."""

    def _problems(self) -> Iterable[Problem]:
        checks = (_check_tokenizer, _check_names, _check_streams, _check_fim, _check_balance)
        return [*super()._problems()] or [problem for check in checks for problem in check(self)]

    @property
    def streams(self) -> tuple[SourceConfig, ...]:
        """The sources that are streamed: the corpus, or parts of the mixture."""
        return tuple(part for part in self.mixture or (self,) if part.stream)

    @property
    def counts_as_read(self) -> bool:
        """True if the tokens of a stream are counted during the run."""
        return any(part.count == "as-read" for part in self.streams)

    @property
    def has_own_size(self) -> bool:
        """True if `vocab_size` is the tokenizer's size: it is trained to it, or there is none."""
        return self.tokenizer in ("train", "none")


def yields_token_ids(section: SourceConfig) -> bool:
    """Return True if a source (not a mixture) yields token ids rather than text."""
    return section.source in ID_SOURCES or section.token_field is not None


def weighs_tokens(section: SourceConfig) -> bool:
    """Return True if a source's tokens count unequally in the loss."""
    return section.source == "chat" or bool(_loss_columns(section))


def _check_tokenizer(data: DataConfig) -> Iterator[Problem]:
    """Yield the problems of a tokenizer that does not fit the sources' text or token ids."""
    sources = data.mixture if data.source == "mixture" else (data,)
    every_source = (*sources, *data.validation.values())
    kinds = {yields_token_ids(source) for source in every_source}
    end = data.end_of_text_id
    remedy = 'write the "vocab_size" and "end_of_text_id" of the ids'
    has_none = data.tokenizer == "none"
    needs_sizes = has_none and False not in kinds
    if data.tokenizer == "train" and True in kinds:
        yield Problem(
            "tokenizer",
            "train",
            "cannot be trained on token ids",
            'name the tokenizer that made them, or "none" with vocab_size and end_of_text_id',
        )
    if data.tokenizer == "train" and any(source.source == "chat" for source in every_source):
        yield Problem(
            "tokenizer",
            "train",
            "has no chat template, which conversations need",
            "name a folder or a tokenizer of the hub that has one",
        )
    if has_none and False in kinds:
        yield Problem(
            "tokenizer",
            "none",
            "cannot be used with sources of text",
            'name a tokenizer, or use "train"',
        )
    if needs_sizes and end is None:
        yield Problem("end_of_text_id", None, 'is required by tokenizer "none"', remedy)
    if needs_sizes and "vocab_size" not in data.model_fields_set:
        yield Problem("vocab_size", ABSENT, 'is required by tokenizer "none"', remedy)
    if needs_sizes and (end or 0) >= data.vocab_size:
        yield Problem(
            "end_of_text_id",
            end,
            f"must be less than vocab_size={data.vocab_size}",
            "use a smaller id, or raise vocab_size",
        )
    if end is not None and True not in kinds:
        yield Problem(
            "end_of_text_id",
            end,
            "is for sources of token ids",
            "remove it: the tokenizer defines its own",
        )


def _check_names(data: DataConfig) -> Iterator[Problem]:
    """Yield a problem for each validation set whose name is not plain or is reserved."""
    for name in data.validation:
        if not _NAME.fullmatch(name):
            yield Problem(
                "validation", name, "must be a plain name", "use letters, digits, _, - and ."
            )
    for name in data.validation:
        if _BUILT_IN.fullmatch(name):
            yield Problem("validation", name, "is reserved for held-out text", "use another name")


def _check_fim(data: DataConfig) -> Iterator[Problem]:
    """Yield the problems of settings that fill-in-the-middle cannot be combined with."""
    fim = data.fim is not None
    if fim and any(map(weighs_tokens, data.mixture or (data,))):
        yield Problem(
            "fim",
            "set",
            'cannot be combined with label_field, weight_field or source "chat"',
            "remove one",
        )
    if fim and data.tokenizer == "none":
        yield Problem("tokenizer", "none", "has no tokens for fim", "name another")
    if fim and data.sequence_length < 8:
        yield Problem(
            "sequence_length", data.sequence_length, "is too short for fim", "use 8 or more"
        )
    if fim and data.counts_as_read:
        yield Problem(
            "fim", "set", 'cannot be combined with count "as-read"', 'use count "manifest"'
        )


def _check_balance(data: DataConfig) -> Iterator[Problem]:
    """Yield the problems of settings with which microbatches cannot be balanced."""
    path = "balance_microbatches"
    balances = data.balance_microbatches
    if balances and not data.isolate_documents:
        yield Problem(
            path,
            True,
            "needs isolate_documents: else all samples are equal work",
            "set isolate_documents = true, or remove it",
        )
    if balances and data.streams:
        yield Problem(
            path,
            True,
            "cannot be combined with stream: each node would fetch every shard",
            "remove one of the two",
        )


def _check_keys(section: SourceConfig) -> Iterator[Problem]:
    """Yield the keys that the section's source does not read, and the one that it lacks."""
    source = section.source
    for key, sources in _READ_BY.items():
        field = type(section).model_fields.get(key)
        value = to_jsonable_python(getattr(section, key, None))
        if field and getattr(section, key) != field.default and source not in sources:
            allowed = " or ".join(f'"{name}"' for name in sources)
            yield Problem(
                key,
                value,
                f'is not read by source "{source}"',
                f"remove it, or use source {allowed}",
            )
    key, example = _REQUIRED_KEYS.get(source, ("source", ""))
    if not (value := to_jsonable_python(getattr(section, key))):
        yield Problem(key, value, f'is required by source "{source}"', f"add {example}")


def _check_loss_columns(section: SourceConfig) -> Iterator[Problem]:
    """Yield the problems of label_field and weight_field."""
    columns = _loss_columns(section)
    is_text = section.source in _READ_BY["token_field"] and section.token_field is None
    if len(columns) > 1:
        yield Problem(
            "weight_field",
            section.weight_field,
            "cannot be combined with label_field",
            "remove one of the two",
        )
    if is_text:
        remedy = 'add "token_field": "input_ids"'
        for name, column in columns.items():
            yield Problem(name, column, "requires token_field", remedy)


def _loss_columns(section: SourceConfig) -> dict[str, str]:
    """Return the columns of labels and weights that a source has, by their settings."""
    columns = {"label_field": section.label_field, "weight_field": section.weight_field}
    return {name: column for name, column in columns.items() if column}


def _check_stream(section: SourceConfig) -> Iterator[Problem]:
    """Yield the problems of a source's stream and manifest."""
    stream = section.stream
    manifest = section.manifest
    is_text = stream and not yields_token_ids(section)
    urls = [path for path in section.paths if "://" in path]
    if urls and not stream:
        yield Problem(
            "paths",
            urls[:1],
            "are URLs, which only streams read",
            'add "stream": true and "manifest", or copy the files to a disk',
        )
    if stream and not manifest:
        yield Problem(
            "manifest",
            manifest,
            "is required by stream",
            'add "manifest": "FOLDER", and run `prepare.py --manifest` once',
        )
    if manifest and not stream:
        yield Problem("manifest", manifest, "is for streams", 'remove it, or add "stream": true')
    if section.count == "as-read" and not is_text:
        yield Problem(
            "count",
            "as-read",
            "is for streams of text",
            "remove it" if stream else 'remove it, or add "stream": true and "manifest"',
        )
    if stream:
        for name, column in _loss_columns(section).items():
            yield Problem(name, column, "cannot be streamed", "remove it, or remove stream")


def _check_streams(data: DataConfig) -> Iterator[Problem]:
    """Yield the problems of settings that a stream cannot be combined with."""
    held_out = data.held_out_fraction
    for name, section in data.validation.items():
        if section.stream:
            yield Problem(
                f"validation.{name}.stream",
                True,
                "cannot be streamed: validation sets are read as a whole",
                "remove it",
            )
    if data.streams and held_out not in (0, "auto"):
        yield Problem(
            "held_out_fraction",
            held_out,
            "cannot be held out of streams",
            "remove it, and use data.validation",
        )
    if data.streams and data.packing != "none":
        yield Problem(
            "packing",
            data.packing,
            "cannot be combined with stream",
            'use "none", or remove stream',
        )
    if data.streams and data.tokenizer == "train":
        yield Problem(
            "tokenizer",
            "train",
            "cannot be trained on streams",
            "name a folder, or a tokenizer of the hub",
        )
