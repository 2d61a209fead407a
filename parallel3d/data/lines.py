"""The text of a document in pieces of bounded size, from plain text or JSON, or its flaw."""

import codecs
import io
import json
import lzma
import os
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import IO, cast

from parallel3d.base.errors import DataError, first_line

PIECE_BYTES = 2**20
# Reasons for leaving out a document. Empty documents are not reported as flaws.
EMPTY = "empty"
NOT_UTF8 = "not UTF-8"
NUL = "only NUL bytes"
UNREADABLE = "unreadable file"
TOO_LONG = "too long a line"
NO_FIELD = "no such field"
NOT_TEXT = "not a string"
# Reasons that leave out a conversation.
TOO_MANY_TOKENS = "longer than a sample"
ENDS_WITH_USER = "ends with the user"
UNTRAINED = "without tokens of the assistant"
# These are counted, but are no faults of the data.
ORDINARY = (EMPTY, TOO_MANY_TOKENS, ENDS_WITH_USER, UNTRAINED)
# First bytes of a compressed file -> the name of its compression.
_MAGIC = (
    (re.compile(rb"\x1f\x8b\x08"), "gzip"),
    (re.compile(rb"BZh[1-9](1AY&SY|\x17\x72\x45\x38\x50\x90)"), "bz2"),
    # A frame, or one that readers skip, which parallel compressors write first.
    (re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"), "zstd"),
    (re.compile(rb"\x04\x22\x4d\x18"), "lz4"),
    (re.compile(rb"\xfd7zXZ\x00"), "xz"),
    (re.compile(rb"PK\x03\x04"), "zip"),
)


PARQUET = b"PAR1"
# First bytes of files that are no text -> what they are, and what helps.
_NO_TEXT = {
    PARQUET: 'a Parquet file; set its source to "parquet"',
    b"\x93NUMPY": 'an array of NumPy; set its source to "tokens" if these are token ids',
    b"%PDF-": "a PDF; convert it to text, and name that file",
}


Piece = tuple[str, bool]
"""A piece of a document's text, and True if it is the last one."""


class Flaw(DataError):
    """The reason why the document at `row` is unusable; row 0 means a file of `num_rows` rows."""

    def __init__(self, reason: str, message: str, num_rows: int = 1) -> None:
        super().__init__(message)
        self.reason = reason
        self.num_rows = num_rows
        self.row = 0


def pieces_of(blocks: Iterable[bytes], place: str, remedy: str = "") -> Iterator[Piece]:
    """Yield (piece, is the last one) of a text that arrives in blocks of bytes.

    A leading byte order mark is dropped; an empty text has no pieces. Raises Flaw if the text is
    not UTF-8, or consists of NUL bytes.
    """
    ready = ""
    is_nul = True
    for text in _decoded(blocks, place, remedy):
        is_nul = is_nul and not text.strip("\0")
        if ready:
            yield ready, False
        ready = text
    if ready and is_nul:
        raise Flaw(
            NUL,
            f"{place} contains only NUL bytes, as after an interrupted write; restore or remove it",
        )
    if ready:
        yield ready, True


def _decoded(blocks: Iterable[bytes], place: str, remedy: str) -> Iterator[str]:
    """Yield the characters of each block; blocks without a complete character are skipped."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    num_read = 0
    for block in chain(blocks, [b""]):
        first = num_read - len(decoder.getstate()[0])
        num_read = num_read + len(block)
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise not_utf8(error, place, first, remedy) from None
        if text:
            yield text


def not_utf8(error: UnicodeDecodeError, place: str, before: int = 0, remedy: str = "") -> Flaw:
    """Return the flaw for a decoding error in a block that begins at byte `before`."""
    return Flaw(
        NOT_UTF8,
        f"{place} is not UTF-8: byte 0x{error.object[error.start]:02x} at offset"
        f" {before + error.start} ({error.reason}); convert the file with iconv{remedy}",
    )


def suggest_fields(names: Iterable[str]) -> str:
    """Return the end of a message about a missing field: the existing ones, and the remedy."""
    quoted = ", ".join(f'"{name}"' for name in list(names)[:8])
    # A terminal cannot show half of a surrogate pair.
    printable = quoted.encode(errors="backslashreplace").decode()
    return f"it has {printable or 'none'}; set text_field to the one that holds the text"


class Lines:
    """The lines of a text file, compressed or not; longer ones than `limit` bytes are cut there.

    `position` is the offset of the next byte, `row` the number of lines before it.
    """

    def __init__(self, path: str, limit: int) -> None:
        self._path = path
        self._limit = limit
        self._open()

    def _open(self) -> None:
        self.position = self.row = 0
        self._file = open_text(self._path)
        self._is_compressed = compression_of(self._path) is not None

    def seek(self, offset: int) -> None:
        """Move to the byte `offset` of the text, or to its end if the text is shorter."""
        if not self._is_compressed:
            self.position = self._file.seek(offset)
        elif offset < self.position:
            self._open()
        # A compressed file can only be read forwards.
        while self.position < offset:
            skipped = self._file.read(min(offset - self.position, 2**20))
            if not skipped:
                return
            self.position += len(skipped)

    def read(self) -> bytes:
        """Return the next line; b"" at the end of the file."""
        line = self._file.readline(self._limit)
        self.position += len(line)
        if line:
            self.row += 1
        part = line
        while len(part) == self._limit and not part.endswith(b"\n"):
            part = self._file.readline(self._limit)
            self.position += len(part)
        return line

    def block(self, first: bytes) -> bytes:
        """Return the lines up to a blank line, which is consumed; the first was already read."""
        lines = bytearray(first)
        while (line := self.read()).strip():
            if len(lines) < self._limit:
                lines += line
        return bytes(lines)


def open_text(path: str) -> IO[bytes]:
    """Open a text file, compressed or not, to read its uncompressed bytes."""
    if os.path.getsize(path) == 0:  # /proc reports size 0 for files that block or never end
        return io.BytesIO()
    compression = compression_of(path)
    if compression is None:
        first = first_bytes(path)
        for magic, what in _NO_TEXT.items():
            if first.startswith(magic):
                raise Flaw(UNREADABLE, f"{path} is {what}")
        return open(path, "rb")
    if compression == "zip":
        raise Flaw(UNREADABLE, f"{path} is a zip archive; unpack it, and name the files in it")
    if compression == "xz":
        return lzma.open(path)
    import pyarrow as pa

    unpacked = pa.input_stream(path, compression=compression)
    return io.BufferedReader(cast(io.RawIOBase, unpacked), 2**20)


def compression_of(path: str) -> str | None:
    """Return how a file is compressed, by its first bytes; None if it is not."""
    first = first_bytes(path)
    for magic, name in _MAGIC:
        if magic.match(first):
            return name
    return None


def first_bytes(path: str) -> bytes:
    """Return the bytes of a file that say its format."""
    with open(path, "rb") as file:
        return file.read(16)


def json_object(line: bytes, place: str, example: str) -> dict[str, object]:
    """Return the object in a line of JSON; raise Flaw if it holds none.

    `example` is one, for the message.
    """
    remedy = f"write one object per line, such as {example}"
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise not_utf8(error, place) from None
    except json.JSONDecodeError as error:
        raise Flaw("not JSON", f"{place} is not JSON: {error}; {remedy}") from None
    except (ValueError, RecursionError) as error:  # thousands of digits, or of brackets
        raise Flaw(
            "not readable", f"{place} cannot be read: {first_line(error)}; fix or remove the line"
        ) from None
    if not isinstance(value, dict):
        raise Flaw("not JSON", f"{place} is {_json_type(value)}, not an object; {remedy}")
    return value


def json_text(line: bytes, place: str, field: str) -> bytes:
    """Return the text of a field in a line of JSON, as UTF-8; b"" for a blank line.

    `field` is a key, or a path into nested objects such as "meta.text". Raises Flaw if the line or
    the field is unusable.
    """
    if not line.strip():
        return b""
    value = json_object(line, place, f'{{"{field}": "..."}}')
    texts = [*_values_at(value, field)]
    if not texts:
        paths = [*_paths_of_text(value)] or value
        raise Flaw(NO_FIELD, f'{place} has no field "{field}"; {suggest_fields(paths)}')
    if not isinstance(texts[0], str):
        raise Flaw(
            "null" if texts[0] is None else NOT_TEXT,
            f'{place}: field "{field}" is {_json_type(texts[0])}, not a string; fix or remove the'
            " line, or set text_field to the field that holds the text",
        )
    try:
        return texts[0].encode()
    except UnicodeEncodeError as error:
        raise Flaw(
            "half of a surrogate pair",
            f'{place}: field "{field}" has half of a surrogate pair at character {error.start},'
            " which UTF-8 cannot encode; fix or remove the line",
        ) from None


def _values_at(value: dict[str, object], path: str) -> Iterator[object]:
    """Yield the values at a path into nested objects, whose keys may contain dots, too."""
    if path in value:
        yield value[path]
    for key, inner in value.items():
        if isinstance(inner, dict) and path.startswith(f"{key}."):
            yield from _values_at(inner, path[len(key) + 1 :])


def _paths_of_text(value: dict[str, object], prefix: str = "") -> Iterator[str]:
    """Yield the path of each string in nested objects."""
    for key, inner in value.items():
        if isinstance(inner, dict):
            yield from _paths_of_text(inner, f"{prefix}{key}.")
        elif isinstance(inner, str):
            yield f"{prefix}{key}"


def _json_type(value: object) -> str:
    if value is None:
        return "null"
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return names.get(type(value), "a number")
