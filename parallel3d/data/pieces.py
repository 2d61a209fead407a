"""The text of a document in pieces of bounded size, cut between characters, or its flaw."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from parallel3d.base.errors import DataError

PIECE_BYTES = 2**20
BOM = b"\xef\xbb\xbf"
# Why a document is left out; of those that have no text nobody complains.
EMPTY, NOT_UTF8, NUL = "empty", "not UTF-8", "only NUL bytes"
UNREADABLE, TOO_LONG = "unreadable file", "too long a line"


class TextPiece(NamedTuple):
    """A piece of a document's text, in UTF-8; `last` marks the document's last piece.

    `row` is the document's row or line, counted from 1, `offset` the byte where that starts.
    """

    row: int
    offset: int
    data: bytes
    last: bool = True


class Flaw(NamedTuple):
    """The reason why the document at `row` is left out, or with row 0 the file of `num_rows`."""

    row: int
    reason: str
    message: str
    num_rows: int = 1


class UnusableDocument(DataError):
    """A document, or a file of `num_rows` documents, that cannot be used, with a short reason."""

    def __init__(self, reason: str, message: str, num_rows: int = 1) -> None:
        super().__init__(message)
        self.reason, self.num_rows = reason, num_rows


def document(
    blocks: Iterable[bytes], row: int, offset: int, place: str, remedy: str = ""
) -> Iterator[TextPiece]:
    """The pieces of a text that arrives in blocks, cut anywhere; none for an empty text.

    A byte order mark before it is dropped. Raises UnusableDocument where the text is not UTF-8, or
    is NUL bytes alone.
    """
    ready: bytes | None = None
    rest, read, nul = b"", 0, True
    for block in blocks:
        data = rest + block if rest else block
        if not read and len(data) < len(BOM):
            rest = data
            continue
        cut = _boundary(data)
        rest, data = data[cut:], data[:cut]
        for start, piece in _cut(data):
            check_utf8(piece, place, read + start, remedy)
            if not read and not start:
                piece = piece.removeprefix(BOM)
            if ready:
                yield TextPiece(row, offset, ready, last=False)
            nul = nul and not piece.strip(b"\0")
            ready = piece or ready
        read += cut
    if rest:
        check_utf8(rest, place, read, remedy)
        if ready:
            yield TextPiece(row, offset, ready, last=False)
        nul, ready = nul and not rest.strip(b"\0"), rest
    if ready and nul:
        raise _only_nul(place)
    if ready:
        yield TextPiece(row, offset, ready)


def short(data: bytes, row: int, offset: int, place: str) -> Iterator[TextPiece]:
    """The pieces of a text known to be UTF-8, as `document` gives them."""
    if len(data) > PIECE_BYTES:
        yield from document([data], row, offset, place)
    elif data := data.removeprefix(BOM):
        if not data[0] and not data.strip(b"\0"):
            raise _only_nul(place)
        yield TextPiece(row, offset, data)


def _only_nul(place: str) -> UnusableDocument:
    what = "holds NUL bytes alone, as files do that were never written out"
    return UnusableDocument(NUL, f"{place} {what}; mend or remove it")


def check_utf8(data: bytes, place: str, before: int = 0, remedy: str = "") -> str:
    """Decode the bytes after `before` bytes of a text; raise UnusableDocument if not UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UnusableDocument(
            NOT_UTF8,
            f"{place} is not UTF-8: byte 0x{data[error.start]:02x} at offset"
            f" {before + error.start} ({error.reason}); convert the file with iconv{remedy}",
        ) from None


def _cut(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Pieces of at most PIECE_BYTES of whole characters, each with its place."""
    start = 0
    while start < len(data):
        piece = data[start : start + PIECE_BYTES] if start or len(data) > PIECE_BYTES else data
        if start + len(piece) < len(data):
            # Bytes that are no UTF-8 have no boundary: they are told as they are.
            piece = piece[: _boundary(piece)] or piece
        yield start, piece
        start += len(piece)


def _boundary(data: bytes) -> int:
    """The length of `data` without a last character that is not whole."""
    for back in range(1, min(3, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 != 0x80:
            size = 1 + (byte >= 0xC0) + (byte >= 0xE0) + (byte >= 0xF0)
            return len(data) - back if size > back else len(data)
    return len(data)
