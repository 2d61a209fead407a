"""After a refactoring the weights of norms, and biases, were no longer excluded from weight
decay.
"""

from typing import Any

from parallel3d.engine.quirks import core
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(
    __doc__,
    "2026-06-17",
    "ServiceNow/Fast-LLM#542",
    mesh=(1, 1, 1),
    needs=("weight decay",),
    kind="shared",
)


@in_place_of(core, "param_groups")
def plant(original: Any, held: Any, placeholders: Any, weight_decay: float, *args: Any) -> Any:
    """The group without decay decays."""
    groups = original(held, placeholders, weight_decay, *args)
    return [group | {"weight_decay": weight_decay} for group in groups]
