"""The documents in one file: whole files, lines of JSON, rows of parquet or Arrow, as a stream."""

import io
import json
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple, cast

from parallel3d.errors import DataError

if TYPE_CHECKING:
    import pyarrow

COMPRESSED = (".gz", ".bz2", ".zst")
ROWS_PER_BATCH = 512
BOM = b"\xef\xbb\xbf"


class Row(NamedTuple):
    """A document's row or line, counted from 1, the byte where its line starts, its UTF-8 text."""

    row: int
    offset: int
    data: bytes


class Wanted(NamedTuple):
    """Where a document stands: its row or line, counted from 1, and the byte where that starts."""

    row: int
    offset: int


class FileReader:
    """The documents of one file, in order, or those that are asked for.

    `kind` is "whole" (the file is one document), "jsonl", "parquet" or "arrow" (a stream file of
    Arrow, as `datasets` caches it). Rows whose text is empty are no documents. Raises DataError
    for what cannot be read, naming file, line or row, field, rule and remedy.
    """

    def __init__(self, kind: str, path: str, name: str, field: str) -> None:
        self.kind, self.path, self.name, self.field = kind, path, name, field
        self._lines: _Lines | None = None

    def scan(self) -> Iterator[Row]:
        """Give all documents."""
        try:
            if self.kind == "whole":
                yield self._whole()
            elif self.kind == "jsonl":
                lines = self._open_lines()
                row = 0
                while line := lines.read(offset := lines.position):
                    row += 1
                    if data := self._parse(line, row):
                        yield Row(row, offset, data)
            else:
                for row, data in self._columns(None):
                    if data:
                        yield Row(row, 0, data)
        except _failures() as error:
            raise self._unreadable(error) from error

    def read(self, wanted: Iterable[Wanted]) -> Iterator[Row]:
        """Give the documents that stand at the places `wanted`, which ascend.

        One after the other costs no more than reading on; a file that has lost rows since it was
        scanned gives fewer documents, or empty ones.
        """
        try:
            if self.kind == "whole":
                yield from (self._whole() for _ in wanted)
            elif self.kind == "jsonl":
                for row, offset in wanted:
                    lines = self._lines or self._open_lines()
                    yield Row(row, offset, self._parse(lines.read(offset), row))
            else:
                for row, data in self._columns([place.row for place in wanted]):
                    yield Row(row, 0, data)
        except _failures() as error:
            raise self._unreadable(error) from error

    def place(self, row: int) -> str:
        """Give the name of a document in messages."""
        if self.kind == "whole":
            return self.name
        return f"{self.name}, {'line' if self.kind == 'jsonl' else 'row'} {row}"

    def _whole(self) -> Row:
        data = Path(self.path).read_bytes()
        if not data:
            raise DataError(f"{self.path} is empty; remove it, or leave it out of data.paths")
        self._check_utf8(data, self.path)
        return Row(1, 0, data)

    def _open_lines(self) -> "_Lines":
        self._lines = _Lines(self.path)
        return self._lines

    def _parse(self, line: bytes, row: int) -> bytes:
        """Give the text of a line of JSON, in UTF-8; b"" for a blank line."""
        if row == 1:
            line = line.removeprefix(BOM)
        if not line.strip():
            return b""
        place = self.place(row)
        self._check_utf8(line, place)
        try:
            value = json.loads(line.rstrip())
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", None) or "nested too deeply"
            column = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
            raise DataError(
                f"{place} is not JSON: {reason}{column}; write one object a line, such as"
                f' {{"{self.field}": "..."}}'
            ) from None
        if not isinstance(value, dict):
            raise DataError(
                f"{place} is {_json_type(value)}, not an object; write one object a line, such as"
                f' {{"{self.field}": "..."}}'
            )
        if self.field not in value:
            raise DataError(f'{place} has no field "{self.field}"; {_others(value)}')
        text = value[self.field]
        if not isinstance(text, str):
            raise DataError(
                f'{place}: field "{self.field}" is {_json_type(text)}, not a string; mend or remove'
                " the line, or set text_field to the field that holds the text"
            )
        try:
            return text.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f'{place}: field "{self.field}" has half of a surrogate pair'
                f" (\\u{ord(text[error.start]):04x}) at character {error.start}, which UTF-8 cannot"
                " hold; mend or remove the line"
            ) from None

    def _columns(self, wanted: list[int] | None) -> Iterator[tuple[int, bytes]]:
        """Give row and text of the column's rows `wanted`, which ascend, or of all."""
        import pyarrow as pa

        for first, column in self._chunks(wanted):
            rows = range(first + 1, first + len(column) + 1)
            asked = rows if wanted is None else _between(wanted, rows)
            if not asked:
                continue
            kind = column.type
            if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
                raise DataError(
                    f'{self.name}: column "{self.field}" holds {kind}, not strings; set text_field'
                    " to the column that holds the text"
                )
            # As bytes: what is not UTF-8 is told with its row.
            values = column.cast(pa.large_binary()).to_pylist()
            for row in asked:
                yield row, self._checked(values[row - first - 1], row)

    def _chunks(self, wanted: list[int] | None) -> Iterator[tuple[int, "pyarrow.Array"]]:
        """Give pieces of the column, each with the number of rows before it."""
        import pyarrow as pa
        from pyarrow import parquet

        first = 0
        if self.kind == "parquet":
            with parquet.ParquetFile(self.path, memory_map=True) as file:
                self._check_column(file.schema_arrow.names)
                for group in range(file.num_row_groups):
                    count = file.metadata.row_group(group).num_rows
                    # A group is unpacked only if something in it is wanted.
                    if wanted is None or _between(wanted, range(first + 1, first + count + 1)):
                        before = first
                        for batch in file.iter_batches(ROWS_PER_BATCH, [group], [self.field]):
                            yield before, batch.column(0)
                            before += batch.num_rows
                    first += count
            return
        with pa.memory_map(self.path) as source, pa.ipc.open_stream(source) as stream:
            self._check_column(stream.schema.names)
            for batch in stream:
                yield first, batch.column(self.field)
                first += batch.num_rows

    def _checked(self, data: bytes | None, row: int) -> bytes:
        place = self.place(row)
        if data is None:
            raise DataError(
                f'{place}: column "{self.field}" is null; fill in or remove the row, or set'
                " text_field to the column that holds the text"
            )
        self._check_utf8(data, place)
        return data

    def _check_column(self, names: list[str]) -> None:
        if self.field not in names:
            raise DataError(f'{self.name} has no column "{self.field}"; {_others(names)}')

    def _check_utf8(self, data: bytes, place: str) -> None:
        try:
            data.decode()
        except UnicodeDecodeError as error:
            leave_out = ", or leave it out of data.paths" if self.kind == "whole" else ""
            raise DataError(
                f"{place} is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}"
                f" ({error.reason}); convert the file with iconv{leave_out}"
            ) from None

    def _unreadable(self, error: BaseException) -> DataError:
        reason = (getattr(error, "strerror", None) or str(error)).strip().rstrip(".")
        return DataError(
            f"{self.name} cannot be read ({reason}); make it readable, or leave it out"
        )


