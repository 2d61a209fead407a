"""The text of a document in pieces of bounded size, from plain text or JSON, or its flaw."""

import codecs
import io
import json
import os
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import IO, NamedTuple, cast

from parallel3d.base.errors import DataError

PIECE_BYTES = 2**20
BOM = "\ufeff"
# Reasons for leaving out a document. Empty documents are not reported as flaws.
EMPTY, NOT_UTF8, NUL = "empty", "not UTF-8", "only NUL bytes"
UNREADABLE, TOO_LONG = "unreadable file", "too long a line"


class TextPiece(NamedTuple):
    """A piece of a document's text."""

    row: int
    """The document's row or line, from 1."""
    offset: int
    """First byte of the row or line."""
    text: str
    last: bool
    """True for the document's last piece."""


class Flaw(DataError):
    """The reason why the document at `row` is unusable; row 0 means a file of `num_rows` rows."""

    def __init__(self, reason: str, message: str, num_rows: int = 1) -> None:
        super().__init__(message)
        self.reason, self.num_rows, self.row = reason, num_rows, 0


def pieces_of(blocks: Iterable[bytes], place: str, remedy: str = "") -> Iterator[tuple[str, bool]]:
    """Yield (piece, is the last one) of a text that arrives in blocks of bytes.

    A leading byte order mark is dropped; an empty text has no pieces. Raises Flaw if the text is
    not UTF-8, or consists of NUL bytes.
    """
    ready, is_start, is_nul = "", True, True
    for text in _decoded(blocks, place, remedy):
        if is_start:
            text = text.removeprefix(BOM)
        is_start, is_nul = False, is_nul and not text.strip("\0")
        if ready:
            yield ready, False
        ready = text
    if ready and is_nul:
        what = "contains only NUL bytes, as after an interrupted write"
        raise Flaw(NUL, f"{place} {what}; restore or remove it")
    if ready:
        yield ready, True


def _decoded(blocks: Iterable[bytes], place: str, remedy: str) -> Iterator[str]:
    """Yield the characters of each block; blocks without a complete character are skipped."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    num_read = 0
    for block in chain(blocks, [b""]):
        pending = len(decoder.getstate()[0])
        first, num_read = num_read - pending, num_read + len(block)
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise not_utf8(error, place, first, remedy) from None
        if pending + len(block) > PIECE_BYTES:
            yield from _cut(text.encode())
        elif text:
            yield text


def _cut(data: bytes) -> Iterator[str]:
    """Yield a text in pieces of at most PIECE_BYTES, cut between characters."""
    start = 0
    while start < len(data):
        # An incomplete character at the end belongs to the next piece.
        piece = data[start : start + PIECE_BYTES].decode(errors="ignore")
        yield piece
        start += len(piece.encode())


def not_utf8(error: UnicodeDecodeError, place: str, before: int = 0, remedy: str = "") -> Flaw:
    """Return the flaw for a decoding error in a block that begins at byte `before`."""
    byte, offset = error.object[error.start], before + error.start
    what = f"byte 0x{byte:02x} at offset {offset} ({error.reason})"
    return Flaw(NOT_UTF8, f"{place} is not UTF-8: {what}; convert the file with iconv{remedy}")


def slices(data: bytes) -> Iterator[bytes]:
    """Yield `data` in blocks of at most PIECE_BYTES."""
    return (data[i : i + PIECE_BYTES] for i in range(0, len(data), PIECE_BYTES))


def suggest_fields(names: Iterable[str]) -> str:
    """Return the end of a message about a missing field: the existing ones, and the remedy."""
    quoted = ", ".join(f'"{name}"' for name in list(names)[:8])
    # A terminal cannot show half of a surrogate pair.
    printable = quoted.encode(errors="backslashreplace").decode()
    return (
        f"it has {printable}; set text_field to the one that holds the text"
        if printable
        else "it has no fields; leave it out"
    )


COMPRESSED = (".gz", ".bz2", ".zst")
NO_FIELD, NOT_TEXT = "no such field", "not a string"


class Lines:
    """The lines of a text file, compressed or not; lines longer than `limit` bytes come in parts.

    `position` is the offset of the next byte, `row` the number of line ends before it.
    """

    def __init__(self, path: str, limit: int) -> None:
        self._path, self._limit = path, limit
        self._compressed = path.endswith(COMPRESSED)
        self._open()

    def _open(self) -> None:
        self.position = self.row = 0
        self._file = open_text(self._path, self._compressed)

    def seek(self, offset: int) -> None:
        """Move to the byte `offset` of the text, or to its end if the text is shorter."""
        if offset != self.position and not self._compressed:
            self._file.seek(offset)
            self.position = offset
        if offset < self.position:
            self._open()
        # A compressed file can only be read forwards.
        while self.position < offset:
            skipped = self._file.read(min(offset - self.position, 2**20))
            if not skipped:
                return
            self.position += len(skipped)

    def read(self) -> bytes:
        """Return the next line, or the next part of one; b"" at the end of the file."""
        line = self._file.readline(self._limit)
        self.position += len(line)
        self.row += line.endswith(b"\n")
        return line

    def line(self, part: bytes) -> Iterator[bytes]:
        """Yield the parts of a line whose first part was already read."""
        while part:
            yield part
            part = b"" if part.endswith(b"\n") else self.read()

    def block(self, part: bytes) -> Iterator[bytes]:
        """Yield lines up to a blank line, which is consumed; the first part was already read."""
        is_start = False
        while part and not (is_start and not part.strip()):
            yield part
            is_start = part.endswith(b"\n")
            part = self.read()


def open_text(path: str, compressed: bool) -> IO[bytes]:
    """Open a text file to read its uncompressed bytes."""
    if os.path.getsize(path) == 0:  # /proc reports size 0 for files that block or never end
        return io.BytesIO()
    if not compressed:
        return open(path, "rb")
    import pyarrow as pa

    return io.BufferedReader(cast(io.RawIOBase, pa.input_stream(path)), 2**20)


def without_ending(parts: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the parts of a text without its final line ending."""
    last = b""
    for part in parts:
        if part == b"\n":
            # The line ending was split between two parts.
            last += part
            continue
        yield last
        last = part
    yield last.removesuffix(b"\r\n" if last.endswith(b"\r\n") else b"\n")


