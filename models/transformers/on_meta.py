"""Models without memory: where their tensors are made, and what runs on them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from parallel3d.models.transformers.facts import Unsupported

_SIZES_OF_EXPERTS = 3


class EmptyOnMeta(TorchFunctionMode):
    """`torch.empty` takes no memory inside: modules make their weights by it, buffers by values.

    Nor does `torch.zeros` of three sizes: packed experts are made by it.
    """

    def __torch_function__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        kwargs = kwargs or {}
        if func is torch.empty or (func is torch.zeros and len(args) == _SIZES_OF_EXPERTS):
            kwargs = kwargs | {"device": "meta"}
        return func(*args, **kwargs)


class MixedWithMeta(TorchDispatchMode):
    """Operators of tensors on the meta device and others give tensors on the meta device.

    Zeros of integers have values outside of layers: masks may begin with them.

    - `noises`: the fields of the config that ask for dropout or jitter.
    - `counts`: an operator has counted positions while `is_in_layer`.
    """

    def __init__(self, noises: Sequence[str] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.noises = noises
        self.is_in_layer = False
        self.counts = False

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        seen: list[bool] = []

        def look(value: object) -> None:
            if isinstance(value, Tensor):
                seen.append(value.is_meta)

        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            text = f"draws random numbers ({func.__name__}), which would depend on the mesh"
            if not self.noises:
                raise Unsupported(text)
            names = ", ".join(self.noises)
            raise Unsupported(text, self.noises[0], f"set {names} to 0, or use another model")
        if func.overloadpacket is torch.ops.aten.arange and self.is_in_layer:
            self.counts = True
        is_count = func is torch.ops.aten.zeros.default and kwargs.get("dtype") == torch.int64
        if is_count and not self.is_in_layer:
            kwargs = kwargs | {"device": torch.device("cpu")}
        tree_map(look, (args, kwargs))
        if any(seen) and not all(seen):
            args, kwargs = tree_map(_on_meta, (args, kwargs))
        return func(*args, **kwargs)


@contextmanager
def tables_kept(model: nn.Module) -> Iterator[None]:
    """Give modules back the tables that they replace meanwhile by others on the meta device."""
    before = [(module, dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    try:
        yield
    finally:
        for module, own, buffers in before:
            module._buffers.update(buffers)
            for name, value in list(vars(module).items()):
                if isinstance(value, Tensor) and value.is_meta:
                    delattr(module, name)
                    vars(module).update({name: own[name]} if name in own else {})


def _on_meta(value: object) -> object:
    return value.to("meta") if isinstance(value, Tensor) else value
