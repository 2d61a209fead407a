"""Which masks dropout draws, and whether they agree and differ where they must.

No reference has them: masks depend on the mesh. So the generator is looked at as each is drawn.
"""

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from parallel3d.tensor.attention import CausalAttention
from parallel3d.tensor.dropout import Dropout

_Drawn = tuple[str, int]  # place, microbatch


@dataclass
class Masks:
    """What one rank drew in a step: of each place and microbatch the state it was drawn from.

    `split` are the places whose activation is another on each tp rank; `places` all that there are
    on the rank. `redrawn` are those that recomputation drew from another state.
    """

    coords: tuple[int, int]  # dp, tp
    places: list[str]
    split: list[str]
    drawn: dict[_Drawn, str] = field(default_factory=dict)
    redrawn: list[_Drawn] = field(default_factory=list)


@contextmanager
def watched(module: nn.Module, coords: tuple[int, int], split: bool, p: float) -> Iterator[Masks]:
    """Have dropout in `module` drop with probability `p` inside the context, and note its masks.

    `split`: the activations between layers are cut over tp.
    """
    layers = [m for m in module.modules() if isinstance(m, Dropout)]
    inner = {m.dropout.place for m in module.modules() if isinstance(m, CausalAttention)}
    places = [layer.place for layer in layers]
    masks = Masks(coords, places, [place for place in places if split or place in inner])
    seed, before = Dropout.seed, [layer.p for layer in layers]

    def noted(layer: Dropout, device: torch.device) -> None:
        seed(layer, device)
        if layer.active_p > 0:
            key = layer.place, layer.key.microbatch
            state = hashlib.blake2b(torch.get_rng_state().numpy().tobytes()).hexdigest()
            if masks.drawn.setdefault(key, state) != state:
                masks.redrawn.append(key)

    for layer in layers:
        layer.p = p
    try:
        with patch.object(Dropout, "seed", noted):
            yield masks
    finally:
        for layer, old in zip(layers, before, strict=True):
            layer.p = old


def share_of_wrong(ranks: Iterable[Masks], num_microbatches: int) -> float:
    """Share of dropout masks that are not drawn, or not where they must agree or differ.

    A mask is one of its own for each place, microbatch and dp coordinate; for each tp coordinate,
    too, where activations are split. Recomputation draws the same.
    """
    owners: dict[str, set[Any]] = {}
    wrong = total = 0
    states: dict[Any, set[str]] = {}
    for masks in ranks:
        wrong += len(masks.redrawn)
        total += len(masks.places) * num_microbatches
        wrong += len(masks.places) * num_microbatches - len(masks.drawn)
        for (place, microbatch), state in masks.drawn.items():
            dp, tp = masks.coords
            owner = place, microbatch, dp, tp if place in masks.split else 0
            owners.setdefault(state, set()).add(owner)
            states.setdefault(owner, set()).add(state)
    wrong += sum(len(by) - 1 for by in owners.values())
    wrong += sum(len(of) - 1 for of in states.values())
    return wrong / max(1, total)