def json_text(line: bytes, place: str, field: str, max_bytes: int) -> bytes:
    """Return the text of a field in a line of JSON, as UTF-8; b"" for a blank line.

    `field` is a key, or a path into nested objects such as "meta.text". Raises Flaw if the line or
    the field is unusable.
    """
    if len(line.removesuffix(b"\n")) > max_bytes:
        rule = f"has more than {max_bytes:,} bytes"
        raise Flaw(TOO_LONG, f"{place} {rule}; raise data.max_line_bytes, or split the line")
    if not line.strip():
        return b""
    value = _object(line, place, field)
    values = _values_of(value, place, field)
    if not values:
        names = suggest_fields(key for key, _ in value)
        raise Flaw(NO_FIELD, f'{place} has no field "{field}"; {names}')
    if len(values) > 1:
        raise _repeated(place, field)
    [text] = values
    if not isinstance(text, str):
        raise Flaw(
            "null" if text is None else NOT_TEXT,
            f'{place}: field "{field}" is {_json_type(text)}, not a string; fix or remove the'
            " line, or set text_field to the field that holds the text",
        )
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        half = f"(\\u{ord(text[error.start]):04x}) at character {error.start}"
        raise Flaw(
            "half of a surrogate pair",
            f'{place}: field "{field}" has half of a surrogate pair {half}, which UTF-8 cannot'
            " encode; fix or remove the line",
        ) from None


class _Object(list[tuple[str, object]]):
    """The (key, value) pairs of a JSON object in order, including repeated keys."""


_DECODER = json.JSONDecoder(object_pairs_hook=_Object)


def _object(line: bytes, place: str, field: str) -> _Object:
    """Return the object in a line of JSON; raise Flaw if it is something else."""
    example = f'write one object per line, such as {{"{field}": "..."}}'
    try:
        value = _DECODER.decode(line.decode().rstrip(" \t\r\n"))
    except UnicodeDecodeError as error:
        raise not_utf8(error, place) from None
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", None) or "nested too deeply"
        column = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        raise Flaw("not JSON", f"{place} is not JSON: {reason}{column}; {example}") from None
    if not isinstance(value, _Object):
        raise Flaw("not JSON", f"{place} is {_json_type(value)}, not an object; {example}")
    return value


def _values_of(value: _Object, place: str, field: str, inner: str = "") -> list[object]:
    """Return the values of the field, or of the remaining path `inner` in a nested object.

    A key that equals the remaining path ends the search. Raises Flaw if a key on the path is
    repeated.
    """
    path = inner or field
    on_the_way = [pair for pair in value if pair[0] == path or path.startswith(f"{pair[0]}.")]
    if len(dict(on_the_way)) < len(on_the_way):
        raise _repeated(place, field)
    values: list[object] = []
    for key, item in on_the_way:
        if key == path:
            return [*values, item]
        if isinstance(item, _Object):
            values += _values_of(item, place, field, path[len(key) + 1 :])
    return values


def _repeated(place: str, field: str) -> Flaw:
    what = f'field "{field}", or an object that it may be in, occurs twice'
    return Flaw("repeated key", f"{place}: {what}; keep one of them, or remove the line")


def _json_type(value: object) -> str:
    names = {_Object: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")
