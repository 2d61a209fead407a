"""The tensor that did not fit into a full bucket was not averaged in any."""

from typing import Any

from parallel3d.engine.reduction import Reduction, _grad
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(__doc__, mesh=(1, 4, 1), needs=("ZeRO-0",), kind="size")


@in_place_of(Reduction, "average_over_replicas")
def plant(original: Any, reduction: Reduction, held: Any) -> None:
    """Start a new bucket without the tensor that closed the one before."""
    bucket: list[Any] = []
    for h in held:
        grad = _grad(h).div_(reduction.mesh.replicas.size)
        if bucket and sum(g.numel() for g in bucket) + grad.numel() > reduction._bucket:
            reduction._average(bucket, reduction.mesh.replicas.group)
            bucket = []
        else:
            bucket.append(grad)
    if bucket:
        reduction._average(bucket, reduction.mesh.replicas.group)
