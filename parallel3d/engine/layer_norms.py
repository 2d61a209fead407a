"""Norms of each layer's gradient, weights and update, of this rank's parts and on the device."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from parallel3d.engine.engine import Engine
from parallel3d.engine.optimizer_states import Place, masters_in, masters_of, places_of

SAMPLE = 1024
"""About as many elements of a parameter's piece are measured: each third, fifth, ... element of a
larger one, an odd step so that all rows and columns of a matrix take part."""


class _Samples(NamedTuple):
    """The sampled pieces of a flat master: where they are, how many, each one's layer and step."""

    slices: list[slice]
    lengths: list[int]
    layers: Tensor
    strides: Tensor

    def of(self, master: Tensor) -> Tensor:
        """Return the sampled elements of all pieces, one after another."""
        return torch.cat([master.detach()[piece] for piece in self.slices])

    def squares(self, sample: Tensor) -> Tensor:
        """Return the sum of squares of each piece, estimated from its sample."""
        norms = torch._foreach_norm(sample.split(self.lengths))
        return torch.stack(norms).square_().mul_(self.strides)


class LayerNorms:
    """Measures layers by the parts of their parameters that this rank counts; no rank waits.

    The sums of squares over all ranks are those of the whole parameters: copies count once. Biases
    of experts' scores are left out, because they have no gradient.

    - `layers`: the names of the model's layers, which begin their parameters' names.
    """

    def __init__(self, engine: Engine, layers: Sequence[str]) -> None:
        self._engine = engine
        self._num_layers = len(layers)
        self._device = engine.mesh.device
        zero = engine.deepspeed.optimizer
        self._optimizer = zero.optimizer
        masters = masters_of(zero)
        self._layer_of: dict[str, int] = {}
        by_master = defaultdict[Tensor, list[Place]](list)
        for place in places_of(zero, engine.held):
            held = place.piece.held
            equal = engine.mesh.copies if engine.settings.zero.stage else held.replicas
            if held.counts and equal.coord == 0 and held.spec.role != "balance":
                name = held.name
                layer = next(n for n, x in enumerate(layers) if name.startswith(f"{x}."))
                self._layer_of[name] = layer
                by_master[masters[place.group]].append(place)
        self._samples = {master: self._sampled(master, own) for master, own in by_master.items()}
        self._weights: dict[Tensor, Tensor] = {}
        """The samples of each master after the last step."""
        self._layers = torch.tensor([*self._layer_of.values()], device=self._device)

    def forget(self) -> None:
        """Take new samples before the next step, because a checkpoint was loaded."""
        self._weights.clear()

    def _sampled(self, master: Tensor, places: Sequence[Place]) -> _Samples:
        strides = [place.piece.numel // SAMPLE | 1 for place in places]
        slices = []
        for place, stride in zip(places, strides, strict=True):
            slices.append(slice(place.offset, place.offset + place.piece.numel, stride))
        lengths = [len(range(piece.start, piece.stop, piece.step)) for piece in slices]
        layers = [self._layer_of[place.piece.held.name] for place in places]
        return _Samples(
            slices,
            lengths,
            torch.tensor(layers, device=self._device),
            torch.tensor(strides, device=master.device),
        )

    def gradient_squares(self) -> Tensor:
        """Return the squared norm of each layer's averaged gradient, [layers], before the update.

        It is that before clipping, of the parts that this rank counts.
        """
        squares = torch.zeros(self._num_layers, device=self._device)
        if not self._layer_of:
            return squares
        norms = self._engine.states.gradient_norms()
        own = self._here(torch.stack([norms[name] for name in self._layer_of]))
        return squares.index_add_(0, self._layers, own.float().div_(self._engine.loss_scale) ** 2)

    def _here(self, values: Tensor) -> Tensor:
        """Return numbers on the mesh's device, if they are of offloaded states."""
        return values if values.device == self._device else values.to(self._device)

    @contextmanager
    def updates(self) -> Iterator[Tensor]:
        """Yield [2, layers]: after a step inside, the squares of each layer's update and weights.

        They are estimated from samples of the masters before and after it; 0 if it was skipped.
        """
        squares = torch.zeros(2, self._num_layers, device=self._device)

        def begin(optimizer: torch.optim.Optimizer, *_: object) -> None:
            for master in masters_in(optimizer):
                if master in self._samples and master not in self._weights:
                    self._weights[master] = self._samples[master].of(master)

        def end(optimizer: torch.optim.Optimizer, *_: object) -> None:
            for master in masters_in(optimizer):
                samples = self._samples.get(master)
                if samples is None:
                    continue
                before = self._weights[master]
                after = samples.of(master)
                self._weights[master] = after  # those before the next step
                for row, sample in enumerate((after - before, before)):
                    own = self._here(samples.squares(sample))
                    squares[row].index_add_(0, samples.layers, own)

        with (
            self._optimizer.register_step_pre_hook(begin),
            self._optimizer.register_step_post_hook(end),
        ):
            yield squares
