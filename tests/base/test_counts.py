"""Numbers as people write them, in configs and in flags."""

from argparse import ArgumentTypeError
from fractions import Fraction

import pytest

from parallel3d.base.arguments import amount, whole_number
from parallel3d.base.counts import read_count, read_number

pytestmark = pytest.mark.pure

READ = {
    "7": 7,
    "+7": 7,
    "-7": -7,
    "1e9": 10**9,
    "1E9": 10**9,
    "1.5e3": 1500,
    "25e-1 k": 2500,
    "1_000_000": 10**6,
    "1,000,000": 10**6,
    "1B": 10**9,
    "1b": 10**9,
    "1G": 10**9,
    "0.1B": 10**8,
    "2 T": 2 * 10**12,
    "64Ki": 65536,
    "1.5Mi": 3 * 2**19,
    "9007199254740993": 2**53 + 1,
    "9007199254.740993M": 9007199254740993,
    "1e23": 10**23,
}
NOT_READ = ["", " ", "B", "e9", "1e", "1__0", "_1", "1_", "1,00", "1000,000", "0x10", "1e9999", "٣"]
NOT_READ += ["inf", "nan", "1 2", "1KK", "1 steps", "1" * 4001, "1e9 tokens", "5GB", "--1"]


@pytest.mark.parametrize(("text", "number"), READ.items())
def test_numbers_are_read_exactly(text: str, number: int) -> None:
    assert read_number(text) == number
    assert read_count(text) == number
    assert type(read_count(text)) is int


@pytest.mark.parametrize("text", NOT_READ)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be a number; write"):
        read_number(text)
    with pytest.raises(ValueError, match="must be an integer; write"):
        read_count(text)


def test_units_are_read_where_they_belong() -> None:
    sizes = {"5GB": 5 * 10**9, "64 KiB": 65536, "10 bytes": 10, "1TiB": 2**40, "1B": 10**9}
    assert {text: read_count(text, "bytes") for text in sizes} == sizes
    tokens = {"10B tokens": 10**10, "1 token": 1, "2T tokens": 2 * 10**12, "5M": 5 * 10**6}
    assert {text: read_count(text, "tokens") for text in tokens} == tokens


def test_floats_count_if_they_are_whole() -> None:
    assert read_count(1e9) == 10**9 and type(read_count(1e9)) is int
    assert read_count(1e23) == 10**23  # int(1e23) is 99999999999999991611392
    for value in (True, None, [1], {}):
        assert read_count(value) is value
    for value in ("1.5", 1.5, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="must be an integer"):
            read_count(value)
    assert read_number("1.5") == Fraction(3, 2)


def test_flags_read_the_same_numbers() -> None:
    assert whole_number(most=10**10)("1.5B") == 1_500_000_000
    assert amount("1e24") == 1e24 and amount("0.5") == 0.5 and amount("7b") == 7e9
    for text in ("0", "-1", "x", "1e999"):
        with pytest.raises(ArgumentTypeError, match="must be a number above 0"):
            amount(text)
