"""The text of a document: pieces of bounded size, of lines or JSON, or the flaw that it has."""

import codecs
import io
import json
import os
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import IO, Any, NamedTuple, cast

from parallel3d.base.errors import DataError

PIECE_BYTES = 2**20
BOM = "\ufeff"
# Why a document is left out. Nobody complains of those without text.
EMPTY, NOT_UTF8, NUL = "empty", "not UTF-8", "only NUL bytes"
UNREADABLE, TOO_LONG = "unreadable file", "too long a line"


class TextPiece(NamedTuple):
    """A piece of a document's text; `last` marks the document's last piece.

    `row` is the document's row or line, counted from 1, `offset` the byte where that starts.
    """

    row: int
    offset: int
    text: str
    last: bool


class Flaw(DataError):
    """The reason why the document at `row` cannot be used; row 0 is a file of `num_rows` rows."""

    def __init__(self, reason: str, message: str, num_rows: int = 1) -> None:
        super().__init__(message)
        self.reason, self.num_rows, self.row = reason, num_rows, 0


def pieces_of(blocks: Iterable[bytes], place: str, remedy: str = "") -> Iterator[tuple[str, bool]]:
    """Yield the pieces of a text that arrives in blocks of bytes, and which is the last.

    A byte order mark before it is dropped; an empty text has no pieces. Raises Flaw where it is not
    UTF-8, or is NUL bytes alone.
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
        what = "holds NUL bytes alone, as files do that were never written out"
        raise Flaw(NUL, f"{place} {what}; mend or remove it")
    if ready:
        yield ready, True


def _decoded(blocks: Iterable[bytes], place: str, remedy: str) -> Iterator[str]:
    """Yield the characters of each block, without those that have nothing whole."""
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
    """Yield a text in pieces of at most PIECE_BYTES of whole characters."""
    start = 0
    while start < len(data):
        # A character that is cut short belongs to the next piece.
        piece = data[start : start + PIECE_BYTES].decode(errors="ignore")
        yield piece
        start += len(piece.encode())


def not_utf8(error: UnicodeDecodeError, place: str, before: int = 0, remedy: str = "") -> Flaw:
    """Return the flaw of a text that had `before` bytes before those that cannot be decoded."""
    byte, offset = error.object[error.start], before + error.start
    what = f"byte 0x{byte:02x} at offset {offset} ({error.reason})"
    return Flaw(NOT_UTF8, f"{place} is not UTF-8: {what}; convert the file with iconv{remedy}")


def slices(data: bytes) -> Iterator[bytes]:
    """Yield the bytes in blocks of at most PIECE_BYTES."""
    return (data[i : i + PIECE_BYTES] for i in range(0, len(data), PIECE_BYTES))


def others(names: Iterable[str]) -> str:
    """Return the end of a message about a missing field or column: those that are there."""
    shown = ", ".join(f'"{name}"' for name in list(names)[:8])
    # A terminal cannot show half of a surrogate pair.
    found = shown.encode(errors="backslashreplace").decode()
    return (
        f"it has {found}; set text_field to the one that holds the text"
        if found
        else "it has none; leave it out"
    )


COMPRESSED = (".gz", ".bz2", ".zst")
NO_FIELD, NOT_TEXT = "no such field", "not a string"


class Lines:
    """The lines of a text file, compressed or not; lines above `limit` bytes come in parts.

    `position` is the place of the next byte, `row` the number of line ends before it.
    """

    def __init__(self, path: str, limit: int) -> None:
        self._path, self._limit = path, limit
        self._compressed = path.endswith(COMPRESSED)
        self._open()

    def _open(self) -> None:
        self.position = self.row = 0
        self._file = open_text(self._path, self._compressed)

    def seek(self, offset: int) -> None:
        """Go to the byte `offset` of the text, or to its end if that is before."""
        if offset != self.position and not self._compressed:
            self._file.seek(offset)
            self.position = offset
        if offset < self.position:
            self._open()
        # A compressed file can only be read on.
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
        """Yield the parts of a line, of which the first was read."""
        while part:
            yield part
            part = b"" if part.endswith(b"\n") else self.read()

    def block(self, part: bytes) -> Iterator[bytes]:
        """Yield lines up to a blank one, which is read too; part of the first was read."""
        is_start = False
        while part and not (is_start and not part.strip()):
            yield part
            is_start = part.endswith(b"\n")
            part = self.read()


def open_text(path: str, compressed: bool) -> IO[bytes]:
    """Open a text file to read its bytes, unpacked."""
    if os.path.getsize(path) == 0:  # files of /proc are said to be empty, and some never end
        return io.BytesIO()
    if not compressed:
        return open(path, "rb")
    import pyarrow as pa

    return io.BufferedReader(cast(io.RawIOBase, pa.input_stream(path)), 2**20)


def without_ending(parts: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the parts of a text without the line ending behind it."""
    last = b""
    for part in parts:
        if part == b"\n":
            # A line ending was read in two parts.
            last += part
            continue
        yield last
        last = part
    yield last.removesuffix(b"\r\n" if last.endswith(b"\r\n") else b"\n")


