"""Watches a model of transformers run on the meta device: what it calls, passes on and trains."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from parallel3d.models.transformers import attention
from parallel3d.models.transformers.facts import Unsupported
from parallel3d.models.transformers.on_meta import MixedWithMeta, tables_kept

IMPLEMENTATION = "parallel3d"
"""The name of the library's functions in the interfaces of transformers."""
_PROBE = (2, 8)  # the batch and the sequence of the forward that is watched


@dataclass
class Watched:
    """The findings of one forward and backward on the meta device.

    - `tuples`: the layers that return tuples, and how many values those have.
    - `before`, `after`: the modules of the base model that run before and after all layers, by
      name: those with weights, and norms without.
    - `calls`: the calls of attention functions, by the module that made them.
    - `without_gradient`: parameters that no gradient reached.
    - `counts`: a layer counts the tokens that it gets, whatever their positions.
    - `choices`: the experts that each token is sent to, by the name of their module.
    - `plain`: the modules without parts of their own that were called, with one tensor and nothing
      else, by name. Another one's weight may be read by its parent.
    """

    tuples: dict[int, int] = field(default_factory=dict)
    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    calls: dict[str, attention.Call] = field(default_factory=dict)
    without_gradient: list[str] = field(default_factory=list)
    plain: set[str] = field(default_factory=set)
    counts: bool = False
    choices: dict[str, int] = field(default_factory=dict)


def watch(skeleton: Any) -> Watched:
    """Run a skeleton's model forward and backward on the meta device, and note what happens."""
    found = Watched()
    order: list[str] = []
    states: dict[int, int] = {}  # tensors that a layer returned besides the stream
    hooks = []
    names = {module: name for name, module in skeleton.model.named_modules()}

    mixed = MixedWithMeta(_noises_in(skeleton.settings))

    def leave(number: int, _: nn.Module, output: object) -> None:
        mixed.is_in_layer = False
        parts = output if isinstance(output, tuple) else (output,)
        if isinstance(output, tuple):
            found.tuples[number] = len(output)
        shape = (*_PROBE, skeleton.settings.hidden_size)
        if not isinstance(parts[0], Tensor) or tuple(parts[0].shape) != shape:
            raise Unsupported("has layers that pass on more than one stream of [hidden_size]")
        states.update({id(x): number for x in parts[1:] if isinstance(x, Tensor)})
        kept.extend(parts)

    def enter(number: int, _: nn.Module, args: Any, kwargs: Any) -> None:
        order.append("")
        mixed.is_in_layer = True
        for value in (*args, *kwargs.values()):
            if id(value) in states:
                raise Unsupported(
                    f"passes a state from layer {states[id(value)]} to layer {number}, besides "
                    "the stream"
                )

    def pass_through(name: str, child: nn.Module, output: object) -> None:
        shape = (*_PROBE, skeleton.settings.hidden_size)
        changes = isinstance(output, Tensor) and tuple(output.shape) == shape
        if has_parameters(child) or (changes and not isinstance(child, nn.Dropout)):
            order.append(name)

    def call(name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        (odd if kwargs or len(args) != 1 else found.plain).add(name)

    odd: set[str] = set()
    for module, name in names.items():
        if not module._modules:
            called = _bound(call, name)
            hooks.append(module.register_forward_pre_hook(called, with_kwargs=True))
    kept: list[object] = []  # so that no id is given twice
    dropouts = [m for m in skeleton.model.modules() if isinstance(m, nn.Dropout)]
    for module in dropouts:  # the library's take their places; attention reads their probability
        module.training = False
    for number, layer in enumerate(skeleton.layers):
        enter_hook = _bound(enter, number)
        hooks.append(layer.register_forward_pre_hook(enter_hook, with_kwargs=True))
        hooks.append(layer.register_forward_hook(_without_input(leave, number)))
    for name, child in skeleton.base.named_children():
        if name != skeleton.list:
            hooks.append(child.register_forward_hook(_without_input(pass_through, name)))
    tokens = torch.zeros(_PROBE, dtype=torch.int64)
    positions = torch.arange(_PROBE[1]).expand(_PROBE)
    try:
        with (
            mixed,
            tables_kept(skeleton.model),
            attention.recorded(IMPLEMENTATION) as calls,
        ):
            output = skeleton.model(input_ids=tokens, position_ids=positions, use_cache=False)
            output.logits.float().sum().backward()
    except Unsupported:
        raise
    # Broad: the modules of an architecture raise errors of many types.
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise Unsupported(f"cannot be traced without data ({reason})") from None
    finally:
        for hook in hooks:
            hook.remove()
        for module in dropouts:
            module.training = True
    first = order.index("") if "" in order else len(order)
    last = len(order) - order[::-1].index("") if "" in order else 0
    found.before = list(dict.fromkeys(order[:first]))
    found.after = list(dict.fromkeys(order[last:]))
    found.plain -= odd
    found.counts = mixed.counts
    for module, name in names.items():
        if hasattr(module, "parallel3d_choices"):
            found.choices[name] = module.parallel3d_choices
    found.calls = {names[module]: call for module, call in calls.items()}
    for name, parameter in skeleton.model.named_parameters():
        if parameter.grad is None:
            found.without_gradient.append(name)
        parameter.grad = None
    return found


def check_parameters(skeleton: Any) -> None:
    """Raise Unsupported for parameters that no stage would have, or that do not train."""
    known = [f"{skeleton.prefix}.{skeleton.list}.", f"{skeleton.output}."]
    for name in (*skeleton.watched.before, *skeleton.watched.after):
        known.append(f"{skeleton.prefix}.{name}.")
    for name in skeleton.watched.before:
        if name in skeleton.watched.after and has_parameters(getattr(skeleton.base, name)):
            raise Unsupported(f"uses {name} before and after its layers")
    seen: dict[int, str] = {}
    for name, parameter in skeleton.model.named_parameters(remove_duplicate=False):
        if not name.startswith(tuple(known)):
            raise Unsupported(f"has the parameter {name} outside its layers")
        first = seen.setdefault(id(parameter), name)
        if first != name and not (name.startswith(skeleton.output) and skeleton.is_tied):
            raise Unsupported(f"shares the parameter {first} with {name}")
    if skeleton.watched.without_gradient:
        first = skeleton.watched.without_gradient[0]
        raise Unsupported(f"has the parameter {first}, which gets no gradient")


def _noises_in(settings: Any) -> list[str]:
    """Return the fields of a config that are probabilities of dropout, or jitter, above 0.

    Those of attention are left out if there are others: the library's attention has dropout.
    """
    found = []
    for name, value in settings.to_dict().items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if ("drop" in name or "jitter" in name) and is_number and value > 0:
            found.append(name)
    others = [name for name in found if "att" not in name]
    return others or found


def _bound(function: Callable[..., None], first: object) -> Callable[..., None]:
    def hook(*args: object) -> None:
        function(first, *args)

    return hook


def _without_input(function: Callable[..., None], first: object) -> Callable[..., None]:
    def hook(module: nn.Module, _: object, output: object) -> None:
        function(first, module, output)

    return hook


def has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
