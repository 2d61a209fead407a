"""The documents of text files: whole files, lines, blocks between blank lines, lines of JSON."""

import io
from collections.abc import Iterator
from itertools import chain
from typing import IO, cast

from parallel3d.data.json_line import text_of
from parallel3d.data.pieces import (
    BOM,
    PIECE_BYTES,
    TOO_LONG,
    TextPiece,
    UnusableDocument,
    document,
    short,
)

COMPRESSED = (".gz", ".bz2", ".zst")


class Lines:
    """The lines of a text file, compressed or not; going back reopens the file.

    `row` counts the lines that were read since the start, where nothing was passed over;
    `after_blank` says whether what was read last is a blank line, or the end of the file.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._compressed = path.endswith(COMPRESSED)
        self.position = self.row = 0
        self._open()

    def seek(self, offset: int) -> None:
        """Go to the byte `offset` of the text, or to its end if that is before."""
        self._starts = True
        if offset != self.position and not self._compressed:
            self._file.seek(offset)
            self.position = offset
        if offset < self.position:
            self._open()
        while offset > self.position:
            # What is compressed can only be read on.
            skipped = self._file.read(min(offset - self.position, 2**20))
            if not skipped:
                return
            self.position += len(skipped)

    def read(self, limit: int = PIECE_BYTES) -> bytes:
        """The next line, or `limit` bytes of it; b"" at the end of the file."""
        line = self._readline(limit)
        self.position += len(line)
        ends = line.endswith(b"\n")
        self.row += ends
        self.after_blank = not line or (self._starts and not line.strip())
        self._starts = ends
        return line

    def rest(self) -> Iterator[bytes]:
        """Yield the rest of a line whose start was read."""
        while block := self.read():
            yield block
            if block.endswith(b"\n"):
                return

    def skip(self, row: int, to_blank: bool) -> None:
        """Skip to the end of line `row`, or with `to_blank` to the end of a blank line.

        A blank line that was read already is not looked for again: the next one is another's.
        """
        while self.row < row and self.read():
            pass
        while to_blank and not self.after_blank:
            self.read()

    def block(self) -> bytes:
        """Some more bytes of the file, regardless of lines; b"" at the end."""
        data = self._file.read(PIECE_BYTES)
        self.position += len(data)
        return data

    def _open(self) -> None:
        self._file = _open(self._path, self._compressed)
        self._readline = self._file.readline
        self.position = self.row = 0
        self._starts, self.after_blank = True, False


def whole_text(lines: Lines, place: str) -> Iterator[TextPiece]:
    """The whole file as one document."""
    remedy = ", or leave it out of data.paths"
    return document(iter(lines.block, b""), 1, 0, place, remedy)


def text_line(
    first: bytes, lines: Lines, *, row: int, offset: int, place: str
) -> Iterator[TextPiece]:
    """A line, whose start `first` was read, as a document, without its line ending."""
    return document(_without_ending(_line(first, lines)), row, offset, place)


def text_block(
    first: bytes, lines: Lines, *, row: int, offset: int, place: str
) -> Iterator[TextPiece]:
    """Lines up to a blank one, whose start `first` was read, without the last line ending."""
    return document(_without_ending(_until_blank(first, lines)), row, offset, place)


def json_line(
    line: bytes, *, row: int, offset: int, place: str, field: str, most_bytes: int
) -> Iterator[TextPiece]:
    """Yield the text of a line of JSON; nothing for a blank line.

    Raises UnusableDocument for a line of more than `most_bytes`.
    """
    if len(line.removesuffix(b"\n")) > most_bytes:
        raise UnusableDocument(
            TOO_LONG,
            f"{place} has more than {most_bytes:,} bytes; raise data.max_line_bytes, or split the"
            " line",
        )
    line = line.removeprefix(BOM) if row == 1 else line
    yield from short(text_of(line, place, field), row, offset, place)


def _line(first: bytes, lines: Lines) -> Iterator[bytes]:
    return iter([first]) if first.endswith(b"\n") else chain([first], lines.rest())


def _until_blank(first: bytes, lines: Lines) -> Iterator[bytes]:
    block = first
    while block and not lines.after_blank:
        yield block
        block = lines.read()


def _without_ending(blocks: Iterator[bytes]) -> Iterator[bytes]:
    held = b""
    for block in blocks:
        data = held + block
        text = data.rstrip(b"\r\n")
        # Only what ends the whole is an ending.
        held = data[len(text) :]
        yield text + held[:-2]
        held = held[-2:]
    ending = b"\r\n" if held.endswith(b"\r\n") else b"\n" if held.endswith(b"\n") else b""
    yield held.removesuffix(ending)


def _open(path: str, compressed: bool) -> IO[bytes]:
    if not compressed:
        return open(path, "rb")
    import pyarrow as pa

    return io.BufferedReader(cast(io.RawIOBase, pa.input_stream(path)), 2**20)
