"""The text field of one line of JSON, and the errors of a line without it."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from parallel3d.data.pieces import UnusableDocument, check_utf8

NOT_JSON, NO_FIELD, NOT_TEXT = "not JSON", "no such field", "not a string"
SURROGATE, REPEATED = "half of a surrogate pair", "repeated key"


def text_of(line: bytes, place: str, field: str) -> bytes:
    """The text of a field in a line of JSON, in UTF-8; b"" for a blank line.

    `field` is a key, or keys that lead into objects: "meta.text". Raises UnusableDocument.
    """
    if not line.strip():
        return b""
    characters = check_utf8(line, place)
    try:
        value = DECODER.decode(characters.rstrip(" \t\r\n"))
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", None) or "nested too deeply"
        column = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        raise not_json(f"{place} is not JSON: {reason}{column}", field) from None
    if not isinstance(value, dict):
        raise not_json(f"{place} is {json_type(value)}, not an object", field)
    found = list(_places(value, field, repeated(place, field)))
    if not found:
        raise no_field(place, field, value)
    if len(found) > 1:
        raise repeated(place, field)
    text = found[0]
    if not isinstance(text, str):
        raise not_text(place, field, json_type(text))
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        half = f" (\\u{ord(text[error.start]):04x}) at character {error.start}"
        raise surrogate(place, field, half) from None


class _Repeating(dict[str, Any]):
    """An object in which the keys `repeated` come more than once."""

    repeated: set[str]


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    repeating = _Repeating(found)
    repeating.repeated = {
        key for key, count in Counter(key for key, _ in pairs).items() if count > 1
    }
    return repeating


DECODER = json.JSONDecoder(object_pairs_hook=_object)


def leads_to(key: str, field: str) -> bool:
    """Whether a key is the field or a step on the path to it: "meta" of "meta.text"."""
    return key == field or field.startswith(f"{key}.")


def _places(value: dict[str, Any], field: str, twice: UnusableDocument) -> Iterator[Any]:
    """What stands where the field may be, in the order of the line.

    In an object, what comes after a field of just that name does not count. `long_json` decides
    the same without knowing what comes later. Raises `twice` where a key on the way is repeated.
    """
    if isinstance(value, _Repeating) and any(leads_to(key, field) for key in value.repeated):
        raise twice
    if "." not in field:
        yield from [value[field]] if field in value else []
        return
    for key, inner in value.items():
        if key == field:
            yield inner
            return
        if isinstance(inner, dict) and leads_to(key, field):
            yield from _places(inner, field[len(key) + 1 :], twice)


def not_json(what: str, field: str) -> UnusableDocument:
    """The error for a line that is no JSON object."""
    return UnusableDocument(
        NOT_JSON, f'{what}; write one object a line, such as {{"{field}": "..."}}'
    )


def no_field(place: str, field: str, names: Iterable[str]) -> UnusableDocument:
    """The error for an object without the field, which has `names`."""
    return UnusableDocument(NO_FIELD, f'{place} has no field "{field}"; {others(names)}')


def not_text(place: str, field: str, kind: str) -> UnusableDocument:
    """The error for a field that holds something other than text."""
    reason = kind if kind == "null" else NOT_TEXT
    return UnusableDocument(
        reason,
        f'{place}: field "{field}" is {kind}, not a string; mend or remove the line, or set'
        " text_field to the field that holds the text",
    )


def repeated(place: str, field: str) -> UnusableDocument:
    """The error for a field that occurs more than once."""
    return UnusableDocument(
        REPEATED,
        f'{place}: field "{field}", or an object that it may be in, comes twice; leave one of them'
        " in the line, or remove it",
    )


def surrogate(place: str, field: str, half: str) -> UnusableDocument:
    """The error for half of a surrogate pair."""
    return UnusableDocument(
        SURROGATE,
        f'{place}: field "{field}" has half of a surrogate pair{half}, which UTF-8 cannot hold;'
        " mend or remove the line",
    )


def json_type(value: object) -> str:
    """The name of a value's JSON type in messages."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")


def others(names: Iterable[str]) -> str:
    """The end of a message about a missing field: the fields that are there."""
    shown = ", ".join(f'"{name}"' for name in list(names)[:8])
    # A terminal cannot show half of a surrogate pair.
    found = shown.encode(errors="backslashreplace").decode()
    return (
        f"it has {found}; set text_field to the one that holds the text"
        if found
        else "it has none; leave it out"
    )
