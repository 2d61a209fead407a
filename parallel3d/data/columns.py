"""The texts of a column: rows of parquet, or of a stream file of Arrow."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from parallel3d.data.lines import NO_FIELD, NOT_TEXT
from parallel3d.data.pieces import Flaw, others

if TYPE_CHECKING:
    import pyarrow

ROWS_PER_BATCH = 512
# Unpacked at once, where a batch of rows would be more.
BATCH_BYTES = 16 * 2**20


def column_texts(
    path: str, name: str, field: str, is_parquet: bool, wanted: Sequence[int]
) -> Iterator[tuple[int, bytes | None]]:
    """Number and text of the rows `wanted`, which ascend; None for null.

    `field` is a column, or a path into structs: "meta.text"; `name` is what messages call the file.
    Raises Flaw where the file has no such column, or one of no strings.
    """
    import pyarrow as pa

    chunks = _of_parquet if is_parquet else _of_arrow
    for first, column in chunks(path, name, field, wanted):
        # As bytes: a text that is not UTF-8 is told with its row.
        column = column.cast(pa.large_binary())
        for row in _between(wanted, first + 1, first + len(column) + 1):
            yield row, column[row - first - 1].as_py()


def _of_parquet(
    path: str, name: str, field: str, wanted: Sequence[int]
) -> Iterator[tuple[int, "pyarrow.Array"]]:
    """Yield pieces of the column, each with the number of rows before it."""
    from pyarrow import parquet

    first = 0
    with parquet.ParquetFile(path, memory_map=True) as file:
        keys = _keys(file.schema_arrow, name, field, file.metadata.num_rows)
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


def _of_arrow(
    path: str, name: str, field: str, wanted: Sequence[int]
) -> Iterator[tuple[int, "pyarrow.Array"]]:
    """Yield pieces of the column, each with the number of rows before it."""
    import pyarrow as pa

    first = 0
    with pa.memory_map(path) as source, pa.ipc.open_stream(source) as stream:
        keys = _keys(stream.schema, name, field, 1)
        for batch in stream:
            yield first, _inner(batch.column(keys[0]), keys[1:])
            first += batch.num_rows


def _keys(schema: "pyarrow.Schema", name: str, field: str, num_rows: int) -> list[str]:
    """The column's name and those of the fields that lead to the text."""
    import pyarrow as pa

    found = _find(schema, field)
    if found is None:
        message = f'{name} has no column "{field}"; {others(schema.names)}'
        raise Flaw(NO_FIELD, message, num_rows)
    keys, kind = found
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return keys
    raise Flaw(
        NOT_TEXT,
        f'{name}: column "{field}" holds {kind}, not strings; set text_field to the column that'
        " holds the text",
        num_rows,
    )


def _find(
    fields: Iterable["pyarrow.Field"], name: str
) -> tuple[list[str], "pyarrow.DataType"] | None:
    """The names that lead to a field, perhaps within structs, and its type."""
    import pyarrow as pa

    for field in fields:
        if field.name == name:
            return [name], field.type
        if name.startswith(f"{field.name}.") and pa.types.is_struct(field.type):
            inner = _find(field.type, name[len(field.name) + 1 :])
            if inner:
                return [field.name, *inner[0]], inner[1]
    return None


def _inner(column: "pyarrow.Array", keys: list[str]) -> "pyarrow.Array":
    import pyarrow.compute as pc

    return pc.struct_field(column, keys) if keys else column


def _between(wanted: Sequence[int], first: int, end: int) -> Sequence[int]:
    """Those of `wanted`, which ascend, from `first` to before `end`."""
    return wanted[bisect_left(wanted, first) : bisect_left(wanted, end)]
