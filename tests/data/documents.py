"""Documents that are awkward, and a stand-in for the `data` section of a config."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from parallel3d.data.documents import ENTRY, Documents, find_documents, new_digest
from parallel3d.data.sources import find_files


@dataclass(frozen=True)
class Settings:
    source: str = "text"
    paths: tuple[str, ...] = ()
    documents: str = "file"
    text_field: str = "text"
    name: str = ""
    subset: str | None = None
    split: str = "train"
    token_field: str | None = None
    weight: float = 1.0
    stream: bool = False
    streams: tuple["Settings", ...] = ()
    mixture: tuple["Settings", ...] = ()
    tokenizer: str = "train"
    vocab_size: int = 300
    sequence_length: int = 8
    packing: str = "none"
    fim: object = None
    held_out_fraction: float | str = 0.2
    held_out_seed: int = 0
    validation: Mapping[str, "Settings"] = field(default_factory=dict)
    validation_split: str | None = "validation"
    cache: str = "auto"
    on_error: str = "stop"
    max_skipped: float = 0.1
    workers: int | str = "auto"
    max_line_bytes: int = 64_000_000


TEXTS = {
    "a.txt": "the cat sat on the mat. the dog sat on the log.\n" * 3,
    "b.txt": "ends like Windows\r\nand \t tabs,  two spaces 's and . , ! \r\n",
    "c [1].txt": "ünïcödé, 你好, \U0001f600 and a nul \x00.",
    "d.txt": "A document cannot end itself: <|endoftext|> is text here.",
    "e.txt": "\ufeffwith a byte order mark, no newline at the end",
    "sub/f.txt": " ",
}

# A byte order mark is no text.
READ = {name: text.removeprefix("\ufeff") for name, text in TEXTS.items()}


def contents(root: Path) -> dict[str, bytes | None]:
    """Every file below `root` with its bytes; folders with None."""
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else None
        for path in sorted(root.rglob("*"))
    }


def read_source(source: str, paths=(), cache="/dev/null", **settings) -> Documents:
    """The documents of a source; its index is kept nowhere unless a cache is given."""
    section = Settings(source=source, paths=tuple(map(str, paths)), **settings)
    rule = (section.on_error, section.max_skipped)
    return find_documents(find_files(section, section.max_line_bytes), Path(cache), rule=rule)


def texts_at(documents: Documents, indices) -> list[str]:
    """The texts of some documents, whose pieces are joined."""
    texts = [""]
    for piece, last in documents.pieces(indices):
        texts[-1] += piece
        if last:
            texts.append("")
    return texts[:-1]


def texts_of(documents: Documents) -> list[str]:
    return texts_at(documents, np.arange(len(documents)))


def names_of(documents: Documents) -> list[str]:
    return [documents.name(index) for index in range(len(documents))]


def table_of(*texts: str) -> np.ndarray:
    rows = [(0, 0, 0, len(text.encode()), new_digest(text.encode()).digest()) for text in texts]
    return np.array(rows, ENTRY)


def document_of(stream, index):
    """The tokens of one document of a stream, without its end-of-text."""
    return stream.tokens[stream.bounds[index] : stream.bounds[index + 1] - 1]
