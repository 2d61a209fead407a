"""A causal language model of transformers without memory for its weights, and what it consists of.

A stage never repeats the model's forward: it calls the architecture's own, in which all layers but
its own pass their input on (`Skeleton.around`).
"""

import copy
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from inspect import signature
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from parallel3d.models.transformers import attention, experts
from parallel3d.models.transformers.facts import Unsupported
from parallel3d.models.transformers.plans import plan_of
from parallel3d.models.transformers.stand_ins import Arguments, Given, Heard, Nothing, Port, Same

IMPLEMENTATION = "parallel3d"
"""The name of the library's functions in the interfaces of transformers."""
_MIXERS = re.compile(r"Conv(?!1D)|Mamba|SSM|Mixer|Delta|Recurrent|LinearAttention|RWKV|LSTM")
"""In the names of classes that mix tokens without attention (GPT-2's Conv1D is linear)."""
_PROBE = (2, 8)  # the batch and the sequence of the forward that is watched


class _EmptyOnMeta(TorchFunctionMode):
    """`torch.empty` takes no memory inside: modules make their weights by it, buffers by values."""

    def __torch_function__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        kwargs = kwargs or {}
        if func is torch.empty:
            kwargs = kwargs | {"device": "meta"}
        return func(*args, **kwargs)


class _MixedWithMeta(TorchDispatchMode):
    """Operators of tensors on the meta device and others give tensors on the meta device."""

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        seen: list[bool] = []

        def look(value: object) -> None:
            if isinstance(value, Tensor):
                seen.append(value.is_meta)

        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise Unsupported(
                f"draws random numbers ({func.__name__}), which would depend on the mesh; set its "
                "probabilities of dropout to 0"
            )
        tree_map(look, (args, kwargs))
        if any(seen) and not all(seen):
            args, kwargs = tree_map(_on_meta, (args, kwargs))
        return func(*args, **kwargs)


def _on_meta(value: object) -> object:
    return value.to("meta") if isinstance(value, Tensor) else value


@dataclass
class Watched:
    """The findings of one forward and backward on the meta device.

    - `tuples`: the layers that return tuples.
    - `before`, `after`: the modules of the base model that run before and after all layers, by
      name: those with weights, and norms without.
    - `calls`: the calls of attention functions, by the module that made them.
    - `without_gradient`: parameters that no gradient reached.
    """

    tuples: set[int] = field(default_factory=set)
    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    calls: dict[str, attention.Call] = field(default_factory=dict)
    without_gradient: list[str] = field(default_factory=list)


class Logits(NamedTuple):
    """The function that a model applies to the products with its output projection, z.

    They become softcap * tanh(scale * z / softcap), or scale * z if softcap is None.
    """

    scale: float = 1.0
    softcap: float | None = None


