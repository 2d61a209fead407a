"""The last microbatch's gradient was added after the reduction over data-parallel ranks, so each
rank had its own in it and no other's.
"""

from typing import Any

from parallel3d.engine.engine import Engine
from parallel3d.engine.reduction import Reduction
from tests.museum.exhibit import Exhibit, Planted, all_of, wrapped

EXHIBIT = Exhibit(
    __doc__,
    "2026-04-27",
    "deepspeedai/DeepSpeed#7985",
    mesh=(1, 4, 1),
    needs=("microbatches", "ZeRO-0"),
)


def plant() -> Planted:
    """Set the last backward pass's share aside while the ranks average."""
    before: dict[str, Any] = {}

    def backward(original: Any, engine: Engine, *args: Any, **stage: int) -> None:
        for held in engine.held:
            grad = held.parameter.grad
            before[held.name] = 0.0 if grad is None else grad.clone()
        original(engine, *args, **stage)

    def average(original: Any, reduction: Reduction, held: Any) -> None:
        held = list(held)
        size = reduction.mesh.replicas.size
        shares = [h.parameter.grad - before[h.name] for h in held]
        for h, share in zip(held, shares, strict=True):
            h.parameter.grad.sub_(share)
        original(reduction, held)
        for h, share in zip(held, shares, strict=True):
            h.parameter.grad.add_(share / size)

    return all_of(
        wrapped(Engine, "backward", backward), wrapped(Reduction, "average_over_replicas", average)
    )
