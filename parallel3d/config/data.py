"""The "data" section: the corpus or mixture, its tokenizer, and how it is cut into samples."""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, Strict, model_validator
from pydantic_core import to_jsonable_python

from parallel3d.base.section import ABSENT, PathText, Problem, Problems, Section, Size

# Files of token ids that another program wrote: by Megatron-LM, by datatrove, flat arrays.
OF_IDS = ("megatron", "datatrove", "tokens")
Source = Literal[
    "python-stdlib", "text", "jsonl", "parquet", "hub", "megatron", "datatrove", "tokens"
]
# A single path need not be a list.
Paths = Annotated[
    tuple[str, ...],
    BeforeValidator(lambda value: (value,) if isinstance(value, str) else value),
    Strict(False),
]
# One split or the sum of several, each perhaps cut: "train[:50%]", as `datasets` reads it.
SPLIT = re.compile(r"^[\w.\-]+(\[[^\[\]+]*\])?(\+[\w.\-]+(\[[^\[\]+]*\])?)*")


def _split_text(text: str) -> str:
    if not SPLIT.fullmatch(text):
        raise ValueError('is no split; write "train", or part of one such as "train[:50%]"')
    return text


Split = Annotated[str, AfterValidator(_split_text)]
TokenDtype = Literal["auto", "uint8", "uint16", "int16", "uint32", "int32", "int64"]
# Which sources read each key; what the others find there is a mistake.
READ_BY = {
    "paths": ("text", "jsonl", "parquet", *OF_IDS), "documents": ("text",),
    "text_field": ("jsonl", "parquet", "hub"), "name": ("hub",), "subset": ("hub",),
    "split": ("hub",), "token_field": ("parquet", "hub"), "label_field": ("parquet", "hub"),
    "weight_field": ("parquet", "hub", "datatrove"), "token_dtype": ("datatrove", "tokens"),
    "check_ids": ("parquet", "hub", *OF_IDS), "mixture": ("mixture",),
    "validation_split": ("hub", "mixture"),
}  # fmt: skip
# What is evaluated without being asked for has these names: held-out text, parts of a mixture.
_OURS = re.compile(r"held_out|mixture\..*")
_NAME = re.compile(r"[\w.\-]+")
# What the error says to add where a source lacks the key that it cannot do without.
NEEDS = {
    "text": ("paths", '"paths": ["corpus/*.txt"]'),
    "jsonl": ("paths", '"paths": ["corpus/*.jsonl"]'),
    "parquet": ("paths", '"paths": ["corpus/*.parquet"]'),
    "megatron": ("paths", '"paths": ["corpus_text_document"]'),
    "datatrove": ("paths", '"paths": ["corpus/*.ds"]'),
    "tokens": ("paths", '"paths": ["corpus/*.npy"]'),
    "hub": ("name", '"name": "owner/dataset" or a folder'),
    "mixture": ("mixture", '"mixture": [{"source": "text", "paths": ["a/*.txt"], "weight": 1}]'),
}


class SourceConfig(Section):
    """Where text or token ids come from: a source, and the keys that it reads."""

    source: Source | Literal["mixture"] = "python-stdlib"
    """"python-stdlib" is the running interpreter's standard library; "text", "jsonl" and "parquet"
    read `paths`; "hub" loads `name` with the datasets library; "mixture" mixes several. Token ids
    of other programs stay where they are: "megatron" reads .bin with .idx, "datatrove" .ds,
    "tokens" flat arrays (.npy, .bin of llm.c, or without a header)."""
    paths: Paths = ()
    """Files and globs ("folder/**/*.txt"), or a single one, for "text", "jsonl" (each line is a
    document), "parquet" (each row) and files of token ids, these also by URL
    ("s3://bucket/*.npy"); for "megatron" with or without .bin.
    .gz, .bz2 and .zst of text and lines are unpacked."""
    documents: Literal["file", "line", "blank_line"] = "file"
    """What a document of source "text" is: a file, a line, or the lines between blank ones."""
    text_field: str = Field(default="text", min_length=1)
    """Field or column that holds a document's text, for "jsonl", "parquet" and "hub"; "meta.text"
    is the field text of the object or struct meta."""
    name: str = ""
    """A data set's name on the Hugging Face hub, or a folder of one, for source "hub"."""
    subset: str | None = None
    """Which configuration of the data set `name`; null if it has only one."""
    split: Split = "train"
    """Which split of the data set `name`, or part of one: "train[:50%]", "train[1000:2000]"."""
    token_field: str | None = Field(default=None, min_length=1)
    """Column that holds a document's token ids, for "parquet" and "hub", in place of text_field."""
    label_field: str | None = Field(default=None, min_length=1)
    """Column beside token_field that is -100 where a token does not count in the loss ("labels"),
    and its own id elsewhere."""
    weight_field: str | None = Field(default=None, min_length=1)
    """Column beside token_field with how much each token counts in the loss, from 0 on; for
    "datatrove" what stands beside NAME.ds: "loss" is NAME.ds.loss, a byte a token. The loss is
    divided by the sum of a batch's weights. An end-of-text that is put behind a document counts 1.
    """
    token_dtype: TokenDtype = "auto"
    """What "datatrove" and "tokens" hold where the file does not say; "auto" is uint16, or uint32
    for a vocabulary above 65536."""
    check_ids: Literal["full", "sample"] = "full"
    """Reads all token ids of other programs once to find those beyond the vocabulary, or those of
    256 documents a file; flat arrays are always read in full."""

    @model_validator(mode="after")
    def _check_source(self) -> "SourceConfig":
        if found := [*_check_keys(self), *_check_counting(self)]:
            raise Problems(found)
        return self


