"""The text of a document in pieces of bounded size, or the flaw for which it is left out."""

import codecs
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple

from parallel3d.base.errors import DataError

PIECE_BYTES = 2**20
BOM = "\ufeff"
# Why a document is left out. Nobody complains of those without text.
EMPTY, NOT_UTF8, NUL = "empty", "not UTF-8", "only NUL bytes"
UNREADABLE, TOO_LONG = "unreadable file", "too long a line"


class TextPiece(NamedTuple):
    """A piece of a document's text; `last` marks the document's last piece.

    `row` is the document's row or line, counted from 1, `offset` the byte where that starts.
    """

    row: int
    offset: int
    text: str
    last: bool


class Flaw(DataError):
    """The reason why the document at `row` cannot be used; row 0 is a file of `num_rows` rows."""

    def __init__(self, reason: str, message: str, num_rows: int = 1) -> None:
        super().__init__(message)
        self.reason, self.num_rows, self.row = reason, num_rows, 0


def pieces_of(blocks: Iterable[bytes], place: str, remedy: str = "") -> Iterator[tuple[str, bool]]:
    """Yield the text of a document that arrives in blocks of bytes: pieces, and which is the last.

    A byte order mark before the text is dropped; an empty text has no pieces. Raises Flaw where
    the text is not UTF-8, or is NUL bytes alone.
    """
    ready, is_start, is_nul = "", True, True
    for text in _decoded(blocks, place, remedy):
        if is_start:
            text = text.removeprefix(BOM)
        is_start, is_nul = False, is_nul and not text.strip("\0")
        if ready:
            yield ready, False
        ready = text
    if ready and is_nul:
        what = "holds NUL bytes alone, as files do that were never written out"
        raise Flaw(NUL, f"{place} {what}; mend or remove it")
    if ready:
        yield ready, True


def _decoded(blocks: Iterable[bytes], place: str, remedy: str) -> Iterator[str]:
    """Yield the characters of each block, without those that have nothing whole."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    num_read = 0
    for block in chain(blocks, [b""]):
        pending = len(decoder.getstate()[0])
        first, num_read = num_read - pending, num_read + len(block)
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise not_utf8(error, place, first, remedy) from None
        if pending + len(block) > PIECE_BYTES:
            yield from _cut(text.encode())
        elif text:
            yield text


def _cut(data: bytes) -> Iterator[str]:
    """Yield a text in pieces of at most PIECE_BYTES of whole characters."""
    start = 0
    while start < len(data):
        # A character that is cut short belongs to the next piece.
        piece = data[start : start + PIECE_BYTES].decode(errors="ignore")
        yield piece
        start += len(piece.encode())


def not_utf8(error: UnicodeDecodeError, place: str, before: int = 0, remedy: str = "") -> Flaw:
    """The flaw of a text of which `before` bytes came before those that cannot be decoded."""
    byte, offset = error.object[error.start], before + error.start
    what = f"byte 0x{byte:02x} at offset {offset} ({error.reason})"
    return Flaw(NOT_UTF8, f"{place} is not UTF-8: {what}; convert the file with iconv{remedy}")


def slices(data: bytes) -> Iterator[bytes]:
    """Yield the bytes in blocks of at most PIECE_BYTES."""
    return (data[i : i + PIECE_BYTES] for i in range(0, len(data), PIECE_BYTES))


def others(names: Iterable[str]) -> str:
    """The end of a message about a missing field or column: those that are there."""
    shown = ", ".join(f'"{name}"' for name in list(names)[:8])
    # A terminal cannot show half of a surrogate pair.
    found = shown.encode(errors="backslashreplace").decode()
    return (
        f"it has {found}; set text_field to the one that holds the text"
        if found
        else "it has none; leave it out"
    )
