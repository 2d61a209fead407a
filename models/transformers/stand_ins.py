"""Modules that stand in the places of a model's own, so that a part of it can be called alone."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


class Same(nn.Module):
    """Returns its input, in place of a module whose result is not used."""

    def forward(self, x: Tensor, *_: object, **__: object) -> Tensor:
        """Return x."""
        return x


class Nothing(nn.Module):
    """Returns a zero, in place of a table whose vectors are not used."""

    def forward(self, *_: object, **__: object) -> Tensor:
        """Return a zero that can be added to anything."""
        return torch.zeros(1)


class Given(nn.Module):
    """Returns a tensor whatever comes, in place of the output projection."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = value
        self.weight = value  # some models ask for its dtype

    def forward(self, *_: object, **__: object) -> Tensor:
        """Return the tensor."""
        return self.value


class Heard(nn.Module):
    """Notes the shape of its input."""

    shape: torch.Size | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return x."""
        self.shape = x.shape
        return x


class Arguments(nn.Module):
    """Notes its arguments, in place of a layer, and returns its input."""

    values: object = None

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Return x."""
        self.values = args, kwargs
        return x


class Remembered(nn.Module):
    """Returns what a module without weights gave for the same positions: rotary angles.

    All layers of a microbatch ask for them. A module whose result depends on its first input beside
    the type, which the first call finds out by trying, is called each time.

    - `like`: the module; it is called with a tensor of the type to return, and with positions.
    """

    def __init__(self, like: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "like", like)
        self.is_plain: bool | None = None
        self._results: list[tuple[list[Any], Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "like"), name)

    def forget(self) -> None:
        """Compute what is asked for next."""
        self._results.clear()

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the module's result."""
        like: Any = self.like
        if self.is_plain is None and not x.is_meta:  # nothing on the meta device can be compared
            both = [tree_leaves(like(y, *args, **kwargs)) for y in (x, torch.ones_like(x))]
            self.is_plain = all(map(torch.equal, *both))
        if self.is_plain is False:
            return like(x, *args, **kwargs)
        asked = [x.dtype, x.device, *tree_leaves((args, kwargs))]
        for known, result in self._results:
            if len(known) == len(asked) and all(map(_is_same, known, asked)):
                return result
        with torch.inference_mode(False), torch.no_grad():
            result = like(x, *args, **kwargs)
        self._results = [*self._results[-_KINDS:], (asked, result)]
        return result


_KINDS = 3  # results that are kept beside the last one: those of other kinds of layers


def _is_same(one: object, other: object) -> bool:
    """Return True for one tensor, or equal values."""
    return one is other if isinstance(one, Tensor) else one == other


class Port(nn.Module):
    """Stands in the place of a layer: it passes on what comes, or opens the model at this place.

    - `like`: the layer, whose other attributes the model may read.
    - `values`: how many the tuple has that the layer returns; None: it returns a tensor.
    - `layer`: the module to run here; None: nothing does.
    """

    def __init__(
        self, like: nn.Module, values: int | None = None, layer: nn.Module | None = None
    ) -> None:
        super().__init__()
        # Not as modules, whose parameters they would count as.
        object.__setattr__(self, "like", like)
        object.__setattr__(self, "layer", layer)
        self.values = values
        self.is_open = False
        self.given: Tensor | None = None
        self.heard: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "like"), name)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return `hidden_states`; if open, keep what the layer makes of what is `given`."""
        x = hidden_states
        if self.is_open:
            x = x if self.given is None else self.given
            y = x if self.layer is None else self.layer(x, *args, **kwargs)
            x = y[0] if isinstance(y, tuple) else y
            self.heard = x
            if self.layer is not None:  # nothing reads on; a model may view whole sequences
                x = hidden_states
        return x if self.values is None else (x, *[None] * (self.values - 1))