def json_text(line: bytes, place: str, field: str, most_bytes: int) -> bytes:
    """Return the text of a field in a line of JSON, in UTF-8; b"" for a blank line.

    `field` is a key, or keys that lead into objects: "meta.text". Raises Flaw.
    """
    if len(line.removesuffix(b"\n")) > most_bytes:
        rule = f"has more than {most_bytes:,} bytes"
        raise Flaw(TOO_LONG, f"{place} {rule}; raise data.max_line_bytes, or split the line")
    if not line.strip():
        return b""
    value = _object(line, place, field)
    found = _found(value, place, field)
    if not found:
        names = others(key for key, _ in value)
        raise Flaw(NO_FIELD, f'{place} has no field "{field}"; {names}')
    if len(found) > 1:
        raise _repeated(place, field)
    [text] = found
    if not isinstance(text, str):
        raise Flaw(
            "null" if text is None else NOT_TEXT,
            f'{place}: field "{field}" is {_json_type(text)}, not a string; mend or remove the'
            " line, or set text_field to the field that holds the text",
        )
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        half = f"(\\u{ord(text[error.start]):04x}) at character {error.start}"
        raise Flaw(
            "half of a surrogate pair",
            f'{place}: field "{field}" has half of a surrogate pair {half}, which UTF-8 cannot'
            " hold; mend or remove the line",
        ) from None


class _Object(list[tuple[str, Any]]):
    """The keys and values of a JSON object, in their order, repeated keys too."""


_DECODER = json.JSONDecoder(object_pairs_hook=_Object)


def _object(line: bytes, place: str, field: str) -> _Object:
    """Return the object that a line holds."""
    example = f'write one object a line, such as {{"{field}": "..."}}'
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


def _found(value: _Object, place: str, field: str, inner: str = "") -> list[Any]:
    """Return the values of a field, or of the `inner` rest of its path; a key of that name ends it.

    Raises Flaw where a key on the way is repeated.
    """
    path = inner or field
    on_the_way = [pair for pair in value if pair[0] == path or path.startswith(f"{pair[0]}.")]
    if len(dict(on_the_way)) < len(on_the_way):
        raise _repeated(place, field)
    found: list[Any] = []
    for key, item in on_the_way:
        if key == path:
            return [*found, item]
        if isinstance(item, _Object):
            found += _found(item, place, field, path[len(key) + 1 :])
    return found


def _repeated(place: str, field: str) -> Flaw:
    what = f'field "{field}", or an object that it may be in, comes twice'
    return Flaw("repeated key", f"{place}: {what}; leave one of them in the line, or remove it")


def _json_type(value: object) -> str:
    names = {_Object: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")
