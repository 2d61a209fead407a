"""The attention's dropout was given to a function that does not know of evaluation, and stayed on
in it.
"""

from parallel3d.tensor.dropout import Dropout
from tests.museum.exhibit import Exhibit, Planted, replaced

EXHIBIT = Exhibit(
    __doc__, "2023-04-11", "karpathy/nanoGPT#240", mesh=(1, 1, 1), needs=("dropout",), kind="beside"
)


def plant() -> Planted:
    """Dropout's probability is always the configured one."""
    return replaced(Dropout, "active_p", property(lambda dropout: dropout.p))
