"""The documents of a column: rows of parquet, or of a stream file of Arrow."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from parallel3d.data.json_line import NO_FIELD, NOT_TEXT, others
from parallel3d.data.pieces import UnusableDocument

if TYPE_CHECKING:
    import pyarrow

ROWS_PER_BATCH = 512
# What is unpacked at once, where a batch of rows would be more.
BATCH_BYTES = 16 * 2**20


@dataclass(frozen=True)
class StringColumn:
    """One file's column of texts; `field` is its name, or a path into structs: "meta.text"."""

    path: str
    name: str
    field: str
    is_parquet: bool

    def rows(self, wanted: Sequence[int]) -> Iterator[tuple[int, bytes | memoryview | None]]:
        """Number and text of the rows `wanted`, which ascend; None for null.

        Raises UnusableDocument where the file has no such column, or one of no strings.
        """
        import pyarrow as pa

        for first, column in self._chunks(wanted):
            asked = _between(wanted, first + 1, first + len(column) + 1)
            if not asked:
                continue
            # As bytes: what is not UTF-8 is told with its row.
            column = column.cast(pa.large_binary())
            if column.nbytes <= BATCH_BYTES:
                values = column.to_pylist()
                yield from ((row, values[row - first - 1]) for row in asked)
                continue
            for row in asked:
                value = column[row - first - 1].as_buffer()
                yield row, None if value is None else memoryview(value)

    def _chunks(self, wanted: Sequence[int]) -> Iterator[tuple[int, "pyarrow.Array"]]:
        """Pieces of the column, each with the number of rows before it."""
        import pyarrow as pa
        from pyarrow import parquet

        first = 0
        if self.is_parquet:
            with parquet.ParquetFile(self.path, memory_map=True) as file:
                keys = self._keys(file.schema_arrow, file.metadata.num_rows)
                for number in range(file.num_row_groups):
                    group = file.metadata.row_group(number)
                    # A group is unpacked only if something in it is wanted.
                    if _between(wanted, first + 1, first + group.num_rows + 1):
                        before = first
                        size = max(1, group.total_byte_size // max(1, group.num_rows))
                        count = max(1, min(ROWS_PER_BATCH, BATCH_BYTES // size))
                        for batch in file.iter_batches(count, [number], [".".join(keys)]):
                            yield before, _inner(batch.column(0), keys[1:])
                            before += batch.num_rows
                    first += group.num_rows
            return
        with pa.memory_map(self.path) as source, pa.ipc.open_stream(source) as stream:
            keys = self._keys(stream.schema, 1)
            for batch in stream:
                yield first, _inner(batch.column(keys[0]), keys[1:])
                first += batch.num_rows

    def _keys(self, schema: "pyarrow.Schema", num_rows: int) -> list[str]:
        """The column's name and those of the fields that lead to the text."""
        import pyarrow as pa

        keys = _find(schema, self.field)
        if keys is None:
            message = f'{self.name} has no column "{self.field}"; {others(schema.names)}'
            raise UnusableDocument(NO_FIELD, message, num_rows)
        kind = schema.field(keys[0]).type
        for key in keys[1:]:
            kind = kind.field(key).type
        if pa.types.is_string(kind) or pa.types.is_large_string(kind):
            return keys
        raise UnusableDocument(
            NOT_TEXT,
            f'{self.name}: column "{self.field}" holds {kind}, not strings; set text_field'
            " to the column that holds the text",
            num_rows,
        )


def _find(fields: Iterable["pyarrow.Field"], name: str) -> list[str] | None:
    import pyarrow as pa

    for field in fields:
        if field.name == name:
            return [name]
        if name.startswith(f"{field.name}.") and pa.types.is_struct(field.type):
            inner = _find(field.type, name[len(field.name) + 1 :])
            if inner:
                return [field.name, *inner]
    return None


def _inner(column: "pyarrow.Array", keys: list[str]) -> "pyarrow.Array":
    import pyarrow.compute as pc

    return pc.struct_field(column, keys) if keys else column


def _between(wanted: Sequence[int], first: int, end: int) -> Sequence[int]:
    """Those of `wanted`, which ascend, from `first` to before `end`."""
    return wanted[bisect_left(wanted, first) : bisect_left(wanted, end)]