class PartConfig(SourceConfig):
    """One part of a mixture: a source, and its share of the samples."""

    source: Source
    """As data.source."""
    weight: float = Field(default=1.0, gt=0)
    """Share of the samples, relative to the other parts' weights."""


class ValidationConfig(PartConfig):
    """A validation set: a source, all of whose text is evaluated on and none trained on."""

    weight: Literal[1] = 1
    """Not used: every set is evaluated by itself."""


class DataConfig(SourceConfig):
    """The corpus or mixture, its tokenizer, and how it is cut into samples."""

    max_line_bytes: Size = Field(default=64_000_000, gt=0)
    """Most bytes of a line of "jsonl"; on_error says what becomes of a longer one."""
    end_of_text_id: int | None = Field(default=None, ge=0)
    """Id that ends documents of token ids; null is the tokenizer's, which it must be."""
    mixture: Annotated[tuple[PartConfig, ...], Strict(False)] = ()
    """For source "mixture": [{"source": ..., "paths": ..., "weight": 0.7}, ...]; each part has the
    keys of its source, and a weight."""
    tokenizer: str = Field(default="train", min_length=1)
    """"train" trains a byte-level BPE on the corpus; else a folder or name for AutoTokenizer;
    "none" where the corpus is token ids alone: vocab_size and end_of_text_id then say it all."""
    vocab_size: int = Field(default=4096, ge=257)
    """Tokens that tokenizer "train" makes; 256 bytes and the end of text are the least. The ids
    that there are without a tokenizer."""
    sequence_length: int = Field(gt=0)
    """Tokens in a sample."""
    isolate_documents: bool = False
    """Documents packed into one sample do not see each other: positions restart and attention
    stops at a document's end."""
    held_out_fraction: Annotated[float, Field(ge=0, lt=0.5)] | Literal["auto"] = "auto"
    """Share of the text, by size, that is kept for evaluation, as whole documents of all sizes; 0:
    none. "auto" is 5 %, or as much as 64 documents are (of fewer than 1,280; 10 % at most, or 20 %
    up to 256 KiB), and 128 MiB at most (of 2.5 GiB and more)."""
    held_out_seed: int = Field(default=0, ge=0, lt=2**63)
    """Another number holds out other documents, as a check that it does not matter which."""
    validation: Mapping[str, ValidationConfig] = {}
    """Sets that are evaluated beside the held-out text: {"web": {"source": "text", "paths": ...}};
    each has the keys of its source. All use the tokenizer of the training text."""
    validation_split: str | None = Field(default="validation", pattern=r"^[\w.\-]+$")
    """Split of the data set `name`, and of those in a mixture, that is a validation set by itself
    where there is one; null: none."""
    on_error: Literal["stop", "skip"] = "stop"
    """What cannot be used (not UTF-8, not JSON, null, an unreadable file) stops the preparation,
    which tells all of it in the first files at once; or is left out and counted by reason, the
    first 20 listed. Documents without text are always left out, and counted."""
    max_skipped: float = Field(default=0.1, ge=0, le=1)
    """Share of a source's documents that on_error "skip" may leave out; more stop it."""
    workers: Annotated[int, Field(gt=0)] | Literal["auto"] = "auto"
    """Processes that tokenise; 1 is this one with a thread per core, "auto" what is faster."""
    read_ahead: int = Field(default=2, ge=0)
    """Steps whose samples a thread reads before they are asked for; 0: each when it begins."""
    remote_cache_bytes: int = Field(default=10 * 2**30, ge=0)
    """Most bytes of token ids of remote files that a node keeps in `cache`, in blocks, of which the
    least recently used go first. 0 (or less than 1.1 MB): they are read each time."""
    cache: PathText = Field(default="auto", min_length=1)
    """Folder of tokenised corpora; "auto" is parallel3d in $XDG_CACHE_HOME, or in ~/.cache."""

    @model_validator(mode="after")
    def _check(self) -> "DataConfig":
        if found := [*_check_tokenizer(self), *_check_names(self)]:
            raise Problems(found)
        return self

    @property
    def has_own_size(self) -> bool:
        """Whether the tokenizer's size is `vocab_size`: it is trained to it, or there is none."""
        return self.tokenizer in ("train", "none")