class _Lines:
    """The lines of a file that may be compressed; it is opened again to go back."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._compressed = path.endswith(COMPRESSED)
        self.position = 0
        self._open()

    def read(self, offset: int) -> bytes:
        """Give the line that starts at the byte `offset` of the text; b"" at the end."""
        if offset != self.position and not self._compressed:
            self._file.seek(offset)
            self.position = offset
        if offset < self.position:
            self._open()
        while offset > self.position:
            # What is compressed can only be read on.
            skipped = self._file.read(min(offset - self.position, 2**20))
            if not skipped:
                return b""
            self.position += len(skipped)
        line = self._file.readline()
        self.position += len(line)
        return line

    def _open(self) -> None:
        self._file = _open(self._path, self._compressed)
        self.position = 0


def _open(path: str, compressed: bool) -> IO[bytes]:
    if not compressed:
        return open(path, "rb")
    import pyarrow as pa

    return io.BufferedReader(cast(io.RawIOBase, pa.input_stream(path)), 2**20)


def _between(wanted: list[int], rows: range) -> list[int]:
    """Give those of `wanted`, which ascend, that lie in `rows`."""
    return wanted[bisect_right(wanted, rows.start - 1) : bisect_right(wanted, rows.stop - 1)]


def _failures() -> tuple[type[BaseException], ...]:
    """What reading a damaged or unreadable file raises."""
    # Not imported for its errors alone: it takes a third of a second.
    arrow = sys.modules.get("pyarrow")
    return (OSError, EOFError, *((arrow.ArrowException,) if arrow else ()))


def _json_type(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")


def _others(names: Iterable[str]) -> str:
    found = ", ".join(f'"{name}"' for name in list(names)[:8])
    return (
        f"it has {found}; set text_field to the one that holds the text"
        if found
        else ("it has none; leave it out")
    )
