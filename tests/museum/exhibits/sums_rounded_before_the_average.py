"""Sums of microbatches in fp32 were rounded to bf16 as they were copied to be averaged."""

from parallel3d.engine.quirks import reducing
from tests.museum.exhibit import Exhibit, Planted, replaced

NEEDS = ("bf16", "microbatches", "ZeRO below 3", "reduced once", "no offload")
EXHIBIT = Exhibit(__doc__, mesh=(1, 1, 1), needs=NEEDS, kind="half")


def plant() -> Planted:
    """Leave DeepSpeed's buckets in the weights' type."""
    return replaced(reducing, "reduce_in_gradients_type", lambda optimizer: None)
