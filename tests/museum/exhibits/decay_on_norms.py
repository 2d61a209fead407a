"""Weight decay shrinks norms and biases."""

from typing import Any

from parallel3d.engine.quirks import core
from tests.museum.exhibit import Exhibit, Planted, wrapped

EXHIBIT = Exhibit(
    date="2026-06-17",
    source="ServiceNow/Fast-LLM#542",
    what=(
        "After a refactoring the weights of norms, and biases, were no longer excluded from "
        "weight decay."
    ),
    mesh=(1, 1, 1),
    needs=("weight decay",),
)


def plant() -> Planted:
    """The group without decay decays."""

    def groups(original: Any, held: Any, ballast: Any, weight_decay: float, *args: Any) -> Any:
        found = original(held, ballast, weight_decay, *args)
        return [group | {"weight_decay": weight_decay} for group in found]

    return wrapped(core, "param_groups", groups)
