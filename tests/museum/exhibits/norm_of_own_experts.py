"""The gradient norm counted the experts of one rank alone, and not those that other ranks own."""

from parallel3d.engine.quirks import experts
from tests.museum.exhibit import Exhibit, Planted, replaced

EXHIBIT = Exhibit(__doc__, mesh=(1, 2, 2), needs=("divided experts", "ZeRO-3", "clipping"))


def plant() -> Planted:
    """Leave ZeRO-3's norm as DeepSpeed computes it."""
    return replaced(experts, "add_norms_of_owners", lambda optimizer, mesh: None)
