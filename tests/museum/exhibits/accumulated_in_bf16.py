"""The gradients of microbatches were added up in bf16, which has 8 bits for what each one adds."""

from parallel3d.engine.quirks import core
from tests.museum.exhibit import Exhibit, Planted, replaced

EXHIBIT = Exhibit(
    __doc__,
    "2022-03-01",
    "deepspeedai/DeepSpeed#1800",
    mesh=(1, 1, 1),
    needs=("bf16", "microbatches"),
    kind="half",
)


def plant() -> Planted:
    """Leave gradients in the parameters' type."""
    return replaced(core, "accumulate_in_fp32", lambda held: None)
