"""First weights as an architecture of transformers draws them, read from its own code.

The model is built once more while every write to a tensor is recorded. Large tensors have no memory
then. Small ones have, because some values are computed from others (decay rates of recurrent
layers).
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.initialization import TORCH_INIT_FUNCTIONS

from parallel3d.base.errors import ConfigError
from parallel3d.model.spec import Init

SMALL = 2**18
"""The most elements of a tensor that has memory here."""
LONGEST = 2**16
"""The most values that are listed for a parameter."""
_NOBODY = "nobody initialises it"
_aten = torch.ops.aten


def recorded(model: PreTrainedModel) -> dict[str, Init]:
    """Return each parameter's first values by name, as the architecture's own code draws them.

    Tied parameters are in it under all their names. Random numbers that are computed further before
    they are written (decay rates of recurrent layers) come as `values`, the same for every seed.

    - `model`: on any device; only its class and config are used, and it is not changed.

    Raises `ConfigError` for parameters that nobody initialises or whose values cannot be said, with
    the name and the reason of each.
    """
    config = copy.deepcopy(model.config)
    recorder = _Recorder()
    with torch.device("cpu"), torch.random.fork_rng(devices=[]), _visible(recorder), recorder:
        torch.manual_seed(0)
        built = type(model)._from_config(config, dtype=torch.float32)
    inits = {}
    problems = []
    for name, parameter in built.named_parameters(remove_duplicate=False):
        outcome = recorder.outcome(parameter)
        if isinstance(outcome, Init):
            inits[name] = outcome
        else:
            problems.append(f"{name}: {outcome}")
    if problems:
        raise ConfigError(
            f"{type(model).__name__}: the first values of these parameters are not known\n  "
            + "\n  ".join(problems)
        )
    return inits


class _Recorder(TorchDispatchMode):
    """Records the values of tensors: an `Init` for each, or the reason why it has none.

    Tensors with memory that are not in the record have values that were computed.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._outcomes: dict[int, Init | str] = {}

    def outcome(self, tensor: Tensor) -> Init | str:
        """Return a tensor's values, or why they are not known."""
        outcome = self._outcomes.get(_storage(tensor))
        if outcome is None:
            return _listed(tensor)
        if isinstance(outcome, Init) and outcome.zero_row is not None and tensor.dim() != 2:
            return "only a part of it is written at once"
        return outcome

    def write(self, tensor: Tensor, written: Init | str | None) -> None:
        """Record what was written to a tensor or to a row of it; None for computed values."""
        storage = _storage(tensor)
        before = self._outcomes.get(storage)
        if tensor.numel() == _numel(tensor):
            self._record(tensor, written)
        elif isinstance(before, Init) and written == Init() and _is_row(tensor):
            row = tensor.storage_offset() // tensor.numel()
            self._outcomes[storage] = replace(before, zero_row=row)
        elif tensor.is_meta or before == _NOBODY:
            self._outcomes[storage] = "only a part of it is written at once"
        else:
            self._record(tensor, None)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator, and record the values of the tensors that it makes or writes."""
        kwargs = dict(kwargs or {})
        operator = func.overloadpacket
        if operator in _FACTORIES and prod(args[0]) > SMALL:
            kwargs["device"] = torch.device("meta")
        result = func(*args, **kwargs)
        if func._schema.is_mutable:
            for tensor in _written(func, args, kwargs):
                self.write(tensor, self._values(operator, args))
        elif isinstance(result, Tensor) and not _is_view(result, args):
            self._record(result, self._values(operator, args))
        return result

    def _values(self, operator: Any, args: Sequence[Any]) -> Init | str | None:
        """Return the values that an operator makes; None if they are computed."""
        if operator in _DRAWS:
            return _DRAWS[operator](*args[1:])
        if operator in _LIKE:
            return self._outcomes.get(_storage(args[0]))
        if operator is _aten.copy_:
            return self._copied(args[0], args[1])
        if operator in _PRODUCTS:
            known = self._outcomes.get(_storage(args[0])) if isinstance(args[0], Tensor) else None
            factor = _number(args[1])
            if isinstance(known, Init) and factor:
                return _scaled(known, _PRODUCTS[operator](factor))
        return None

    def _copied(self, tensor: Tensor, source: Tensor) -> Init | str | None:
        """Return the values that `tensor` has after it became a copy of `source`."""
        outcome = self._outcomes.get(_storage(source))
        if outcome is not None and source.numel() == _numel(source) == tensor.numel():
            return outcome
        if tensor.is_meta or tensor.numel() < _numel(tensor):
            return _listed(source.expand(tensor.shape))
        return None

    def _record(self, tensor: Tensor, values: Init | str | None) -> None:
        if values is None and tensor.is_meta:
            values = f"it is computed from a tensor of more than {SMALL:,} elements"
        if values is None:
            self._outcomes.pop(_storage(tensor), None)
        else:
            self._outcomes[_storage(tensor)] = values


def _storage(tensor: Tensor) -> int:
    """Return the identity of the memory that a tensor shares with its views."""
    return int(tensor.untyped_storage()._cdata)


def _numel(tensor: Tensor) -> int:
    """Return the number of elements of the tensor of which this one is a view."""
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def _is_row(tensor: Tensor) -> bool:
    """Return True if a view is a row of a matrix (or looks like one)."""
    return (
        tensor.dim() == 1
        and tensor.is_contiguous()
        and tensor.storage_offset() % max(1, tensor.numel()) == 0
    )


def _is_view(result: Tensor, args: Sequence[Any]) -> bool:
    storages = [_storage(arg) for arg in args if isinstance(arg, Tensor)]
    return _storage(result) in storages


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that an operator writes to."""
    for place, argument in enumerate(func._schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written and isinstance(value, Tensor):
            yield value


def _listed(source: Tensor) -> Init | str:
    """Return a tensor's values: those of its last dims where they repeat along the first."""
    if source.is_meta:
        return f"it is computed from a tensor of more than {SMALL:,} elements"
    while source.dim() > 0 and (source.stride(0) == 0 or bool((source == source[:1]).all())):
        source = source[0]
    if source.numel() > LONGEST:
        return f"it is a table of {source.numel():,} values; at most {LONGEST:,} are listed"
    values = source.detach().float().flatten().tolist()
    return Init(value=values[0]) if len(values) == 1 else Init(values=tuple(values))


def _normal(mean: float = 0.0, std: float = 1.0) -> Init:
    return Init(std=std, value=mean)


def _uniform(low: float = 0.0, high: float = 1.0) -> Init:
    return Init(bounds=(low, high))


def _filled(value: object) -> Init | None:
    number = _number(value)
    return None if number is None else Init(value=number)


def _zeros() -> Init:
    return Init()


def _same(factor: float) -> float:
    return factor


def _inverse(factor: float) -> float:
    return 1 / factor


def _factory_of(values: Init | str) -> Callable[..., Init | str]:
    def made(*_: object) -> Init | str:
        return values

    return made


_FACTORIES: dict[Any, Callable[..., Init | str | None]] = {
    _aten.empty: _factory_of(_NOBODY),
    _aten.zeros: _factory_of(Init()),
    _aten.ones: _factory_of(Init(value=1.0)),
    _aten.full: _filled,
    _aten.rand: _factory_of(Init(bounds=(0.0, 1.0))),
    _aten.randn: _factory_of(Init(std=1.0)),
}
"""Operators that make a tensor of the size that is their first argument."""
_DRAWS: dict[Any, Callable[..., Init | str | None]] = _FACTORIES | {
    _aten.empty_like: _factory_of(_NOBODY),
    _aten.zeros_like: _factory_of(Init()),
    _aten.ones_like: _factory_of(Init(value=1.0)),
    _aten.full_like: _filled,
    _aten.normal_: _normal,
    _aten.uniform_: _uniform,
    _aten.fill_: _filled,
    _aten.zero_: _zeros,
}
"""By operator, a function from its arguments after the first to the values of its tensor."""
_LIKE = (_aten.clone, _aten._to_copy)
_PRODUCTS = {_aten.mul: _same, _aten.mul_: _same, _aten.div: _inverse, _aten.div_: _inverse}


def _number(value: object) -> float | None:
    """Return a number, also that of a tensor without dims; None for any other tensor."""
    if isinstance(value, Tensor):
        return None if value.is_meta or value.dim() > 0 else float(value)
    return float(value)  # type: ignore[arg-type]


def _scaled(init: Init, factor: float) -> Init:
    bounds = init.bounds
    if bounds is not None:
        low, high = sorted(bound * factor for bound in bounds)
        bounds = (low, high)
    return replace(
        init,
        std=init.std * abs(factor),
        value=init.value * factor,
        bounds=bounds,
        values=tuple(value * factor for value in init.values),
    )


@contextmanager
def _visible(recorder: _Recorder) -> Iterator[None]:
    """Make the recorder see draws that torch leaves out without memory, or makes of several."""

    def trunc_normal(
        tensor: Tensor,
        mean: float = 0.0,
        std: float = 1.0,
        a: float = -2.0,
        b: float = 2.0,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        original(tensor, mean=mean, std=std, a=a, b=b, generator=generator)
        recorder.write(tensor, Init(std=std, value=mean, bounds=(a, b)))
        return tensor

    def orthogonal(tensor: Tensor, *_: object, **__: object) -> Tensor:
        recorder.write(tensor, "it is an orthogonal matrix, which no rank can draw by parts")
        return tensor

    original = TORCH_INIT_FUNCTIONS["trunc_normal_"]
    own = {"trunc_normal_": trunc_normal, "orthogonal_": orthogonal}
    with patch.dict(TORCH_INIT_FUNCTIONS, own):
        yield
