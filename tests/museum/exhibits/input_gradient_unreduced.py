"""The gradient of what enters a column-parallel layer was not summed over the ranks (f's backward
pass).
"""

from parallel3d.tensor import product
from parallel3d.tensor.collectives import Pending
from tests.museum.exhibit import Exhibit, Planted, replaced

EXHIBIT = Exhibit(__doc__, mesh=(1, 1, 4), needs=("replicated activations",))


def plant() -> Planted:
    """No all-reduce in the backward pass."""
    return replaced(product, "start_all_reduce", lambda x, *rest: Pending(x))
