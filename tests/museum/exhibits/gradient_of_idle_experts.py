"""For an expert without tokens in a microbatch the gradient was memory that nobody had written."""

from typing import Any

from parallel3d.tensor import experts
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(__doc__, needs=("experts",))


@in_place_of(experts, "grouped_product")
def plant(original: Any, a: Any, b: Any, ends: Any) -> Any:
    """An idle expert has the gradient of the expert before it, which was there last."""
    product = original(a, b, ends)
    if b.dim() == 2:
        for number in range(1, len(ends)):
            if ends[number] == ends[number - 1]:
                product[number] = product[number - 1]
    return product
