"""The sums of exponentials in the loss were rounded to bf16."""

from typing import Any

from parallel3d.tensor import loss
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(__doc__, needs=("bf16",), kind="half")


@in_place_of(loss, "sum_rows")
def plant(
    original: Any, logits: Any, here: Any, top: Any, picked: Any, total: Any, passes: Any
) -> None:
    """Round each token's statistics."""
    original(logits, here, top, picked, total, passes)
    for rows in (top, picked, total):
        rows.copy_(rows.bfloat16())
