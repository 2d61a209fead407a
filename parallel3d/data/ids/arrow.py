"""A column of lists of ids in an Arrow stream file, as `datasets` caches and saves them.

The ids of a batch of rows are contiguous in the file, so they are read like a flat array.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from parallel3d.base.errors import DataError
from parallel3d.data.ids.id_file import INTEGERS, TokenFile, num_bytes

if TYPE_CHECKING:
    import pyarrow


def read(path: str, name: str, field: str, kinds: Mapping[str, np.dtype] = INTEGERS) -> TokenFile:
    """Return the rows of the column `field` as documents.

    `kinds` maps the names of allowed value types to their dtypes. Raises DataError for a column of
    another type, and for null.
    """
    import pyarrow as pa

    size = num_bytes(path)
    starts = [np.empty(0, np.int64)]
    lengths = [np.empty(0, np.int64)]
    row = 0
    try:
        with pa.memory_map(path) as source:
            buffer = source.read_buffer()
            source.seek(0)
            with pa.ipc.open_stream(source) as stream:
                dtype = _dtype(stream.schema, name, field, kinds)
                for batch in stream:
                    column = batch.column(field)
                    if column.null_count or column.values.null_count:
                        raise DataError(
                            f'{name}: column "{field}" has null in rows {row + 1} to'
                            f" {row + batch.num_rows}; fix or remove the row"
                        )
                    first = _first_byte(column, buffer, name) // dtype.itemsize
                    offsets = column.offsets.to_numpy().astype(np.int64)
                    starts.append(first + offsets[:-1])
                    lengths.append(np.diff(offsets))
                    row += batch.num_rows
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{name} cannot be read ({error}); make it readable, or leave it out"
        ) from error
    return TokenFile(
        path=path,
        name=name,
        dtype=dtype,
        offset=0,
        num_tokens=size // dtype.itemsize,
        size=size,
        starts=np.concatenate(starts),
        lengths=np.concatenate(lengths),
    )


def _dtype(
    schema: "pyarrow.Schema", name: str, field: str, kinds: Mapping[str, np.dtype]
) -> np.dtype:
    import pyarrow as pa

    if field not in schema.names:
        columns = ", ".join(f'"{other}"' for other in schema.names[:8])
        raise DataError(
            f'{name} has no column "{field}"; it has {columns}; set token_field to the one that'
            " holds token ids"
        )
    kind = schema.field(field).type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not is_list or str(kind.value_type) not in kinds:
        raise DataError(
            f'{name}: column "{field}" holds {kind}, not lists of integers; set token_field to the'
            " column of token ids, or text_field to a column of text"
        )
    return kinds[str(kind.value_type)]


def _first_byte(column: "pyarrow.Array", file: "pyarrow.Buffer", name: str) -> int:
    """Return the byte of the file at which the values that the column's offsets index begin."""
    values = column.values
    buffer = values.buffers()[1]
    if buffer is None or not buffer.size:
        return 0
    first: int = buffer.address - file.address + values.offset * values.type.bit_width // 8
    if not 0 <= first < file.size:
        raise DataError(
            f"{name} is compressed and cannot be read in place; write it again without compression,"
            " as datasets' save_to_disk does"
        )
    return first
