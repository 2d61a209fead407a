"""Numbers as people write them: 1e9, 1_000_000, "1.5B", "64KiB".

`read_count` reads each count of tokens, steps, samples and bytes, in configs and in flags.
"""

import re
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from typing import Any, Literal

Unit = Literal["", "bytes", "tokens"]
_NUMBER = (
    r"(?P<digits>[+-]?(?:\d{1,3}(?:,\d{3})+|\d+(?:_\d+)*)(?:\.\d+)?(?:e[+-]?\d{1,3})?)"
    r"(?: ?(?P<prefix>[kmgbtp])(?P<binary>i?))?"
)
_PATTERNS = {
    unit: re.compile(_NUMBER + words, re.ASCII | re.IGNORECASE)
    for unit, words in (("", ""), ("bytes", "(?: ?b(?:ytes?)?)?"), ("tokens", "(?: ?tokens?)?"))
}
_POWERS = {"k": 1, "m": 2, "g": 3, "b": 3, "t": 4, "p": 5}
_LONGEST = 4000  # characters: Python converts no longer ones
_MOST = 10**30  # no run counts so far, and a float still holds it


def read_number(text: str, unit: Unit = "") -> Fraction:
    """Return the exact number in a text such as 1e9, 1_000_000, 1,000,000, 1.5B or 64Ki.

    K, M, B (or G), T and P are powers of 1000 in either case; Ki, Mi, ... powers of 1024.

    - `unit`: "bytes" also reads 5GB, 64 KiB and 10 bytes; "tokens" also reads 10B tokens.

    Raises ValueError with rule and remedy if the text is no such number.
    """
    match = _PATTERNS[unit].fullmatch(text.strip()) if len(text) <= _LONGEST else None
    if match is None:
        raise ValueError("must be a number; write one such as 1000, 1_000, 1e6 or 1M")
    number = Fraction(Decimal(match["digits"].replace("_", "").replace(",", "")))
    base = 1024 if match["binary"] else 1000
    power = _POWERS.get((match["prefix"] or "").lower(), 0)
    return number * Fraction(base**power)


def read_count(value: Any, unit: Unit = "") -> Any:
    """Return the integer in a text (as `read_number`) or a float; other values as they are.

    Integers stay exact: "0.1B" is 100,000,000, and the float 1e23 is the 10^23 that was written.

    Raises ValueError with rule and remedy for a text or a float that is no integer.
    """
    if isinstance(value, float) and value.is_integer():
        return int(Decimal(repr(value)))
    is_too_large = False
    if isinstance(value, str):
        with suppress(ValueError):
            number = read_number(value, unit)
            is_too_large = abs(number) > _MOST
            if number.denominator == 1 and not is_too_large:
                return int(number)
    if is_too_large:
        raise ValueError("is too large to count with; write a number of at most 1e30")
    if isinstance(value, float | str):
        raise ValueError('must be an integer; write a whole number, such as 1000, 1e6 or "1M"')
    return value
