"""Record digests of what the layers of a stage compute."""

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel3d.tensor.collectives import hearing
from parallel3d.tensor.dropout import RandomKey

Row = tuple[str, int, float]
"""A place, the checksum of its value, and the value's norm."""


def digest(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bits, which a flipped bit changes, and those of its norm.

    They are int64 [2], and stay on the device until `read_digests`.
    """
    flat = tensor.detach().reshape(-1)
    flat = flat if flat.is_floating_point() else flat.float()
    bits = flat.view(torch.int16 if flat.element_size() == 2 else torch.int32)
    norm = torch.linalg.vector_norm(flat, dtype=torch.float64)
    return torch.stack([bits.sum(dtype=torch.int64), norm.view(torch.int64)])


def read_digests(places: Sequence[str], digests: Sequence[Tensor]) -> list[Row]:
    """Return the digests as numbers; the host waits for the device."""
    rows = (torch.stack([*digests]) if digests else torch.zeros(0, 2, dtype=torch.int64)).cpu()
    norms = rows[:, 1].contiguous().view(torch.float64)
    return list(zip(places, rows[:, 0].tolist(), norms.tolist(), strict=True))


class Recorder:
    """Notes digests of what layers compute, in order.

    A place is "kind layer module", such as "output 3 mlp.up", and "#1" where a layer has the second
    one. Recomputed activations are noted again. Tensor-parallel ranks also note their part of each
    sum, before a wrong one reaches them all.
    """

    def __init__(self, key: RandomKey, microbatch: int, group: dist.ProcessGroup) -> None:
        self._key, self._microbatch, self._group = key, microbatch, group
        self._places: list[str] = []
        self._digests: list[Tensor] = []
        self._counts: Counter[str] = Counter()  # in the forward of a layer
        self._near = ""  # the last place before a sum

    def listen(self, until: ExitStack) -> None:
        """Note this rank's parts of sums."""
        until.enter_context(hearing(self._note_part))

    def watch(self, number: int, layer: nn.Module, until: ExitStack, shared: set[Any]) -> None:
        """Note the weights, outputs and gradients of a layer and its modules.

        `shared`: parameters of several layers, whose gradients are sums over them.
        """
        for path, module in layer.named_modules():
            where = f"{number} {path}"
            for hook in (
                module.register_forward_pre_hook(partial(self._note_weights, where)),
                module.register_forward_hook(partial(self._note_outputs, where)),
                *(
                    parameter.register_hook(partial(self._note, f"weight-gradient {where}.{name}"))
                    for name, parameter in module.named_parameters(recurse=False)
                    if parameter not in shared
                ),
            ):
                until.enter_context(hook)

    def _note_part(self, part: Tensor, group: dist.ProcessGroup) -> None:
        if group is self._group:
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
        if self._key.microbatch == self._microbatch:
            for tensor in (output,) if isinstance(output, Tensor) else output:
                if isinstance(tensor, Tensor):
                    place = self._numbered(f"output {where}")
                    self._note(place, tensor)
                    if tensor.requires_grad:
                        place = place.replace("output", "gradient", 1)
                        tensor.register_hook(partial(self._note_gradient, place))

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
