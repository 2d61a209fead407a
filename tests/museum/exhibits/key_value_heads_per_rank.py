"""Shared key/value heads have each rank's own gradient."""

from dataclasses import replace
from typing import Any

from parallel3d.engine.reduction import Reduction
from tests.museum.exhibit import Exhibit, Planted, wrapped

EXHIBIT = Exhibit(
    date="2023-03-21",
    source="bigcode-project/Megatron-LM#37",
    what=(
        "With fewer key/value heads than ranks, each rank trained its copy by the gradient of "
        "its own queries."
    ),
    mesh=(1, 1, 4),
    needs=("fewer key/value heads than tp",),
)


def plant() -> Planted:
    """Gradients of shared key/value heads are not summed over tp."""

    def sum_some(original: Any, reduction: Reduction, held: Any) -> None:
        original(
            reduction,
            [
                replace(h, partial=False) if "qkv.k_" in h.name or "qkv.v_" in h.name else h
                for h in held
            ],
        )

    return wrapped(Reduction, "_sum", sum_some)
