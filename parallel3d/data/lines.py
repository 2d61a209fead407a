"""Lines of text files, and the text field of a line of JSON."""

import io
import json
from collections.abc import Iterator
from typing import IO, Any, cast

from parallel3d.data.pieces import TOO_LONG, Flaw, not_utf8, others

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
        """The next line, or the next part of one; b"" at the end of the file."""
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
    """The text of a field in a line of JSON, in UTF-8; b"" for a blank line.

    `field` is a key, or keys that lead into objects: "meta.text". Raises Flaw.
    """
    if len(line.removesuffix(b"\n")) > most_bytes:
        rule = f"has more than {most_bytes:,} bytes"
        raise Flaw(TOO_LONG, f"{place} {rule}; raise data.max_line_bytes, or split the line")
    if not line.strip():
        return b""
    value = _decoded(line, place, field)
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


def _decoded(line: bytes, place: str, field: str) -> _Object:
    """The object that a line holds."""
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
