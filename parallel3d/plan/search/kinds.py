"""The order in which the search looks at a mesh's ZeRO stages and offloads."""

from functools import lru_cache

from parallel3d.plan.search.candidates import MeshSizes, ZeroState, states
from parallel3d.plan.search.plans import Request

Kind = tuple[ZeroState, ...]


@lru_cache(maxsize=1024)
def kinds(request: Request, mesh: MeshSizes) -> tuple[tuple[Kind, Kind], ...]:
    """The states of a mesh in groups whose members differ in their offload alone.

    Each group comes with the ZeRO-3 states that reduce gradients as often, if it has the highest
    stage below 3: where the group fits, ZeRO-3 is not faster, as it gathers no less, and layer by
    layer.
    """
    found: dict[tuple[int, bool], Kind] = {}
    for state in states(request, mesh):
        zero_once = state.zero_stage, state.reduces_once
        found[zero_once] = (*found.get(zero_once, ()), state)
    below = {once: zero for zero, once in sorted(found) if zero < 3}
    return tuple(
        (kind, found.get((3, once), ()) if below.get(once) == zero else ())
        for (zero, once), kind in found.items()
        if zero < 3 or once not in below
    )
