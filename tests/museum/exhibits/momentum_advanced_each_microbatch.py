"""Muon's momentum advanced once for each microbatch instead of once a step."""

from typing import Any

from parallel3d.engine.muon import Muon
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(
    __doc__, "2026-09-06", "deepspeedai/DeepSpeed#8443", mesh=(1, 1, 1), needs=("Muon",)
)


@in_place_of(Muon, "_update")
def plant(original: Any, muon: Muon, master: Any, gradient: Any, group: Any) -> None:
    """One more time than it should."""
    if muon.state[master]:
        buffer = muon.state[master]["momentum_buffer"]
        momentum = muon.params.momentum
        buffer.lerp_(gradient, 1 - momentum)
    original(muon, master, gradient, group)