def holds_ids(section: SourceConfig) -> bool:
    """Whether a source that is no mixture gives token ids, not text."""
    return section.source in OF_IDS or section.token_field is not None


def _check_tokenizer(data: DataConfig) -> Iterator[Problem]:
    """What is wrong with the tokenizer for the kinds of sources that there are."""
    parts: tuple[SourceConfig, ...] = data.mixture
    parts = (*(parts if data.source == "mixture" else (data,)), *data.validation.values())
    ids, text = (any(holds_ids(part) == kind for part in parts) for kind in (True, False))
    end, remedy = data.end_of_text_id, 'write "vocab_size" and "end_of_text_id" of the ids'
    if data.tokenizer == "train" and ids:
        rule = "cannot be trained on token ids"
        remedy = 'give the tokenizer that made them, or "none" with vocab_size and end_of_text_id'
        yield Problem("tokenizer", "train", rule, remedy)
    if data.tokenizer == "none" and text:
        rule = "leaves text without a tokenizer"
        yield Problem("tokenizer", "none", rule, 'give one, or "train"')
    elif data.tokenizer == "none" and end is None:
        yield Problem("end_of_text_id", None, 'is required by tokenizer "none"', remedy)
    elif data.tokenizer == "none" and "vocab_size" not in data.model_fields_set:
        yield Problem("vocab_size", ABSENT, 'is required by tokenizer "none"', remedy)
    elif data.tokenizer == "none" and end is not None and end >= data.vocab_size:
        rule = f"is beyond vocab_size={data.vocab_size}"
        yield Problem("end_of_text_id", end, rule, "use a smaller one, or raise vocab_size")
    if end is not None and not ids:
        rule, remedy = "is read of token ids alone", "remove it: the tokenizer of text has its own"
        yield Problem("end_of_text_id", end, rule, remedy)


def _check_names(data: DataConfig) -> Iterator[Problem]:
    """The validation sets whose names are not plain, or are those of the held-out text."""
    for name in data.validation:
        if not _NAME.fullmatch(name):
            rule = "must be a plain name"
            yield Problem("validation", name, rule, "use letters, digits, _, - and .")
        elif _OURS.fullmatch(name):
            yield Problem("validation", name, "is what is held out itself", "use another name")


def _check_keys(section: SourceConfig) -> Iterator[Problem]:
    """Give the keys that the section's source does not read, and those it lacks."""
    source = section.source
    for key, sources in READ_BY.items():
        field = type(section).model_fields.get(key)
        value = to_jsonable_python(getattr(section, key, None))
        if field and getattr(section, key) != field.default and source not in sources:
            allowed = " or ".join(f'"{name}"' for name in sources)
            rule, remedy = (
                f'is not read by source "{source}"',
                f"remove it, or use source {allowed}",
            )
            yield Problem(key, value, rule, remedy)
    key, example = NEEDS.get(source, ("source", ""))
    if not (value := to_jsonable_python(getattr(section, key))):
        yield Problem(key, value, f'is required by source "{source}"', f"add {example}")


def _check_counting(section: SourceConfig) -> Iterator[Problem]:
    """Give what is wrong with the columns that say which tokens count."""
    labels, weights = section.label_field, section.weight_field
    if labels and weights:
        rule = "says which tokens count, and so does label_field"
        yield Problem("weight_field", weights, rule, "remove one of the two")
    for key, value in (("label_field", labels), ("weight_field", weights)):
        if value and section.source in READ_BY["token_field"] and section.token_field is None:
            rule = "is read beside token ids, and token_field names none"
            yield Problem(key, value, rule, 'add "token_field": "input_ids"')
