"""The documents in one file, of whichever kind, as a stream of pieces."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from parallel3d.data.columns import StringColumn
from parallel3d.data.lines import Lines, json_line, text_block, text_line, whole_text
from parallel3d.data.pieces import (
    EMPTY,
    PIECE_BYTES,
    UNREADABLE,
    Flaw,
    TextPiece,
    UnusableDocument,
    check_utf8,
    document,
    short,
)
from parallel3d.data.sources import MAX_LINE_BYTES

# More rows than any file has.
ALL_ROWS = range(1, 2**62)


class Wanted(NamedTuple):
    """The place of a wanted document: its row or line, counted from 1, and its first byte."""

    row: int
    offset: int


class FileReader:
    """The documents of one file, in order, or selected ones.

    `kind` is "whole" (the file is one document), "line", "blank_line" (documents end there),
    "jsonl", "parquet" or "arrow" (a stream file of Arrow, as `datasets` caches it), of which
    only `rows` count. What is wrong names file, line or row, field, rule and remedy.
    """

    def __init__(
        self,
        kind: str,
        path: str,
        name: str,
        field: str,
        rows: Sequence[int] = ALL_ROWS,
        max_line_bytes: int = MAX_LINE_BYTES,
    ) -> None:
        self.kind, self.path, self.name, self.field, self.rows = kind, path, name, field, rows
        self.max_line_bytes = max_line_bytes
        self._lines: Lines | None = None

    def scan(self) -> Iterator[TextPiece | Flaw]:
        """All documents of the file; a flaw comes in the place of a flawed document or file.

        What was given of a document before its flaw does not count.
        """
        try:
            if self.kind == "whole":
                yield from self._checked(0, whole_text(self._open(), self.name))
            elif self.kind in ("parquet", "arrow"):
                for row, data in self._column().rows(self.rows):
                    yield from self._checked(row, self._cell(row, data))
            else:
                lines = self._open()
                while True:
                    row, offset = lines.row + 1, lines.position
                    if not (first := lines.read(self._limit)):
                        return
                    # What is blank separates: it is no empty document.
                    if self.kind == "line" or first.strip():
                        item = None
                        for item in self._checked(row, self._next(first, lines, row, offset)):
                            yield item
                        if isinstance(item, Flaw):
                            lines.skip(row, to_blank=self.kind == "blank_line")
        except UnusableDocument as error:
            yield Flaw(0, error.reason, str(error), error.num_rows)
        except _failures() as error:
            yield Flaw(0, UNREADABLE, str(self._unreadable(error)))

    def read(self, wanted: Iterable[Wanted]) -> Iterator[TextPiece]:
        """The documents at the places `wanted`, which ascend.

        One after the other costs no more than reading on; a file that has lost rows since it was
        scanned gives fewer documents, or empty ones. Raises DataError.
        """
        try:
            if self.kind == "whole":
                for row, offset in wanted:
                    yield from _one(whole_text(self._open(), self.name), row, offset)
            elif self.kind in ("parquet", "arrow"):
                places = [place.row for place in wanted]
                for row, data in self._column().rows(places):
                    yield from _one(self._cell(row, data), row, 0)
            else:
                for row, offset in wanted:
                    lines = self._lines or self._open()
                    lines.seek(offset)
                    first = lines.read(self._limit)
                    yield from _one(self._next(first, lines, row, offset), row, offset)
        except _failures() as error:
            raise self._unreadable(error) from error

    def place(self, row: int) -> str:
        """The name of a document in messages."""
        if self.kind == "whole":
            return self.name
        return f"{self.name}, {'row' if self.kind in ('parquet', 'arrow') else 'line'} {row}"

    def _checked(self, row: int, pieces: Iterator[TextPiece]) -> Iterator[TextPiece | Flaw]:
        """The pieces of a document, or why there are none."""
        found = False
        try:
            for piece in pieces:
                found = True
                yield piece
            if not found:
                yield Flaw(row, EMPTY, f"{self.place(row)} has no text")
        except UnusableDocument as error:
            yield Flaw(row, error.reason, str(error))

    @property
    def _limit(self) -> int:
        """Bytes of a line that are read at a time; a line of JSON is read whole, or refused."""
        return self.max_line_bytes + 2 if self.kind == "jsonl" else PIECE_BYTES

    def _open(self) -> Lines:
        self._lines = Lines(self.path)
        return self._lines

    def _column(self) -> StringColumn:
        return StringColumn(self.path, self.name, self.field, self.kind == "parquet")

    def _next(self, first: bytes, lines: Lines, row: int, offset: int) -> Iterator[TextPiece]:
        place = self.place(row)
        if self.kind == "jsonl":
            return json_line(
                first, row=row, offset=offset, place=place, field=self.field,
                most_bytes=self.max_line_bytes,
            )  # fmt: skip
        text = text_line if self.kind == "line" else text_block
        return text(first, lines, row=row, offset=offset, place=place)

    def _cell(self, row: int, data: bytes | memoryview | None) -> Iterator[TextPiece]:
        place = self.place(row)
        if data is None:
            raise UnusableDocument(
                "null",
                f'{place}: column "{self.field}" is null; fill in or remove the row, or set'
                " text_field to the column that holds the text",
            )
        if len(data) <= PIECE_BYTES:
            check_utf8(bytes(data), place)
            yield from short(bytes(data), row, 0, place)
            return
        blocks = (bytes(data[i : i + PIECE_BYTES]) for i in range(0, len(data), PIECE_BYTES))
        yield from document(blocks, row, 0, place)

    def _unreadable(self, error: BaseException) -> UnusableDocument:
        reason = (getattr(error, "strerror", None) or str(error)).strip().rstrip(".")
        return UnusableDocument(
            UNREADABLE,
            f"{self.name} cannot be read ({reason}); make it readable, or leave it out",
        )


def _one(pieces: Iterator[TextPiece], row: int, offset: int) -> Iterator[TextPiece]:
    """The pieces of a document, one that is empty where it has none any more."""
    found = None
    for found in pieces:
        yield found
    if found is None:
        yield TextPiece(row, offset, b"")


def _failures() -> tuple[type[BaseException], ...]:
    """What reading a damaged or unreadable file raises."""
    # Not imported for its errors alone: it takes a third of a second.
    arrow = sys.modules.get("pyarrow")
    return (OSError, EOFError, *((arrow.ArrowException,) if arrow else ()))
