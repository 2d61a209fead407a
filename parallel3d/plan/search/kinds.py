"""Which of a mesh's ZeRO stages and offloads are looked at before which."""

from functools import lru_cache

from parallel3d.plan.search.candidates import Mesh, State, states
from parallel3d.plan.search.plans import Request

Kind = tuple[State, ...]


@lru_cache(maxsize=1024)
def kinds(request: Request, mesh: Mesh) -> tuple[tuple[Kind, Kind], ...]:
    """The states of a mesh, those together that differ by their offload alone.

    Each with those of ZeRO-3 that reduce as often, if it is the highest stage below that: where it
    fits as it is, they are not faster, as they gather no less, and layer by layer.
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
