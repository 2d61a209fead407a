"""The documents in one file, of whichever kind, as a stream of pieces."""

import sys
from collections.abc import Iterable, Iterator

from parallel3d.data.columns import column_texts
from parallel3d.data.lines import COMPRESSED, Lines, json_text, open_text, without_ending
from parallel3d.data.pieces import (
    EMPTY,
    PIECE_BYTES,
    UNREADABLE,
    Flaw,
    TextPiece,
    pieces_of,
    slices,
)
from parallel3d.data.sources import Files

# More rows than any file has.
ALL_ROWS = range(1, 2**62)
# Row and first byte of a document, and its bytes as they are in the file; None for null.
_Raw = tuple[int, int, Iterator[bytes] | None]


class FileReader:
    """The documents of one file of a source, in order, or selected ones."""

    def __init__(self, files: Files, number: int) -> None:
        self.kind, self.field, self.max_line_bytes = files.kind, files.field, files.max_line_bytes
        self.path, self.name = files.paths[number], files.names[number]
        self.rows = range(*files.rows[number]) if files.rows else ALL_ROWS
        self._lines: Lines | None = None

    def scan(self) -> Iterator[TextPiece | Flaw]:
        """Yield all documents; a flaw takes a document's or file's place, and voids its pieces."""
        try:
            for row, offset, blocks in self._documents():
                is_empty = True
                try:
                    for text, last in self._pieces(row, blocks):
                        is_empty = False
                        yield TextPiece(row, offset, text, last)
                    if is_empty:
                        raise Flaw(EMPTY, f"{self.place(row)} has no text")
                except Flaw as flaw:
                    flaw.row = 0 if self.kind == "whole" else row
                    yield flaw
                    for _ in blocks or ():
                        pass  # the next document begins behind this one
        except Flaw as flaw:
            yield flaw
        except _failures() as error:
            yield self._unreadable(error)

    def read(self, wanted: Iterable[tuple[int, int]]) -> Iterator[tuple[str, bool]]:
        """Yield pieces of the documents at `wanted` rows and offsets, and whether it is the last.

        The places ascend; a file that has lost rows gives fewer documents. Raises DataError.
        """
        try:
            for row, _, blocks in self._documents(wanted):
                yield from self._pieces(row, blocks)
        except _failures() as error:
            raise self._unreadable(error) from error

    def place(self, row: int) -> str:
        """The name of a document in messages."""
        return place_of(self.kind, self.name, row)

    def _documents(self, wanted: Iterable[tuple[int, int]] | None = None) -> Iterator[_Raw]:
        """The documents at these places, or all."""
        if self.kind == "whole":
            file = open_text(self.path, self.path.endswith(COMPRESSED))
            yield 1, 0, iter(lambda: file.read(PIECE_BYTES), b"")
        elif self.kind in ("parquet", "arrow"):
            rows = self.rows if wanted is None else [row for row, _ in wanted]
            is_parquet = self.kind == "parquet"
            for row, data in column_texts(self.path, self.name, self.field, is_parquet, rows):
                yield row, 0, None if data is None else slices(data)
        elif wanted is None:
            lines = self._open()
            row, offset = 1, 0
            while first := lines.read():
                # A blank line separates: it is no empty document.
                if self.kind == "line" or first.strip():
                    yield row, offset, self._blocks(lines, first)
                row, offset = lines.row + 1, lines.position
        else:
            lines = self._lines or self._open()
            for row, offset in wanted:
                lines.seek(offset)
                yield row, offset, self._blocks(lines, lines.read())

    def _open(self) -> Lines:
        # A line of JSON is read whole, or refused.
        limit = self.max_line_bytes + 2 if self.kind == "jsonl" else PIECE_BYTES
        self._lines = Lines(self.path, limit)
        return self._lines

    def _blocks(self, lines: Lines, first: bytes) -> Iterator[bytes]:
        return lines.block(first) if self.kind == "blank_line" else lines.line(first)

    def _pieces(self, row: int, blocks: Iterator[bytes] | None) -> Iterator[tuple[str, bool]]:
        place, remedy = self.place(row), ""
        if blocks is None:
            raise Flaw(
                "null",
                f'{place}: column "{self.field}" is null; fill in or remove the row, or set'
                " text_field to the column that holds the text",
            )
        if self.kind == "whole":
            remedy = ", or leave it out of data.paths"
        elif self.kind in ("line", "blank_line"):
            blocks = without_ending(blocks)
        elif self.kind == "jsonl":
            line = next(blocks, b"")
            if row == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            blocks = iter([json_text(line, place, self.field, self.max_line_bytes)])
        return pieces_of((block for block in blocks if block), place, remedy)

    def _unreadable(self, error: BaseException) -> Flaw:
        reason = (getattr(error, "strerror", None) or str(error)).strip().rstrip(".")
        remedy = "make it readable, or leave it out"
        return Flaw(UNREADABLE, f"{self.name} cannot be read ({reason}); {remedy}")


def place_of(kind: str, name: str, row: int) -> str:
    """The name in messages of a document in the file called `name`."""
    if kind == "whole":
        return name
    return f"{name}, {'row' if kind in ('parquet', 'arrow') else 'line'} {row}"


def _failures() -> tuple[type[BaseException], ...]:
    """The errors that reading a damaged or unreadable file raises."""
    # Not imported for its errors alone: it takes a third of a second.
    arrow = sys.modules.get("pyarrow")
    return (OSError, EOFError, *((arrow.ArrowException,) if arrow else ()))
