"""Documents that are awkward, and a stand-in for the `data` section of a config."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Settings:
    source: str = "text"
    paths: tuple[str, ...] = ()
    tokenizer: str = "train"
    vocab_size: int = 300
    sequence_length: int = 8
    held_out_fraction: float = 0.2
    cache: str = "auto"


TEXTS = {
    "a.txt": "the cat sat on the mat. the dog sat on the log.\n" * 3,
    "b.txt": "ends like Windows\r\nand \t tabs,  two spaces 's and . , ! \r\n",
    "c [1].txt": "ünïcödé, 你好, \U0001f600 and a nul \x00.",
    "d.txt": "A document cannot end itself: <|endoftext|> is text here.",
    "e.txt": "\ufeffwith a byte order mark, no newline at the end",
    "sub/f.txt": " ",
}


def contents(root: Path) -> dict[str, bytes | None]:
    """Every file below `root` with its bytes; folders with None."""
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else None
        for path in sorted(root.rglob("*"))
    }