class Skeleton:
    """The parts of a causal language model of transformers; its parameters are on the meta device.

    - `model`: the whole model. `base`: the part without the output projection, at `prefix`.
    - `list`: the name of the base's list of layers. `token`: that of its table of tokens.
    - `output`: the name of the output projection in the model.
    - `plan`: the style of each linear layer under tensor parallelism (`plan_of`).

    Raises Unsupported, with the reason, for a model that cannot be cut into stages.
    """

    def __init__(self, settings: Any) -> None:
        adds_balance = getattr(settings, "output_router_logits", False)
        settings.output_router_logits = False  # no stage has the scores of all layers
        self.model = _built(settings)
        self.settings: Any = self.model.config
        base = self.model.get_decoder()
        self.base: nn.Module = self.model.base_model if base is self.model else base
        self.prefix = _name_of(self.base, self.model)
        self.list = self._find_layers()
        self.layers = list(getattr(self.base, self.list))
        table = self.model.get_input_embeddings()
        output = self.model.get_output_embeddings()
        if type(output) is not nn.Linear:  # a class of its own may do more than a product
            raise Unsupported("has no plain linear output projection")
        self.output = _name_of(output, self.model)
        self.plan = plan_of(settings)
        self.watched = self._watch()
        self.token = next((n for n in self.watched.before if getattr(self.base, n) is table), "")
        if not self.token:
            raise Unsupported("does not look its tokens up in a table of the base model first")
        self._check_parameters()
        _ = self.rms_norms  # tried here, not where ZeRO-3 changes how tensors are made
        self._device = torch.device("cpu")
        self.width = 1
        self.is_alone = False
        self.width = self._find_width()
        self.is_alone = self._tries_alone()
        self.has_plain_table = self._tries_table()
        self.logits = self._find_logits()
        self.balance = experts.balance_of(self.model) if adds_balance else 0.0

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each parameter and bias of scores, by its name in transformers."""
        stored = {**self.model.state_dict()}
        return {name: tuple(x.shape) for name, x in stored.items() if name not in self.constants}

    @cached_property
    def constants(self) -> list[str]:
        """The buffers that transformers saves with the weights, but for biases of scores."""
        names = set(self.model.state_dict())
        for name, _ in self.model.named_parameters(remove_duplicate=False):
            names.discard(name)
        for number, layer in enumerate(self.layers):
            for name in named_biases(layer):
                names.discard(f"{self.prefix}.{self.list}.{number}.{name}".removeprefix("."))
        return sorted(names)

    def saved(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors that `save_pretrained` writes for some of the model's own."""
        saved: dict[str, Tensor] = revert_weight_conversion(self.model, weights)
        return saved

    @property
    def is_tied(self) -> bool:
        """True if the output projection has the table's weight."""
        table = self.model.get_input_embeddings()
        return bool(
            self.model.get_output_embeddings().weight is table.weight
            or self.settings.tie_word_embeddings
        )

    @property
    def has_interface(self) -> bool:
        """True if the attention is computed by the library's function."""
        return bool(self.settings._attn_implementation == IMPLEMENTATION)

    @property
    def isolates(self) -> bool:
        """True if only the library's attention mixes tokens, at positions that can be given.

        Each layer calls it, and has nothing else that is known to mix them: a convolution, or
        states that one token hands to the next.
        """
        prefix = f"{self.prefix}." if self.prefix else ""
        for number, layer in enumerate(self.layers):
            place = f"{prefix}{self.list}.{number}."
            if not any(name.startswith(place) for name in self.watched.calls):
                return False
            kinds = {type(module).__name__ for module in layer.modules()}
            if any(_MIXERS.search(kind) for kind in kinds):
                return False
        takes_positions = "position_ids" in signature(self.base.forward).parameters
        return self.has_interface and takes_positions

    def around(
        self, number: int, layer: nn.Module | None, replaced: Mapping[str, nn.Module]
    ) -> tuple[nn.Module, Port]:
        """Return the base model around one layer, and the port at this layer.

        Its own modules before and after the layers do nothing, unless they are `replaced`.
        """
        numbers = [number] if self.is_alone else range(len(self.layers))
        ports = {
            i: Port(self.layers[i], i in self.watched.tuples, layer if i == number else None)
            for i in numbers
        }
        base = _shallow(self.base)
        base._modules[self.list] = nn.ModuleList(ports.values())
        if self.is_alone:
            base.config = self._config_at(number)
        for name in (*self.watched.before, *self.watched.after):
            is_table = isinstance(getattr(self.base, name), nn.Embedding)
            base._modules[name] = Nothing() if is_table else Same()
        base._modules.update(replaced)
        return base, ports[number]

    def whole(self, base: nn.Module, output: nn.Module) -> nn.Module:
        """Return the model around another base and another output projection."""
        model = _with_module(self.model, self.prefix, base)
        return _with_module(model, self.output, output)

    @cached_property
    def rms_norms(self) -> dict[nn.Module, float]:
        """The modules that compute an RMSNorm, found by trying, with their eps.

        Those of transformers keep copies in fp32 for the backward, a fused kernel does not.
        """
        known: dict[object, bool] = {}
        found = {}
        for module in self.model.modules():
            eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
            names = [name for name, _ in module.named_parameters()]
            if names != ["weight"] or not isinstance(eps, float) or module._buffers:
                continue
            key = type(module), eps, tuple(module.get_parameter("weight").shape)
            if key not in known:
                known[key] = _computes_rms_norm(module, eps)
            if known[key]:
                found[module] = eps
        return found

    def move_buffers(self, device: torch.device) -> None:
        """Move the tables that the model's own modules hold (frequencies) to a device, once."""
        if device == self._device:
            return
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)
        self._device = device

    def inputs_of(self, batch: int, seq: int, like: Tensor) -> dict[str, Any]:
        """Return inputs in place of embeddings that no layer reads, and without a cache."""
        embeddings = like.new_zeros(1).expand(batch, seq, self.width)
        positions = torch.arange(seq, device=like.device).unsqueeze(0)
        return {"inputs_embeds": embeddings, "position_ids": positions, "use_cache": False}

    def _find_width(self) -> int:
        """Return the width of embeddings that no layer reads: 1, unless the model needs all.

        With 1, what it does with them costs nothing.
        """
        hidden = int(self.settings.hidden_size)
        given = torch.ones(1, 2, hidden)
        base, port = self.around(len(self.layers) - 1, None, {})
        port.is_open = True
        port.given = given
        heard = Heard()
        model: Any = self.whole(base, heard)
        # Broad: a model may fail in its own way.
        with suppress(Exception), torch.no_grad():
            model(**self.inputs_of(1, 2, given))
        return 1 if heard.shape == given.shape else hidden

    def _config_at(self, number: int) -> Any:
        """Return the base's config in which lists with an entry for each layer have one alone."""
        own = copy.copy(self.base.config)
        for name, value in vars(own).items():
            if isinstance(value, list) and len(value) == len(self.layers):
                vars(own)[name] = [value[number]]
        return own

    def _tries_alone(self) -> bool:
        """Return True if a layer that is the only one in the list gets what it gets among all.

        Then the model need not walk past the others, which takes the host 8 µs for each.
        """
        try:
            among_all = [self._inputs_at(number) for number in range(len(self.layers))]
            self.is_alone = True
            alone = [self._inputs_at(number) for number in range(len(self.layers))]
        except Exception:  # broad: a model may count its layers in its own way
            return False
        finally:
            self.is_alone = False
        return all(map(_are_equal, among_all, alone))

    def _inputs_at(self, number: int) -> object:
        """Return the arguments of a layer beside its input, and what follows the layers gets."""
        heard = Arguments()
        base, port = self.around(number, heard, {})
        port.is_open = True
        port.given = torch.ones(1, 4, self.settings.hidden_size)
        with torch.no_grad():
            output = base(**self.inputs_of(1, 4, port.given))
        return heard.values, output[0]

    def _tries_table(self) -> bool:
        """Return True if the layers begin with what the table of tokens gives, unchanged."""
        if self.watched.before != [self.token]:
            return False
        x = torch.randn(1, 4, self.settings.hidden_size, generator=torch.Generator().manual_seed(0))
        base, port = self.around(0, None, {self.token: Given(x)})
        port.is_open = True
        inputs = self.inputs_of(1, 4, x)
        inputs["inputs_embeds"] = None
        with suppress(Exception), torch.no_grad():  # broad: a model may fail in its own way
            base(**inputs, input_ids=torch.zeros(1, 4, dtype=torch.int64))
            return port.heard is not None and torch.equal(port.heard, x)
        return False

    def _find_layers(self) -> str:
        count = self.settings.num_hidden_layers
        for name, module in self.base.named_children():
            if isinstance(module, nn.ModuleList) and len(module) == count:
                return name
        raise Unsupported(f"has no list of its {count} layers (num_hidden_layers)")

    def _watch(self) -> Watched:
        """Run the model forward and backward on the meta device, and note what happens."""
        found = Watched()
        order: list[str] = []
        states: dict[int, int] = {}  # tensors that a layer returned besides the stream
        hooks = []
        names = {module: name for name, module in self.model.named_modules()}

        def leave(number: int, _: nn.Module, output: object) -> None:
            parts = output if isinstance(output, tuple) else (output,)
            if isinstance(output, tuple):
                found.tuples.add(number)
            shape = (*_PROBE, self.settings.hidden_size)
            if not isinstance(parts[0], Tensor) or tuple(parts[0].shape) != shape:
                raise Unsupported("has layers that pass on more than one stream of [hidden_size]")
            states.update({id(x): number for x in parts[1:] if isinstance(x, Tensor)})
            kept.extend(parts)

        def enter(number: int, _: nn.Module, args: Any, kwargs: Any) -> None:
            order.append("")
            for value in (*args, *kwargs.values()):
                if id(value) in states:
                    raise Unsupported(
                        f"passes a state from layer {states[id(value)]} to layer {number}, besides "
                        "the stream"
                    )

        def pass_through(name: str, child: nn.Module, output: object) -> None:
            shape = (*_PROBE, self.settings.hidden_size)
            changes = isinstance(output, Tensor) and tuple(output.shape) == shape
            if _has_parameters(child) or (changes and not isinstance(child, nn.Dropout)):
                order.append(name)

        kept: list[object] = []  # so that no id is given twice
        dropouts = [m for m in self.model.modules() if isinstance(m, nn.Dropout)]
        probabilities = [module.p for module in dropouts]
        for module in dropouts:  # the library's take their places
            module.p = 0.0
        for number, layer in enumerate(self.layers):
            enter_hook = _bound(enter, number)
            hooks.append(layer.register_forward_pre_hook(enter_hook, with_kwargs=True))
            hooks.append(layer.register_forward_hook(_without_input(leave, number)))
        for name, child in self.base.named_children():
            if name != self.list:
                hooks.append(child.register_forward_hook(_without_input(pass_through, name)))
        tokens = torch.zeros(_PROBE, dtype=torch.int64)
        positions = torch.arange(_PROBE[1]).expand(_PROBE)
        try:
            mixed = _MixedWithMeta()  # type: ignore[no-untyped-call]
            with mixed, attention.recorded(IMPLEMENTATION) as calls:
                output = self.model(input_ids=tokens, position_ids=positions, use_cache=False)
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
            for module, p in zip(dropouts, probabilities, strict=True):
                module.p = p
        first = order.index("") if "" in order else len(order)
        last = len(order) - order[::-1].index("") if "" in order else 0
        found.before = list(dict.fromkeys(order[:first]))
        found.after = list(dict.fromkeys(order[last:]))
        found.calls = {names[module]: call for module, call in calls.items()}
        for name, parameter in self.model.named_parameters():
            if parameter.grad is None:
                found.without_gradient.append(name)
            parameter.grad = None
        return found

    def _find_logits(self) -> Logits:
        """Find out by trying what the model does to the products with its output projection."""
        z = torch.tensor([1e-4, -1e-3, 0.1, 1.0, -3.0, 10.0, 50.0, 1e12]).view(1, 1, -1)
        base, _ = self.around(0, None, {})
        model: Any = self.whole(base, Given(z))
        with torch.no_grad():
            y = model(**self.inputs_of(1, 1, z)).logits
        scale = float(y[0, 0, 0] / z[0, 0, 0])
        if torch.allclose(y, scale * z, rtol=1e-4):
            return Logits(scale if abs(scale - 1) > 1e-6 else 1.0)
        softcap = float(y[0, 0, -1])
        if torch.allclose(y, softcap * torch.tanh(scale * z / softcap), rtol=1e-3):
            return Logits(scale if abs(scale - 1) > 1e-3 else 1.0, softcap)
        raise Unsupported("changes its logits in another way than by a factor and a soft-cap")

    def _check_parameters(self) -> None:
        """Raise Unsupported for parameters that no stage would have, or that do not train."""
        known = [f"{self.prefix}.{self.list}.", f"{self.output}."]
        for name in (*self.watched.before, *self.watched.after):
            known.append(f"{self.prefix}.{name}.")
        for name in self.watched.before:
            if name in self.watched.after and _has_parameters(getattr(self.base, name)):
                raise Unsupported(f"uses {name} before and after its layers")
        seen: dict[int, str] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if not name.startswith(tuple(known)):
                raise Unsupported(f"has the parameter {name} outside its layers")
            first = seen.setdefault(id(parameter), name)
            if first != name and not (name.startswith(self.output) and self.is_tied):
                raise Unsupported(f"shares the parameter {first} with {name}")
        if self.watched.without_gradient:
            first = self.watched.without_gradient[0]
            raise Unsupported(f"has the parameter {first}, which gets no gradient")


