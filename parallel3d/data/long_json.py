"""The text field of a line of JSON too long for memory, unpacked as it is read."""

import codecs
import json
import re
from collections.abc import Iterable, Iterator

from parallel3d.data.json_line import (
    REPEATED,
    leads_to,
    no_field,
    not_json,
    not_text,
    repeated,
    surrogate,
)
from parallel3d.data.pieces import NOT_UTF8, UnusableDocument

# What a string may hold, whole escapes and whole surrogate pairs alone, without backtracking.
STRING = re.compile(
    rb'(?:[^"\\\x00-\x1f]++|\\["\\/bfnrt]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}'
    rb"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*+"
)
HALF = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
SPACE, ATOM = re.compile(rb"[ \t\r\n]*+"), re.compile(rb'[^ \t\r\n,:"{}\[\]]*+')
LONGEST_ATOM = 64  # of numbers and names; a pair of escapes is shorter
TYPES = {b"{": "an object", b"[": "a list", b'"': "a string", b"n": "null"}
TYPES |= {b"t": "a boolean", b"f": "a boolean"}


class LongObject:
    """A JSON object that arrives in `blocks`, cut anywhere; `place` names its line in messages."""

    def __init__(self, blocks: Iterable[bytes], place: str, field: str) -> None:
        self._blocks, self._place, self._field = iter(blocks), place, field
        self._buffer, self._at, self._before = b"", 0, 0
        self._names: list[str] = []
        self._found = False
        self._flaws: dict[str, UnusableDocument] = {}  # of the field, by their reasons

    def text(self) -> Iterator[bytes]:
        """The text of the field in UTF-8, in blocks; UnusableDocument at the latest at its end."""
        kind = self._look()
        try:
            if kind != b"{":
                raise self._wrong("Expecting '{'")
            yield from self._object(self._field, outermost=True)
            if self._look():
                raise self._wrong("Extra data")
        except RecursionError:
            raise self._wrong("nested too deeply") from None
        except UnicodeDecodeError as error:
            place = self._before + self._at
            raise UnusableDocument(
                NOT_UTF8,
                f"{self._place} is not UTF-8: before offset {place} ({error.reason}); convert the"
                " file with iconv",
            ) from None
        # Told when all of the line is known to be JSON, and the first of these, as of short lines.
        for reason in (REPEATED, *self._flaws):
            if reason in self._flaws:
                raise self._flaws[reason]
        if not self._found:
            raise no_field(self._place, self._field, self._names)

    def _object(self, field: str | None, outermost: bool = False) -> Iterator[bytes]:
        """Read an object, and give the text of the field in it."""
        seen: set[str] = set()  # of the keys that may lead to the field
        self._at += 1
        if self._look() == b"}":
            self._at += 1
            return
        while True:
            if self._look() != b'"':
                raise self._wrong("Expecting property name enclosed in double quotes")
            key = b"".join(self._string(asked=False)).decode(errors="surrogatepass")
            if outermost and len(self._names) < 8 and key not in self._names:
                self._names.append(key)
            self._expect(b":", "Expecting ':' delimiter")
            kind = self._look()
            leads = field is not None and leads_to(key, field)
            if leads and (key in seen or (key == field and self._found)):
                self._note(repeated(self._place, self._field))
                self._skip(kind)
            elif key == field:
                self._found = True
                if kind == b'"':
                    # Of a text with a flaw no more is given: it may not be UTF-8.
                    yield from (part for part in self._string() if not self._flaws)
                else:
                    self._note(not_text(self._place, self._field, TYPES.get(kind, "a number")))
                    self._skip(kind)
            elif field is not None and leads and kind == b"{" and field not in seen:
                yield from self._object(field[len(key) + 1 :])
            else:
                self._skip(kind)
            if leads:
                seen.add(key)
            if self._expect(b",}", "Expecting ',' delimiter") == b"}":
                return

    def _note(self, flaw: UnusableDocument) -> None:
        self._flaws.setdefault(flaw.reason, flaw)

    def _skip(self, kind: bytes) -> None:
        """Read a value that nobody asks for."""
        if kind == b'"':
            for _ in self._string(asked=False):
                pass
        elif kind == b"{":
            for _ in self._object(None):
                pass
        elif kind == b"[":
            self._at += 1
            if self._look() == b"]":
                self._at += 1
                return
            self._skip(self._look())
            while self._expect(b",]", "Expecting ',' delimiter") == b",":
                self._skip(self._look())
        else:
            self._fill(LONGEST_ATOM)
            found = ATOM.match(self._buffer, self._at)
            assert found, "it matches nothing, too"
            try:
                json.loads(found[0])
            except ValueError:
                raise self._wrong("Expecting value") from None
            self._at = found.end()

    def _string(self, asked: bool = True) -> Iterator[bytes]:
        """Read a string, and give its characters in UTF-8.

        Half of a surrogate pair is a flaw of the text that is `asked` for alone: elsewhere it is
        JSON like any other, and given as "surrogatepass" has it.
        """
        decoder = codecs.getincrementaldecoder("utf-8")()
        self._at += 1
        while True:
            self._fill(LONGEST_ATOM)
            found = STRING.match(self._buffer, self._at)
            assert found, "it matches nothing, too"
            self._at = found.end()
            if found[0]:
                yield json.loads(f'"{decoder.decode(found[0])}"').encode()
            elif self._buffer[self._at : self._at + 1] == b'"':
                decoder.decode(b"", final=True)
                self._at += 1
                return
            elif half := HALF.match(self._buffer, self._at):
                escape = half[0].decode()
                if asked:
                    self._note(surrogate(self._place, self._field, f" ({escape})"))
                self._at = half.end()
                yield json.loads(f'"{escape}"').encode(errors="surrogatepass")
            else:
                raise self._wrong("a string that is not ended, or an escape that is none")

    def _expect(self, characters: bytes, reason: str) -> bytes:
        found = self._look()
        if not found or found not in characters:
            raise self._wrong(reason)
        self._at += 1
        return found

    def _look(self) -> bytes:
        """Pass over space, and give the byte that comes; b"" at the end."""
        while True:
            self._fill(1)
            found = SPACE.match(self._buffer, self._at)
            assert found, "it matches nothing, too"
            self._at = found.end()
            if self._at < len(self._buffer) or not self._buffer:
                return self._buffer[self._at : self._at + 1]

    def _fill(self, count: int) -> None:
        """Have `count` bytes at hand, or all that are left."""
        while len(self._buffer) - self._at < count:
            block = next(self._blocks, b"")
            self._before += self._at
            self._buffer, self._at = self._buffer[self._at :] + block, 0
            if not block:
                return

    def _wrong(self, reason: str) -> UnusableDocument:
        column = self._before + self._at + 1
        return not_json(f"{self._place} is not JSON: {reason} at byte {column}", self._field)
