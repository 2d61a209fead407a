"""Masking of passwords and keys in URLs, in all messages, logs and files that a run writes."""

import re

MASK = "***"
# The password of scheme://user:password@host. One with an unescaped "/" ends at the first "@", and
# must not be confused with a port.
_PASSWORD = re.compile(r"(://[^/\s:@\[]*:)(?:[^/\s]*@|(?!\d+/)[^\s\"]*?@)")
# A key in a query string, as in URLs that a store has signed: X-Amz-Signature, sig, access_token.
_KEY = re.compile(
    r"([?&][\w.\-]*(?:key|token|sig|signature|secret|passw|credential|auth)[\w.\-]*=)[^&#\s\"'\\]+",
    re.IGNORECASE,
)


def mask(text: str) -> str:
    """Return `text` with passwords of URLs, and keys in their query strings, replaced by MASK."""
    return _KEY.sub(rf"\1{MASK}", _PASSWORD.sub(rf"\1{MASK}@", text))


def mask_values(value: object) -> object:
    """Return a tree of JSON values with the passwords and keys of URLs masked."""
    if isinstance(value, dict):
        return {key: mask_values(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [mask_values(inner) for inner in value]
    return mask(value) if isinstance(value, str) else value
