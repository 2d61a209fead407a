"""First weights as an architecture of transformers draws them, read from its own code.

`_init_weights` of each module runs on parameters without memory, and every write to one is
recorded. Small parameters have memory, because some values are computed from others (decay rates of
recurrent layers).
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.initialization import TORCH_INIT_FUNCTIONS

from parallel3d.base.errors import ConfigError
from parallel3d.model.spec import Init

SMALL = 2**18
"""The most elements of a parameter that has memory here."""
LONGEST = 2**16
"""The most values that are listed for a parameter."""
_aten = torch.ops.aten


def recorded(model: PreTrainedModel) -> dict[str, Init]:
    """Return each parameter's first values by name, as the architecture's own code draws them.

    Tied parameters are in it under all their names, with the values of the one whose weight the
    model keeps. Random numbers that are computed further before they are written (the decay rates
    of some recurrent layers) come as `values`, the same for every seed of a run.

    - `model`: on the meta device; it is not changed.

    Raises `ConfigError` for parameters that nobody initialises or whose values cannot be said, with
    the name and the reason of each.
    """
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    stand_in = copy.deepcopy(model)
    recorder = _Recorder(_untie(stand_in))
    with torch.device("cpu"), torch.random.fork_rng(devices=[]), _visible(recorder), recorder:
        torch.manual_seed(0)
        _initialise(stand_in)
    result = {}
    problems = []
    for name in names:
        original = _original(name, model.all_tied_weights_keys)
        outcome = recorder.outcome(stand_in.get_parameter(original))
        if isinstance(outcome, Init):
            result[name] = outcome
        else:
            problems.append(f"{name}: {outcome}")
    if problems:
        raise ConfigError(
            f"{type(model).__name__}: the first values of these parameters are not known; start "
            "from pretrained weights, or use another architecture\n  " + "\n  ".join(problems)
        )
    return result


def _untie(model: nn.Module) -> list[nn.Parameter]:
    """Give each module parameters of its own, and return them: large ones without memory.

    A model is initialised before its parameters are tied, so each of a pair is written.
    """
    made = []
    for module in model.modules():
        module.__dict__.pop("_is_hf_initialized", None)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                device = "cpu" if parameter.numel() <= SMALL else "meta"
                empty = torch.empty(parameter.shape, dtype=torch.float32, device=device)
                own = nn.Parameter(empty, parameter.requires_grad)
                module._parameters[name] = own
                made.append(own)
    return made


def _initialise(model: PreTrainedModel) -> None:
    """Write first values as `from_config` does: torch's own in constructors, then the model's."""
    with torch.no_grad():
        for module in model.modules():
            of_torch = type(module).__module__.startswith("torch.nn.")
            if of_torch and hasattr(module, "reset_parameters"):
                module.reset_parameters()
    model.initialize_weights()


def _original(name: str, tied: Mapping[str, str]) -> str:
    """Return the name of the parameter whose value a parameter has after tying."""
    while name in tied:
        name = tied[name]
    return name


class _Recorder(TorchDispatchMode):
    """Records what is written to parameters: an `Init` for each, or the reason why it has none."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._parameters = {_storage(parameter): parameter for parameter in parameters}
        self._outcomes: dict[int, Init | str] = {}
        self._products: dict[int, _Product] = {}

    def outcome(self, parameter: nn.Parameter) -> Init | str:
        """Return a parameter's first values, or why they are not known."""
        return self._outcomes.get(_storage(parameter), "nobody initialises it")

    def write(self, tensor: Tensor, written: Init | str) -> None:
        """Record what was written to a parameter, or to a row of it; ignore other tensors."""
        storage = _storage(tensor)
        parameter = self._parameters.get(storage)
        if parameter is None:
            return
        before = self.outcome(parameter)
        if tensor.numel() == parameter.numel():
            self._outcomes[storage] = written
        elif isinstance(before, Init) and written == Init() and _is_row(tensor, parameter):
            row = tensor.storage_offset() // parameter.stride(0)
            self._outcomes[storage] = replace(before, zero_row=row)
        else:
            self._outcomes[storage] = "only a part of it is written at once"

    def copy(self, tensor: Tensor, source: Tensor) -> None:
        """Record that a tensor was copied into a parameter, or into a row of it."""
        product = self._products.get(_storage(source))
        if product is not None and product.storage == _storage(tensor):
            self.write(tensor, product.init)
        elif _storage(tensor) in self._parameters:
            self.write(tensor, _listed(source.expand(tensor.shape)))

    def scale(self, result: Tensor, tensor: Tensor, factor: float | None) -> None:
        """Record that `result` is a parameter times a number; it may be the parameter itself."""
        storage = _storage(tensor)
        before = self._outcomes.get(storage)
        if isinstance(before, Init) and factor is not None:
            scaled = _scaled(before, factor)
            if _storage(result) == storage:
                self.write(result, scaled)
            elif storage in self._parameters:
                self._products[_storage(result)] = _Product(storage, scaled, result)
        elif _storage(result) == storage:
            self.write(result, "it is multiplied by a tensor")

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator, and record it if it writes to a tensor."""
        kwargs = kwargs or {}
        packet = func.overloadpacket
        result = func(*args, **kwargs)
        if packet in _WRITES:
            self.write(args[0], _WRITES[packet](*args[1:]))
        elif packet is _aten.copy_:
            self.copy(args[0], args[1])
        elif packet in (_aten.mul, _aten.mul_):
            self.scale(result, args[0], _number(args[1]))
        elif packet in (_aten.div, _aten.div_):
            divisor = _number(args[1])
            self.scale(result, args[0], None if divisor is None else 1 / divisor)
        elif func._schema.is_mutable:
            for tensor in _written(func, args, kwargs):
                self.write(tensor, f"it is written by {func}")
        return result


class _Product(NamedTuple):
    """A parameter times a number: it may be copied back into the parameter."""

    storage: int
    """The storage of the parameter."""
    init: Init
    tensor: Tensor
    """Kept, because another tensor could take its place in memory."""


def _storage(tensor: Tensor) -> int:
    """Return what a tensor shares with its views."""
    return int(tensor.untyped_storage()._cdata)


def _is_row(tensor: Tensor, parameter: nn.Parameter) -> bool:
    """Return True if a view is one index of the first dim of a matrix."""
    return parameter.dim() == 2 and tensor.shape == parameter.shape[1:]


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that an operator writes to."""
    for place, argument in enumerate(func._schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written and isinstance(value, Tensor):
            yield value


def _normal(mean: float = 0.0, std: float = 1.0) -> Init:
    return Init(std=std, value=mean)


def _uniform(low: float = 0.0, high: float = 1.0) -> Init:
    return Init(bounds=(low, high))


def _filled(value: float | Tensor) -> Init | str:
    number = _number(value)
    return "it is filled with a value of another tensor" if number is None else Init(value=number)


def _zeros() -> Init:
    return Init()


def _listed(source: Tensor) -> Init | str:
    """Return a tensor's values: those of its last dims where they repeat along the first."""
    if source.is_meta:
        return f"it is computed from a parameter of more than {SMALL:,} elements"
    while source.dim() > 0 and (source.stride(0) == 0 or bool((source == source[:1]).all())):
        source = source[0]
    if source.numel() > LONGEST:
        return f"it is a table of {source.numel():,} values; at most {LONGEST:,} are listed"
    values = source.float().flatten().tolist()
    return Init(value=values[0]) if len(values) == 1 else Init(values=tuple(values))


_WRITES: dict[Any, Callable[..., Init | str]] = {
    _aten.normal_: _normal,
    _aten.uniform_: _uniform,
    _aten.fill_: _filled,
    _aten.zero_: _zeros,
}
"""By operator, a function from its arguments to the values that it writes to a whole tensor."""


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
