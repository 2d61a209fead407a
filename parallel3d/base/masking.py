"""Masking of passwords in URLs, in all messages, logs and files that a run writes."""

import re

MASK = "***"
# The password of scheme://user:password@host. One with an unescaped "/" ends at the first "@", and
# must not be confused with a port.
_PASSWORD = re.compile(r"(://[^/\s:@\[]*:)(?:[^/\s]*@|(?!\d+/)[^\s\"]*?@)")


def mask(text: str) -> str:
    """Return `text` with the passwords of URLs replaced by MASK."""
    return _PASSWORD.sub(rf"\1{MASK}@", text)


def mask_values(value: object) -> object:
    """Return a tree of JSON values with the passwords of URLs replaced by MASK."""
    if isinstance(value, dict):
        return {key: mask_values(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [mask_values(inner) for inner in value]
    return mask(value) if isinstance(value, str) else value