def biases_of(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's own biases of experts' scores: buffers of zeros that are saved, by name.

    They have no gradient, and a published model has values in them.
    """
    found: dict[str, Tensor] = {}
    for name, buffer in module._buffers.items():
        if buffer is None or name in module._non_persistent_buffers_set:
            continue
        is_zero = buffer.is_meta or not buffer.any()
        if buffer.dim() == 1 and buffer.is_floating_point() and is_zero:
            found[name] = buffer
    return found


def named_biases(layer: nn.Module) -> dict[str, Tensor]:
    """Return the biases of experts' scores in a layer, by name."""
    found = {}
    for name, module in layer.named_modules():
        for leaf, bias in biases_of(module).items():
            found[f"{name}.{leaf}".removeprefix(".")] = bias
    return found


def _built(settings: Any) -> PreTrainedModel:
    """Return the model of a config with its buffers, and its parameters on the meta device."""
    kind = type(settings)
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise Unsupported(f"is no causal language model of transformers ({settings.model_type})")
    if settings.is_encoder_decoder:
        raise Unsupported("has an encoder")
    chosen = MODEL_FOR_CAUSAL_LM_MAPPING[kind]
    own_attention = attention.implementation_of(chosen, IMPLEMENTATION)
    with init_empty_weights(include_buffers=False), no_init_weights(), _EmptyOnMeta():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            settings,
            dtype=torch.float32,
            attn_implementation=own_attention,
            experts_implementation="eager",
        )
    experts.register(IMPLEMENTATION)
    for module in model.modules():  # transformers refuses names of others, but runs them
        if isinstance(getattr(module, "config", None), PreTrainedConfig):
            module.config._experts_implementation_internal = IMPLEMENTATION
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise Unsupported(f"has the buffer {name} without values")
    return model.train()


