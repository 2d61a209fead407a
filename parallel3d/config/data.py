"""The "data" section: the corpus or mixture, its tokenizer, and how it is cut into samples."""

from typing import Annotated, Any, Literal

from pydantic import Field, Strict, model_validator

from parallel3d.section import PathText, Problem, Problems, Section, Strings

# Which sources read each key; what the others find there is a mistake.
READ_BY = {
    "paths": ("text", "jsonl", "parquet"),
    "text_field": ("jsonl", "parquet", "hub"),
    "name": ("hub",),
    "subset": ("hub",),
    "split": ("hub",),
    "mixture": ("mixture",),
}
# What the error says to add where a source lacks the key that it cannot do without.
NEEDS = {
    "text": ("paths", '"paths": ["corpus/*.txt"]'),
    "jsonl": ("paths", '"paths": ["corpus/*.jsonl"]'),
    "parquet": ("paths", '"paths": ["corpus/*.parquet"]'),
    "hub": ("name", '"name": "owner/dataset" or a folder'),
    "mixture": ("mixture", '"mixture": [{"source": "text", "paths": ["a/*.txt"], "weight": 1}]'),
}


class PartConfig(Section):
    """One part of a mixture: a source, and its share of the samples."""

    source: Literal["python-stdlib", "text", "jsonl", "parquet", "hub"]
    """As data.source."""
    paths: Strings = ()
    """As data.paths."""
    text_field: str = Field(default="text", min_length=1)
    """As data.text_field."""
    name: str = ""
    """As data.name."""
    subset: str | None = None
    """As data.subset."""
    split: str = Field(default="train", pattern=r"^[\w.\-]+$")
    """As data.split."""
    weight: float = Field(default=1.0, gt=0)
    """Share of the samples, relative to the other parts' weights."""

    @model_validator(mode="after")
    def _check(self) -> "PartConfig":
        _check_source(self)
        return self


class DataConfig(Section):
    """The corpus or mixture, its tokenizer, and how it is cut into samples."""

    source: Literal["python-stdlib", "text", "jsonl", "parquet", "hub", "mixture"] = "python-stdlib"
    """"python-stdlib" is the running interpreter's standard library; "text", "jsonl" and "parquet"
    read `paths`; "hub" loads `name` with the datasets library; "mixture" mixes several."""
    paths: Strings = ()
    """Files and globs ("folder/**/*.txt"), for "text" (each file is a document), "jsonl" (each
    line; .gz, .bz2 and .zst are unpacked) and "parquet" (each row)."""
    text_field: str = Field(default="text", min_length=1)
    """Field or column that holds a document's text, for "jsonl", "parquet" and "hub"."""
    name: str = ""
    """A data set's name on the Hugging Face hub, or a folder of one, for source "hub"."""
    subset: str | None = None
    """Which configuration of the data set `name`; null if it has only one."""
    split: str = Field(default="train", pattern=r"^[\w.\-]+$")
    """Which split of the data set `name`."""
    mixture: Annotated[tuple[PartConfig, ...], Strict(False)] = ()
    """For source "mixture": [{"source": ..., "paths": ..., "weight": 0.7}, ...]; each part has the
    keys of its source, and a weight."""
    tokenizer: str = Field(default="train", min_length=1)
    """"train" trains a byte-level BPE on the corpus; else a folder or name for AutoTokenizer."""
    vocab_size: int = Field(default=4096, ge=257)
    """Tokens that tokenizer "train" makes; 256 bytes and the end of text are the least."""
    sequence_length: int = Field(gt=0)
    """Tokens in a sample."""
    isolate_documents: bool = False
    """Documents packed into one sample do not see each other: positions restart and attention
    stops at a document's end."""
    held_out_fraction: float = Field(default=0.01, gt=0, lt=0.5)
    """Share of the documents that is kept for evaluation."""
    workers: Annotated[int, Field(gt=0)] | Literal["auto"] = "auto"
    """Processes that tokenise; 1 is this one with a thread per core, "auto" what is faster."""
    cache: PathText = Field(default="auto", min_length=1)
    """Folder of tokenised corpora; "auto" is parallel3d in $XDG_CACHE_HOME, or in ~/.cache."""

    @model_validator(mode="after")
    def _check(self) -> "DataConfig":
        _check_source(self)
        return self


def _check_source(section: PartConfig | DataConfig) -> None:
    """Raise Problems for keys that the section's source does not read, and for those it lacks."""
    source, found = section.source, []
    for key, sources in READ_BY.items():
        field = type(section).model_fields.get(key)
        value: Any = getattr(section, key, None)
        if field and value != field.default and source not in sources:
            allowed = " or ".join(f'"{name}"' for name in sources)
            rule, remedy = (
                f'is not read by source "{source}"',
                f"remove it, or use source {allowed}",
            )
            found.append(Problem(key, _plain(value), rule, remedy))
    if source in NEEDS:
        key, example = NEEDS[source]
        value = getattr(section, key)
        if not value:
            found.append(
                Problem(key, _plain(value), f'is required by source "{source}"', f"add {example}")
            )
    if found:
        raise Problems(found)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value.model_dump(mode="json") if isinstance(value, Section) else value
