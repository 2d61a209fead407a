"""Record digests of everything that layers compute for one microbatch, in order."""

from collections import Counter
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor, nn

from parallel3d.tensor.random_key import RandomKey
from parallel3d.train.check_bits import Row, digest, read_digests


class Recorder:
    """Notes digests of what layers compute, in order.

    A place is "kind layer module", such as "output 3 mlp.up", and "#1" where a layer has the second
    one. Recomputed activations are noted again. Tensor-parallel ranks also note their part of each
    sum, before a wrong one reaches them all.
    """

    def __init__(self, key: RandomKey, microbatch: int) -> None:
        self._key = key
        self._microbatch = microbatch
        self._places: list[str] = []
        self._digests: list[Tensor] = []
        self._counts: Counter[str] = Counter()
        """How often the forward of the current layer passed a place."""
        self._near = ""
        """The last place before a sum."""

    def watch(self, number: int, layer: nn.Module, until: ExitStack, shared: set[Any]) -> None:
        """Note the weights, outputs and gradients of a layer and its modules.

        - `until`: removes the hooks when it closes.
        - `shared`: parameters of several layers, whose gradients are sums over them.
        """
        for path, module in layer.named_modules():
            where = f"{number} {path}"
            note_weights = partial(self._note_weights, where)
            note_outputs = partial(self._note_outputs, where)
            until.enter_context(module.register_forward_pre_hook(note_weights))
            until.enter_context(module.register_forward_hook(note_outputs))
            for name, parameter in module.named_parameters(recurse=False):
                if parameter not in shared:
                    note = partial(self._note, f"weight-gradient {where}.{name}")
                    until.enter_context(parameter.register_hook(note))

    def note_part(self, part: Tensor) -> None:
        """Note this rank's part of a sum, for a `SumListener`."""
        self._note(self._numbered(self._near), part)

    def _numbered(self, place: str) -> str:
        self._counts[place] += 1
        count = self._counts[place]
        return place if count == 1 else f"{place}#{count - 1}"

    def _note_weights(self, where: str, module: nn.Module, _: object) -> None:
        self._near = f"partial-sum {where}"
        if where.endswith(" "):  # the layer itself
            self._counts.clear()
        for name, parameter in module.named_parameters(recurse=False):
            self._note(f"weight {where}.{name}", parameter)

    def _note_outputs(self, where: str, _: nn.Module, __: object, output: Any) -> None:
        if self._key.microbatch != self._microbatch:
            return
        tensors = (output,) if isinstance(output, Tensor) else output
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                continue
            place = self._numbered(f"output {where}")
            self._note(place, tensor)
            if tensor.requires_grad:
                gradient_place = place.replace("output", "gradient", 1)
                tensor.register_hook(partial(self._note_gradient, gradient_place))

    def _note_gradient(self, place: str, gradient: Tensor) -> None:
        self._near = f"partial-{place}"
        self._counts[self._near] = 0
        self._note(place, gradient)

    def _note(self, place: str, tensor: Tensor | None) -> None:
        if tensor is not None and self._key.microbatch == self._microbatch:
            self._digests.append(digest(tensor))
            self._places.append(place)

    def read(self) -> list[Row]:
        """Return place, checksum and norm of all values; the host waits for the device."""
        return read_digests(self._places, self._digests)
