"""Tokens from other ranks arrive by sender, and were multiplied as if they came by expert."""

from typing import Any

from parallel3d.tensor import experts
from tests.museum.exhibit import Exhibit, Planted, all_of, wrapped

EXHIBIT = Exhibit(__doc__, mesh=(1, 4, 1), needs=("divided experts",))


def _in_place(original: Any, rows: Any, places: Any, k: int) -> Any:
    return rows if k == 1 else original(rows, places, k)


def plant() -> Planted:
    """Only a token's own copies, k of them, are put in order."""
    return all_of(*(wrapped(experts, name, _in_place) for name in ("_scatter", "_gather")))