def _computes_rms_norm(module: nn.Module, eps: float) -> bool:
    """Return True if a module with one weight and an eps gives what an RMSNorm would."""
    shape = module.get_parameter("weight").shape
    if len(shape) != 1 or shape[0] < 2:
        return False
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, *shape, generator=generator)
    weight = torch.randn(shape, generator=generator)
    trial: Any = copy.copy(module)
    object.__setattr__(trial, "_parameters", {"weight": weight})
    try:
        y = trial(x)
    except Exception:  # broad: a module may want other inputs
        return False
    return torch.allclose(y, F.rms_norm(x, shape, weight, eps), rtol=1e-5, atol=1e-6)


def _are_equal(one: object, other: object) -> bool:
    """Return True if nested values are equal, tensors in each element."""
    values, form = tree_flatten(one)
    others, other_form = tree_flatten(other)
    if form != other_form:
        return False
    for x, y in zip(values, others, strict=True):
        if isinstance(x, Tensor) and isinstance(y, Tensor):
            if not torch.equal(x, y):
                return False
        elif x is not y and x != y:
            return False
    return True


def _bound(function: Callable[..., None], first: object) -> Callable[..., None]:
    def hook(*args: object) -> None:
        function(first, *args)

    return hook


def _without_input(function: Callable[..., None], first: object) -> Callable[..., None]:
    def hook(module: nn.Module, _: object, output: object) -> None:
        function(first, module, output)

    return hook


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _name_of(module: nn.Module, inside: nn.Module) -> str:
    names: dict[nn.Module, str] = {own: name for name, own in inside.named_modules()}
    return names[module]


def _shallow(module: nn.Module) -> nn.Module:
    """Return a copy of a module that shares its parts, which can be replaced."""
    shell = copy.copy(module)
    object.__setattr__(shell, "_modules", dict(module._modules))
    return shell


def _with_module(module: nn.Module, path: str, value: nn.Module) -> nn.Module:
    """Return a shallow copy of a module with another module at a path."""
    shell = _shallow(module)
    head, _, rest = path.partition(".")
    inner = module._modules[head]
    assert inner is not None, path
    shell._modules[head] = _with_module(inner, rest, value) if rest else value
    return shell
