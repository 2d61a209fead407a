"""The documents of one file of any kind, as a stream of pieces."""

import codecs
import sys
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from parallel3d.data.lines import (
    EMPTY,
    NO_FIELD,
    NOT_TEXT,
    PARQUET,
    PIECE_BYTES,
    TOO_LONG,
    UNREADABLE,
    Flaw,
    Lines,
    Piece,
    compression_of,
    first_bytes,
    json_text,
    open_text,
    pieces_of,
    suggest_fields,
)
from parallel3d.data.sources import Files

if TYPE_CHECKING:
    import pyarrow

ROWS_PER_BATCH = 512
# Limit for the decompressed bytes of a batch.
BATCH_BYTES = 16 * 2**20
# Identifies a document's text.
new_digest = partial(blake2b, digest_size=16)


def column_texts(
    path: str, name: str, field: str, is_parquet: bool, numbers: Sequence[int]
) -> Iterator[tuple[int, bytes | None]]:
    """Yield number and text of the rows `numbers` (ascending, from 1); the text of null is None.

    `field` is a column, or a path into structs such as "meta.text"; `name` is used in messages.
    Raises Flaw if the file has no such column, or if it does not hold strings.
    """
    import pyarrow as pa

    batches = _of_parquet(path, field, numbers) if is_parquet else _of_arrow(path)
    for first, batch, file in batches:
        table = pa.Table.from_batches([batch])
        while field not in table.column_names and any(map(pa.types.is_struct, table.schema.types)):
            table = table.flatten()
        if field not in table.column_names:
            raise Flaw(
                NO_FIELD,
                f'{name} has no column "{field}"; {suggest_fields(file.names)}',
                file.num_rows,
            )
        column = table.column(field)
        if not _holds_strings(column.type):
            cast = ""
            if any(map(str(_plain(column.type)).startswith, ("binary", "large_binary", "fixed_"))):
                cast = "cast it to string if it is text, or "
            raise Flaw(
                NOT_TEXT,
                f'{name}: column "{field}" holds {column.type}, not strings; {cast}set text_field'
                " to the column that holds the text",
                file.num_rows,
            )
        before = first
        for chunk in column.chunks:
            data = _as_bytes(chunk)
            for row in _between(numbers, before + 1, before + len(data) + 1):
                yield row, data[row - before - 1].as_py()
            before += len(data)


def _plain(kind: "pyarrow.DataType") -> "pyarrow.DataType":
    """Return the type of the values of a column whose rows are indices or runs of them."""
    import pyarrow as pa

    while pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        kind = kind.value_type
    return kind


def _as_bytes(column: "pyarrow.Array") -> "pyarrow.Array":
    """Return strings as bytes, so that text that is not UTF-8 is reported with its row."""
    import pyarrow as pa
    from pyarrow import compute

    if pa.types.is_run_end_encoded(column.type):
        return _as_bytes(compute.run_end_decode(column))
    if pa.types.is_dictionary(column.type):
        return _as_bytes(column.dictionary).take(column.indices)
    return column.cast(pa.large_binary())


def _holds_strings(kind: "pyarrow.DataType") -> bool:
    import pyarrow as pa

    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(is_kind(_plain(kind)) for is_kind in tests)


def _paths_of_text(fields: Iterable["pyarrow.Field"], prefix: str = "") -> list[str]:
    """Return the path of each column of strings, also of those in structs; all columns if none."""
    import pyarrow as pa

    paths: list[str] = []
    for field in fields:
        if pa.types.is_struct(field.type):
            paths += _paths_of_text(field.type, f"{prefix}{field.name}.")
        elif _holds_strings(field.type):
            paths.append(f"{prefix}{field.name}")
    return paths or [f"{prefix}{field.name}" for field in fields]


class _Columns(NamedTuple):
    """The columns of a file and its number of rows, as far as they are known."""

    names: list[str]
    num_rows: int


