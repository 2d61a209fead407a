"""The dropout masks that ranks draw, which must differ and be equal where the mesh says so."""

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

import torch
from torch import nn

from parallel3d.tensor.attention import CausalAttention
from parallel3d.tensor.dropout import Dropout


@dataclass
class Masks:
    """The dropout masks that one rank drew in its steps."""

    coords: tuple[int, int]
    """dp, tp"""
    places: list[str]
    """Dropout layers on this rank."""
    split: list[str]
    """Places whose activation differs between tp ranks."""
    drawn: dict[tuple[str, int, int], str] = field(default_factory=dict)
    """(place, step, microbatch) -> state of the generator"""
    redrawn: list[tuple[str, int, int]] = field(default_factory=list)
    """Places, steps and microbatches that were drawn again from another state."""


@contextmanager
def watched(module: nn.Module, coords: tuple[int, int], split: bool, p: float) -> Iterator[Masks]:
    """Set dropout in `module` to probability `p` inside the context and record its masks.

    `coords` are the dp and tp coordinates; `split`: activations between layers are cut over tp.
    """
    layers = [m for m in module.modules() if isinstance(m, Dropout)]
    inner = {m.dropout.place for m in module.modules() if isinstance(m, CausalAttention)}
    places = [layer.place for layer in layers]
    masks = Masks(coords, places, [place for place in places if split or place in inner])
    seed = Dropout.seed

    def seed_and_record(layer: Dropout, device: torch.device) -> None:
        seed(layer, device)
        if layer.active_p > 0:
            key = layer.place, layer.key.step, layer.key.microbatch
            state = hashlib.blake2b(torch.get_rng_state().numpy().tobytes()).hexdigest()
            if masks.drawn.setdefault(key, state) != state:
                masks.redrawn.append(key)

    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(patch.object(layer, "p", p))
        stack.enter_context(patch.object(Dropout, "seed", seed_and_record))
        yield masks


def share_of_wrong(ranks: Iterable[Masks], num_microbatches: int) -> float:
    """Return the share of masks that are missing, or equal where they must differ, or the reverse.

    Each place, step, microbatch and dp coordinate has its own mask, and so has each tp coordinate
    where activations are split. Recomputation must draw the same mask again.
    """
    pairs = set[tuple[tuple[object, ...], str]]()  # owners and states
    wrong = 0
    total = 0
    for masks in ranks:
        wrong += len(masks.redrawn)
        total += len(masks.places) * num_microbatches
        wrong += len(masks.places) * num_microbatches - len(masks.drawn)
        for (place, step, microbatch), state in masks.drawn.items():
            dp, tp = masks.coords
            if place not in masks.split:
                tp = 0
            pairs.add(((place, step, microbatch, dp, tp), state))
    # Each owner has one state, and each state one owner.
    wrong += len(pairs) - len({owner for owner, _ in pairs})
    wrong += len(pairs) - len({state for _, state in pairs})
    return wrong / max(1, total)