def _of_parquet(
    path: str, field: str, numbers: Sequence[int]
) -> Iterator[tuple[int, "pyarrow.RecordBatch", _Columns]]:
    """Yield batches of the column, each with the number of rows before it."""
    from pyarrow import parquet

    if (compression := compression_of(path)) is not None:
        raise Flaw(
            UNREADABLE,
            f"{path} is packed by {compression} as a whole; unpack it (parquet compresses columns)",
        )
    if not first_bytes(path).startswith(PARQUET):
        raise Flaw(
            UNREADABLE,
            f'{path} is no Parquet file; set its source to "jsonl" if it has lines of JSON, to '
            '"text" if it is text, or leave it out',
        )
    first = 0
    with parquet.ParquetFile(path, memory_map=True) as file:
        columns = _Columns(_paths_of_text(file.schema_arrow), file.metadata.num_rows)
        for group_number in range(file.num_row_groups):
            group = file.metadata.row_group(group_number)
            # Decompress only groups that contain requested rows.
            if _between(numbers, first + 1, first + group.num_rows + 1):
                before = first
                size = max(1, group.total_byte_size // max(1, group.num_rows))
                count = max(1, min(ROWS_PER_BATCH, BATCH_BYTES // size))
                for batch in file.iter_batches(count, [group_number], [field]):
                    yield before, batch, columns
                    before += batch.num_rows
            first += group.num_rows


def _of_arrow(path: str) -> Iterator[tuple[int, "pyarrow.RecordBatch", _Columns]]:
    """Yield batches of all columns, each with the number of rows before it."""
    import pyarrow as pa

    first = 0
    with pa.memory_map(path) as source, pa.ipc.open_stream(source) as stream:
        for batch in stream:
            yield first, batch, _Columns(_paths_of_text(batch.schema), 1)
            first += batch.num_rows


def _between(numbers: Sequence[int], first: int, end: int) -> Sequence[int]:
    """Return the entries of `numbers` (ascending) from `first` to before `end`."""
    return numbers[bisect_left(numbers, first) : bisect_left(numbers, end)]


# Larger than any file's number of rows.
ALL_ROWS = range(1, 2**62)
_Raw = tuple[int, int, Iterable[bytes] | None]
"""Row and first byte of a document, and its raw bytes in blocks; None for null."""


class FileReader:
    """Reads the documents of one file, either all in order or selected ones."""

    def __init__(self, files: Files, number: int) -> None:
        self.kind = files.kind
        self.field = files.field
        self.max_line_bytes = files.max_line_bytes
        self.path = files.paths[number]
        self.name = files.names[number]
        self.rows = range(*files.rows[number]) if files.rows else ALL_ROWS
        self._lines: Lines | None = None

    def scan(self) -> Iterator[tuple[int, int, int, bytes] | Flaw]:
        """Yield row, first byte, bytes of text and digest of all documents, or their flaws.

        A flaw of the whole file is the last one, and voids the documents before it.
        """
        try:
            for row, offset, blocks in self._documents():
                num_bytes = 0
                digest = new_digest()
                try:
                    for text, _ in self._pieces(row, blocks):
                        data = text.encode()
                        digest.update(data)
                        num_bytes += len(data)
                    if not num_bytes:
                        raise Flaw(EMPTY, f"{self.place(row)} has no text")
                    yield row, offset, num_bytes, digest.digest()
                except Flaw as flaw:
                    flaw.row = 0 if self.kind == "whole" else row
                    yield flaw
        except Flaw as flaw:
            yield flaw
        except failures() as error:
            yield unreadable(self.name, error)

    def read(self, places: Iterable[tuple[int, int]]) -> Iterator[Piece]:
        """Yield (piece, is the last one) of the documents at `places` (row, offset), ascending.

        A file that has lost rows yields fewer documents. Raises DataError if it is unreadable.
        """
        try:
            for row, _, blocks in self._documents(places):
                yield from self._pieces(row, blocks)
        except failures() as error:
            raise unreadable(self.name, error) from error

    def place(self, row: int) -> str:
        """Return the name of a document for messages."""
        return place_of(self.kind, self.name, row)

    def _documents(self, places: Iterable[tuple[int, int]] | None = None) -> Iterator[_Raw]:
        """Yield the documents at `places`, or all."""
        if self.kind == "whole":
            file = open_text(self.path)
            yield 1, 0, iter(lambda: file.read(PIECE_BYTES), b"")
        elif self.kind in ("parquet", "arrow"):
            rows = self.rows if places is None else [row for row, _ in places]
            is_parquet = self.kind == "parquet"
            for row, data in column_texts(self.path, self.name, self.field, is_parquet, rows):
                yield row, 0, None if data is None else [data]
        elif places is None:
            lines = self._open()
            offset = 0
            while line := lines.read():
                row = lines.row
                # Otherwise a blank line separates documents and is not an empty one.
                if self.kind == "line" or line.strip():
                    yield row, offset, [self._rest_of_document(lines, line)]
                offset = lines.position
        else:
            lines = self._lines or self._open()
            for row, offset in places:
                lines.seek(offset)
                yield row, offset, [self._rest_of_document(lines, lines.read())]

    def _rest_of_document(self, lines: Lines, first: bytes) -> bytes:
        """Return a document from its first line, which was read."""
        return lines.block(first) if self.kind == "blank_line" else first

    def _open(self) -> Lines:
        # The line ending, and one byte more, which shows that the line is too long.
        self._lines = Lines(self.path, self.max_line_bytes + 3)
        return self._lines

    def _pieces(self, row: int, blocks: Iterable[bytes] | None) -> Iterator[Piece]:
        place = self.place(row)
        if blocks is None:
            raise Flaw(
                "null",
                f'{place}: column "{self.field}" is null; fill in or remove the row, or set'
                " text_field to the column that holds the text",
            )
        if self.kind == "whole":
            return pieces_of(blocks, place, ", or leave it out of data.paths")
        [data] = blocks
        if self.kind not in ("parquet", "arrow"):
            ending = b"\r\n" if data.endswith(b"\r\n") else b"\n"
            data = data.removesuffix(ending)
            if len(data) > self.max_line_bytes:
                raise Flaw(
                    TOO_LONG,
                    f"{place} has more than {self.max_line_bytes:,} bytes; raise"
                    " data.max_line_bytes, or split it",
                )
        if self.kind == "jsonl":
            line = data.removeprefix(codecs.BOM_UTF8) if row == 1 else data
            data = json_text(line, place, self.field)
        slices = (data[i : i + PIECE_BYTES] for i in range(0, len(data), PIECE_BYTES))
        return pieces_of(slices, place)


def unreadable(name: str, error: BaseException) -> Flaw:
    """Return the flaw of a file that cannot be opened or read."""
    reason = (getattr(error, "strerror", None) or str(error)).strip().rstrip(".")
    return Flaw(UNREADABLE, f"{name} cannot be read ({reason}); make it readable, or leave it out")


def place_of(kind: str, name: str, row: int) -> str:
    """Return the name for messages of the document at `row` of the file `name`."""
    if kind == "whole":
        return name
    unit = "row" if kind in ("parquet", "arrow") else "line"
    return f"{name}, {unit} {row}"


def failures() -> tuple[type[BaseException], ...]:
    """Return the exception types that reading a damaged or unreadable file may raise."""
    # Importing pyarrow takes a third of a second; if it is not imported, it cannot have failed.
    arrow = sys.modules.get("pyarrow")
    if arrow is None:
        return (OSError, EOFError)
    return (OSError, EOFError, arrow.ArrowException)
